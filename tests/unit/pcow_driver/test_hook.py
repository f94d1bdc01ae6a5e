# SPDX-License-Identifier: Apache-2.0
"""The libvirt hook: real files and ACLs.  With a real chain: tests/functional/test_pcowctl.py."""

from collections.abc import Iterator
import contextlib
import errno
import functools
import json
import os
from pathlib import Path
import pwd
import shutil
import stat
import subprocess
import sys
from typing import Any
from unittest import mock
import uuid as uuidlib

import fixtures

from pcow_driver.virt import disk_xml
from tests.unit.pcow_driver import base

HOOK = base.TOP / 'etc/libvirt/hooks/qemu.d/pcow'
XML = """<domain type='kvm'><name>vm</name><devices>
 <memory model='nvdimm' access='shared'><source><path>{}</path></source></memory>
 <memory model='nvdimm' access='shared'><source><path>/dev/dax0.0</path></source></memory>
 <memory model='dimm'><source/></memory>
 <disk type='file'><source file='/pool/disk.pcow'/></disk>
</devices>{}</domain>"""
UUID = '6f0c1c52-5d1e-4c0b-9a3f-2b7e4f90d1a6'
NOBODY = pwd.getpwnam('nobody')


hook = base.load_script(HOOK)


def make_image(path: Path, uuid: str | None = None, *, sealed: bool = False) -> None:
    """As much of it as the hook reads; of format 1 without a UUID."""
    header = bytearray(4096)
    header[:8] = hook.MAGIC
    header[8] = 2 if uuid else 1
    header[40:56] = uuidlib.UUID(uuid or hook.NO_UUID).bytes
    header[552] = int(sealed)
    path.write_bytes(header)


class ParseTest(base.TestCase):
    def test_only_pcow_nvdimms_count(self) -> None:
        self.assertEqual(['/pool/vm.pcow'], hook.images(XML.format('/pool/vm.pcow', '')))
        self.assertEqual([], hook.images(XML.format('vm.pcow', '')))
        self.assertRaises(hook.HookError, hook.images, '<domain>')

    def test_user_of_the_domain(self) -> None:
        for label in ('nobody:nogroup', f'+{NOBODY.pw_uid}:+0', f'{NOBODY.pw_uid}'):
            xml = XML.format(
                '/x', f"<seclabel type='static' model='dac'><label>{label}</label></seclabel>"
            )
            self.assertEqual(NOBODY, hook.qemu_user(xml, '/no/such/file'))

    def test_user_of_the_configuration(self) -> None:
        path = self.directory / 'qemu.conf'
        path.write_text('#user = "root"\n user = "nobody"\n')
        self.assertEqual(NOBODY, hook.qemu_user(XML.format('/x', ''), str(path)))
        path.write_text('user = "no-such-user-here"\n')
        self.assertRaises(hook.HookError, hook.qemu_user, None, str(path))

    def test_program_of_the_configuration(self) -> None:
        program = self.script('pcow-img', '#!/bin/sh\n')
        path = self.directory / 'pcow.conf'
        path.write_text(f'[DEFAULT]\n[pcow]\npcow_img = {program}\n')
        self.assertEqual(program, hook.pcow_img(str(path)))
        path.write_text('[pcow]\npcow_img = /no/such/program\n')
        self.assertRaises(hook.HookError, hook.pcow_img, str(path))
        path.write_text('nonsense')
        self.assertRaises(hook.HookError, hook.pcow_img, str(path))


class BasesTest(base.TestCase):
    def _change(self, chain: list[dict[str, Any]]) -> None:
        """What a test wants otherwise."""

    def _bases(self, *filenames: str) -> list[str]:
        uuids: list[str] = [
            f'493aeedc-b05d-49b5-84cc-{number:012}' for number in range(len(filenames) + 2)
        ]
        chain: list[dict[str, Any]] = [
            {'filename': name, 'format-specific': {'data': {'uuid': uuid, 'base-uuid': base_uuid}}}
            for name, uuid, base_uuid in zip(('x', *filenames), uuids, uuids[1:], strict=False)
        ]
        self._change(chain)
        for one in chain[1:]:
            path = self.directory / str(one['filename'])
            if path.parent.is_dir() and not path.exists():
                make_image(path, one['format-specific']['data'].get('uuid'))
                path.chmod(0o640)
        (self.directory / 'chain.json').write_text(json.dumps(chain))
        program = self.script('pcow-img', f'#!/bin/sh\ncat {self.directory}/chain.json\n')
        found: list[str] = hook.bases(program, str(self.directory / 'vm.pcow'))
        return found

    def test_in_the_same_directory(self) -> None:
        directory = os.path.realpath(self.directory)
        self.assertEqual([], self._bases())
        self.assertEqual(
            [f'{directory}/a.pcow', f'{directory}/b.pcow'],
            self._bases('a.pcow', str(self.directory / 'b.pcow')),
        )

    def test_nowhere_else(self) -> None:
        (self.directory / 'sub').mkdir()
        for name in ('/etc/passwd', '../x.pcow', 'sub/x.pcow', f'{self.directory}/sub/../../x'):
            error = self.assertRaises(hook.HookError, self._bases, 'a.pcow', name)
            self.assertIn(name, str(error))

    def test_only_the_base_that_was_recorded(self) -> None:
        """A guest that has broken out writes another name, or that nobody shall compare, but it
        does not know the UUID.
        """
        other, none = '00000000-1111-2222-3333-444444444444', hook.NO_UUID
        for number, change in enumerate(({'base-uuid': other}, {'base-uuid': none}, None)):

            def write(chain: list[dict[str, Any]], change: dict[str, str] | None = change) -> None:
                data = chain[0]['format-specific']['data']
                data.update(change or {})
                if change is None:
                    del data['base-uuid']

            self._change = write  # type: ignore[method-assign]
            error = self.assertRaises(hook.HookError, self._bases, f'{number}.pcow')
            self.assertIn('is not the one that it was made on', str(error))

    def test_bases_without_a_uuid_are_those_that_everybody_may_read(self) -> None:
        def write(chain: list[dict[str, Any]]) -> None:
            chain[0]['format-specific']['data']['base-uuid'] = hook.NO_UUID
            del chain[1]['format-specific']['data']['uuid']

        self._change = write  # type: ignore[method-assign]
        path = self.directory / 'old.pcow'
        self.assertRaises(hook.HookError, self._bases, 'old.pcow')
        path.chmod(0o644)
        self.assertEqual([os.path.realpath(path)], self._bases('old.pcow'))

    def test_identity_is_that_of_the_file(self) -> None:
        """Not what was said of one that had the name before."""

        def write(chain: list[dict[str, Any]]) -> None:
            make_image(self.directory / 'a.pcow', '00000000-1111-2222-3333-444444444444')

        self._change = write  # type: ignore[method-assign]
        error = self.assertRaises(hook.HookError, self._bases, 'a.pcow')
        self.assertIn('UUID 00000000-1111-2222-3333-444444444444', str(error))
        os.unlink(self.directory / 'a.pcow')
        del self._change
        self._bases('a.pcow')
        self.directory.joinpath('a.pcow').rename(self.directory / 'b.pcow')
        (self.directory / 'a.pcow').symlink_to('b.pcow')
        self.assertRaises(hook.HookError, self._bases, 'a.pcow')

    def test_pcow_img_works_in_the_directory_that_was_walked(self) -> None:
        program = self.script('pcow-img', f'#!/bin/sh\npwd -P >{self.directory}/said; echo "$@"\n')
        (self.directory / 'root').symlink_to(self.directory)
        self.assertRaises(hook.HookError, hook.bases, program, str(self.directory / 'root/vm.pcow'))
        self.assertEqual(
            os.path.realpath(self.directory), (self.directory / 'said').read_text().strip()
        )

    def test_links_of_somebody_else_on_the_way(self) -> None:
        """A service's directory: it chooses what its link leads to, and when."""
        service = self.directory / 'service'
        (service / 'own').mkdir(parents=True)
        (service / 'link').symlink_to(self.directory)
        os.chown(service / 'link', 65534, 65534, follow_symlinks=False)
        image = str(service / 'link/vm.pcow')
        program = self.script('pcow-img', '#!/bin/sh\nexit 1\n')
        for call in (
            lambda: hook.bases(program, image),
            lambda: hook.real(image),
            lambda: hook.grant_ram(image, NOBODY, UUID),
            lambda: hook.rules([], [image]),
        ):
            self.assertIn('is a link of user 65534', str(self.assertRaises(hook.HookError, call)))
        os.chown(service / 'link', 0, 0, follow_symlinks=False)
        self.assertEqual(f'{os.path.realpath(self.directory)}/vm.pcow', hook.real(image))
        (service / 'own/up').symlink_to('../link/service/./own')
        self.assertEqual(f'{os.path.realpath(service)}/own/x', hook.real(f'{service}//own/up/x'))
        (service / 'loop').symlink_to('loop')
        self.assertRaises(hook.HookError, hook.real, str(service / 'loop/x'))
        self.assertEqual('/no/such/file', hook.real('/no/such/file'))

    def test_nonsense(self) -> None:
        for text in ('', '{}', '[]x', '[{}, 3]', '[{}, {"name": "x"}]'):
            program = self.script('pcow-img', f"#!/bin/sh\necho '{text}'\n")
            self.assertRaises(hook.HookError, hook.bases, program, str(self.directory / 'vm.pcow'))
        program = self.script('pcow-img', '#!/bin/sh\necho broken >&2; exit 1\n')
        self.assertIn(
            'broken',
            str(
                self.assertRaises(
                    hook.HookError, hook.bases, program, str(self.directory / 'vm.pcow')
                )
            ),
        )


class GrantTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.path = str(self.directory / 'base.pcow')
        with open(self.path, 'w') as f:
            f.write('data')
        os.chmod(self.path, 0o640)

    @staticmethod
    def _grant(path: str, user: pwd.struct_passwd) -> None:
        with hook.opened(path, 'the base') as file:
            hook.grant_read(file, user)

    def _acl(self) -> dict[tuple[int, int], int]:
        fd = os.open(self.path, os.O_RDONLY)
        try:
            acl: dict[tuple[int, int], int] = hook.read_acl(fd)
        finally:
            os.close(fd)
        return acl

    def test_one_user_may_read_and_nothing_else_changes(self) -> None:
        before = self._acl()
        self._grant(self.path, NOBODY)
        acl = self._acl()
        self.assertEqual(hook.READ, acl.pop((hook.USER, NOBODY.pw_uid)))
        self.assertEqual(4, acl.pop((hook.MASK, hook.NO_ID)))
        self.assertEqual(before, acl)
        self._grant(self.path, NOBODY)
        self.assertEqual(hook.READ, self._acl()[hook.USER, NOBODY.pw_uid])

    def test_the_kernel_sees_it_so(self) -> None:
        os.chmod(self.path, 0o600)
        self._grant(self.path, NOBODY)
        # the mask shows as the group's permissions
        self.assertEqual(0o640, stat.S_IMODE(os.stat(self.path).st_mode))
        self.assertEqual(0, self._acl()[hook.GROUP_OBJ, hook.NO_ID])

    def test_other_entries_stay(self) -> None:
        self._grant(self.path, pwd.getpwnam('daemon'))
        self._grant(self.path, NOBODY)
        users = {
            number: permissions
            for (tag, number), permissions in self._acl().items()
            if tag == hook.USER
        }
        self.assertEqual({pwd.getpwnam('daemon').pw_uid: 4, NOBODY.pw_uid: 4}, users)

    def test_nothing_where_all_may_read(self) -> None:
        os.chmod(self.path, 0o644)
        self._grant(self.path, NOBODY)
        self.assertRaises(OSError, os.getxattr, self.path, hook.ACL_NAME)

    def test_label_where_selinux_runs(self) -> None:
        selinux = self.directory / 'selinux'
        self.useFixture(fixtures.MockPatchObject(hook, 'SELINUX_ENABLED', str(selinux)))
        with mock.patch.object(os, 'setxattr') as setxattr:
            self._grant(self.path, pwd.getpwnam('root'))
            setxattr.assert_not_called()
            selinux.mkdir()
            self._grant(self.path, pwd.getpwnam('root'))
            setxattr.assert_called_once_with(
                mock.ANY, 'security.selinux', b'system_u:object_r:pcow_base_t:s0\0'
            )

    def test_what_was_opened_is_what_is_changed(self) -> None:
        """Its name is another file's by now."""
        victim = self.directory / 'victim'
        victim.touch(0o600)
        with hook.opened(self.path, 'the base') as file:
            os.rename(self.path, f'{self.path}.moved')
            os.symlink(victim, self.path)
            hook.grant_read(file, NOBODY)
        self.assertRaises(OSError, os.getxattr, victim, hook.ACL_NAME)
        self.path += '.moved'
        self.assertEqual(hook.READ, self._acl()[hook.USER, NOBODY.pw_uid])

    def test_links_and_devices_are_refused(self) -> None:
        link = str(self.directory / 'link.pcow')
        os.symlink(self.path, link)
        pipe = str(self.directory / 'pipe.pcow')
        os.mkfifo(pipe)
        for path in (link, pipe, str(self.directory), str(self.directory / 'missing')):
            self.assertRaises(hook.HookError, self._grant, path, NOBODY)
        self.assertRaises(OSError, os.getxattr, self.path, hook.ACL_NAME)


RAM = """<domain id='7'><name>shortened-name</name>
<uuid>6f0c1c52-5d1e-4c0b-9a3f-2b7e4f90d1a6</uuid>
<metadata><ram xmlns='urn:pcow:domain' path='{}'/></metadata>
<memoryBacking><source type='file'/><access mode='shared'/></memoryBacking>
<cpu><numa><cell id='0' memory='8192'/>{}</numa></cpu>{}</domain>"""


@contextlib.contextmanager
def no_marks() -> Iterator[None]:
    """A file system that has no attributes of root."""

    def refuse(file: int, name: str, value: bytes = b'') -> None:
        if name == hook.MARK:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        setxattr(file, name, value)

    setxattr = os.setxattr
    with mock.patch.object(os, 'setxattr', refuse), mock.patch.object(os, 'removexattr', refuse):
        yield


class RamTest(base.TestCase):
    """Guest RAM on an image."""

    def setUp(self) -> None:
        super().setUp()
        self.path = str(self.directory / 'vm-ram.pcow')
        make_image(Path(self.path), UUID)
        os.chmod(self.path, 0o600)
        self.conf = self.directory / 'qemu.conf'
        self.conf.write_text(
            f'memory_backing_dir = "{self.directory}/memory"\nuser = "{NOBODY.pw_name}"\n'
        )
        self.memory = self.directory / 'memory/libvirt/qemu'
        self.memory.mkdir(parents=True)
        (self.memory / '77-other').mkdir()

    def _xml(self, cells: str = '', devices: str = '') -> str:
        return RAM.format(self.path, cells, devices)

    def _link(self, xml: str) -> None:
        hook.grant_ram(self.path, NOBODY, UUID)
        self._link_alone(xml)

    def _link_alone(self, xml: str) -> None:
        hook.link_ram(xml, self.path, str(self.conf))

    def test_is_an_image_of_the_domain(self) -> None:
        self.assertIsNone(hook.ram(XML.format('/x.pcow', '')))
        self.assertEqual(self.path, hook.ram(self._xml()))
        nvdimm = "<devices><memory model='nvdimm'><source><path>/x.pcow</path></source></memory>"
        self.assertEqual(
            ['/x.pcow', self.path], hook.images(self._xml(devices=f'{nvdimm}</devices>'))
        )

    def test_what_cannot_be_it(self) -> None:
        for path in ('', 'vm.pcow', '/etc/passwd'):
            self.assertRaises(hook.HookError, hook.ram, RAM.format(path, '', ''))
        error = self.assertRaises(hook.HookError, hook.ram, self._xml().replace('file', 'memfd'))
        self.assertIn('<memoryBacking>', str(error))

    def test_one_user_may_write_as_long_as_his_guest_runs(self) -> None:
        for mode in (0o600, 0o640):
            os.chmod(self.path, mode)
            hook.grant_ram(self.path, NOBODY, UUID)
            fd = os.open(self.path, os.O_RDONLY)
            self.addCleanup(os.close, fd)
            acl = hook.read_acl(fd)
            self.assertEqual(6, acl[hook.USER, NOBODY.pw_uid])
            self.assertEqual(mode >> 3 & 7, acl[hook.GROUP_OBJ, hook.NO_ID])
            self.assertEqual(0, acl[hook.OTHER, hook.NO_ID])
            hook.revoke_ram(self.path, NOBODY)
            self.assertRaises(OSError, os.getxattr, self.path, hook.ACL_NAME)
            self.assertEqual(mode, stat.S_IMODE(os.stat(self.path).st_mode))

    def test_who_may_already(self) -> None:
        hook.grant_ram(self.path, pwd.getpwuid(os.getuid()), UUID)
        self.assertRaises(OSError, os.getxattr, self.path, hook.ACL_NAME)

    def test_no_other_file_is_opened_to_anybody(self) -> None:
        link = str(self.directory / 'link.pcow')
        os.symlink(self.path, link)
        for path in (link, str(self.directory), str(self.directory / 'missing.pcow')):
            self.assertRaises(hook.HookError, hook.grant_ram, path, NOBODY, UUID)
            hook.revoke_ram(path, NOBODY)
        self.assertRaises(OSError, os.getxattr, self.path, hook.ACL_NAME)

    def test_not_with_selinux(self) -> None:
        self.useFixture(fixtures.MockPatchObject(hook, 'SELINUX_ENABLED', str(self.directory)))
        self.assertRaises(hook.HookError, hook.grant_ram, self.path, NOBODY, UUID)

    def test_no_other_file_becomes_it(self) -> None:
        """Who may write to the pool puts it there, before or after QEMU's user was let in."""
        (self.memory / '7-shortened-name').mkdir()
        error = self.assertRaises(hook.HookError, self._link_alone, self._xml())
        self.assertIn('another file was there', str(error))
        hook.grant_ram(self.path, NOBODY, UUID)
        os.rename(self.path, f'{self.path}.moved')
        make_image(Path(self.path), UUID)
        self.assertRaises(hook.HookError, self._link_alone, self._xml())
        for write in (
            lambda path: path.write_text('precious'),
            lambda path: make_image(path, UUID, sealed=True),
            make_image,
        ):
            write(Path(self.path))
            self.assertRaises(hook.HookError, hook.grant_ram, self.path, NOBODY, UUID)
            self.assertRaises(hook.HookError, self._link_alone, self._xml())
        self.assertRaises(OSError, os.getxattr, self.path, hook.ACL_NAME)
        self.assertEqual([], os.listdir(self.memory / '7-shortened-name'))

    def test_entry_that_was_there_before(self) -> None:
        """A default ACL of the pool's directory, for instance, gives more than the hook does."""
        (self.memory / '7-shortened-name').mkdir()
        fd = os.open(self.path, os.O_RDONLY)
        self.addCleanup(os.close, fd)
        acl = hook._with_entry(hook.read_acl(fd), NOBODY, 7)
        for marks in (True, False):
            hook.write_acl(fd, acl)
            with contextlib.nullcontext() if marks else no_marks():
                self._link(self._xml())
                hook.revoke_ram(self.path, NOBODY)

    def test_an_entry_is_no_identity(self) -> None:
        """Another image of the pool may have one, and have been opened for another domain."""
        (self.memory / '7-shortened-name').mkdir()
        for domain in (UUID, hook.NO_UUID):
            os.rename(self.path, f'{self.path}.prepared')
            make_image(Path(self.path), UUID)
            hook.grant_ram(self.path, NOBODY, domain)
            if domain == UUID:
                os.removexattr(self.path, hook.MARK)
            error = self.assertRaises(hook.HookError, self._link_alone, self._xml())
            self.assertIn('another file was there', str(error))

    def test_mark_is_for_one_start(self) -> None:
        (self.memory / '7-shortened-name').mkdir()
        self._link(self._xml())
        self.assertRaises(hook.HookError, self._link_alone, self._xml())
        hook.grant_ram(self.path, NOBODY, UUID)
        hook.revoke_ram(self.path, NOBODY)
        self.assertRaises(OSError, os.getxattr, self.path, hook.MARK)

    def test_no_other_file_where_none_can_be_marked(self) -> None:
        (self.memory / '7-shortened-name').mkdir()
        with no_marks():
            self.assertRaises(hook.HookError, self._link_alone, self._xml())
            self._link(self._xml())

    def test_link(self) -> None:
        (self.memory / '7-shortened-na').mkdir()
        self._link(self._xml())
        self.assertEqual(
            os.path.realpath(self.path), os.readlink(self.memory / '7-shortened-na/ram-node0')
        )
        (self.memory / '7-shortened-na/ram-node0').unlink()
        (self.memory / '7-shortened-na/ram-node0').mkdir()
        self.assertRaises(hook.HookError, self._link, self._xml())

    def test_what_a_power_cut_has_left(self) -> None:
        """Of a run of this domain and of another one's: their numbers come again."""
        own = self.memory / '7-shortened-name'
        for place in (own, self.memory / '7-short', self.memory / '7-other'):
            place.mkdir()
            (place / 'ram-node0').symlink_to('/elsewhere.pcow')
        self._link(self._xml())
        self.assertEqual(os.path.realpath(self.path), os.readlink(own / 'ram-node0'))
        # nor is it followed for a domain whose RAM is no image; a file is libvirt's own
        (own / 'pc.ram').touch()
        hook.unlink_ram(self._xml(), str(self.conf))
        self.assertEqual(['pc.ram'], os.listdir(own))
        hook.unlink_ram(self._xml().replace("id='7'", "id='8'"), str(self.conf))
        self._link(self._xml().replace("<cell id='0' memory='8192'/>", ''))
        self.assertTrue((own / 'pc.ram').is_symlink())

    def test_links_of_who_may_write_there(self) -> None:
        """QEMU's user owns the directory: root follows nothing in it."""
        victim = self.directory / 'victim'
        victim.mkdir()
        for name in ('ram-node0', 'pc.ram', 'lib'):
            (victim / name).symlink_to('/usr')
        (self.memory / '7-shortened-name').symlink_to(victim)
        self.assertRaises(hook.HookError, self._link, self._xml())
        hook.unlink_ram(self._xml(), str(self.conf))
        self.memory.rename(self.directory / 'elsewhere')
        self.memory.symlink_to(self.directory / 'elsewhere')
        self.assertRaises(hook.HookError, self._link, self._xml())
        hook.unlink_ram(self._xml(), str(self.conf))
        self.assertEqual(3, len(os.listdir(victim)))

    def test_configuration_that_is_not_utf_8(self) -> None:
        """No domain of the host may fail for it."""
        self.conf.write_bytes(b'# \xe9\n' + self.conf.read_bytes())
        (self.memory / '7-shortened-name').mkdir()
        hook.unlink_ram(self._xml(), str(self.conf))
        self._link(self._xml())

    def test_link_of_a_guest_without_numa(self) -> None:
        (self.memory / '7-shortened-name').mkdir()
        self._link(self._xml().replace("<cell id='0' memory='8192'/>", ''))
        self.assertEqual(['pc.ram'], os.listdir(self.memory / '7-shortened-name'))

    def test_no_place_for_a_link(self) -> None:
        self.assertRaises(hook.HookError, self._link, self._xml())
        (self.memory / '7-shortened-name').mkdir()
        self.assertRaises(hook.HookError, self._link, self._xml("<cell id='1' memory='8192'/>"))
        self.assertEqual([], os.listdir(self.memory / '7-shortened-name'))


class MainTest(base.TestCase):
    def _run(self, *args: str, xml: str = '') -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, '-I', '-B', HOOK, *args],
            input=xml,
            capture_output=True,
            text=True,
            check=False,
        )

    def test_needs_only_the_standard_library_and_ignores_what_is_not_its_business(self) -> None:
        self.useFixture(fixtures.EnvironmentVariable('PATH', ''))
        for args in (('vm', 'started', 'begin', '-'), ('vm', 'stopped', 'end', '-'), (), ('vm',)):
            done = self._run(*args, xml='not XML')
            self.assertEqual((0, '', ''), (done.returncode, done.stdout, done.stderr))
        for words in (('prepare', 'begin'), ('start', 'begin'), ('release', 'end')):
            done = self._run('vm', *words, '-', xml='<domain/>')
            self.assertEqual((0, '', ''), (done.returncode, done.stdout, done.stderr))

    def test_one_line_on_error(self) -> None:
        done = self._run('vm', 'prepare', 'begin', '-', xml='<domain')
        self.assertEqual(1, done.returncode)
        self.assertEqual(1, len(done.stderr.splitlines()))
        self.assertTrue(done.stderr.startswith('pcow: '), done.stderr)


class DisksTest(base.TestCase):
    """What the hook asks pcowctl for; what that does: virt/test_disk_server.py."""

    def setUp(self) -> None:
        super().setUp()
        self.log = self.directory / 'log'
        self.pcowctl = self.script(
            'pcowctl', f'#!/bin/sh\necho "$@" >>{self.log}; cat >{self.directory}/xml\n'
        )
        self.useFixture(
            fixtures.EnvironmentVariable('PATH', f'{self.directory}:{os.environ["PATH"]}')
        )
        self.xml = XML.format(
            '/x',
            f"<metadata><p:disks xmlns:p='{disk_xml.NAMESPACE}'/></metadata>"
            "<seclabel type='dynamic' model='dac'><label>+0:+107</label></seclabel>",
        )

    def _run(self, *args: str, xml: str = '') -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, '-I', '-B', HOOK, 'vm', *args, '-'],
            input=xml or self.xml,
            capture_output=True,
            text=True,
            check=False,
        )

    def test_from_before_qemu_starts_until_it_has_ended(self) -> None:
        for words in (('prepare', 'begin'), ('start', 'begin'), ('started', 'begin')):
            self.assertEqual((0, ''), (self._run(*words).returncode, self._run(*words).stdout))
        self.assertEqual({'domain serve --group 107'}, set(self.log.read_text().splitlines()))
        self.assertEqual(self.xml, (self.directory / 'xml').read_text())
        self.log.unlink()
        for words in (('stopped', 'end'), ('migrate', 'begin'), ('release', 'end')):
            done = self._run(*words)
            # libvirt takes what a hook prints then for the XML that it wants
            self.assertEqual((0, ''), (done.returncode, done.stdout), done.stderr)
        self.assertEqual('domain check-stays\ndomain unserve\n', self.log.read_text())

    def test_nothing_for_other_domains(self) -> None:
        for words in (('start', 'begin'), ('migrate', 'begin'), ('release', 'end')):
            self.assertEqual(0, self._run(*words, xml=XML.format('/x', '')).returncode)
        self.assertFalse(self.log.exists())

    def _found(self, *results: dict[str, Any]) -> None:
        """Of the images of a pool, by scrubs."""
        path = self.directory / 'state/scrubs/uuid.json'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({'images': {str(n): one for n, one in enumerate(results)}}))

    def _started(self, xml: str) -> str:
        """What is started for a domain whose QEMU runs."""
        config = self.directory / 'pcow.conf'
        config.write_text(f'[pcow]\nstate_path = {self.directory}/state\n')
        known = functools.partial(hook.is_damage_known, str(config))
        with (
            mock.patch.object(hook, 'is_damage_known', known),
            mock.patch.object(subprocess, 'Popen') as popen,
        ):
            hook._started('vm', xml)
        return ' '.join(popen.call_args.args[0][1:]) if popen.called else ''

    def test_domain_is_told_of_damage(self) -> None:
        plain, wanted = XML.format('/p/vm.pcow', ''), 'domain tell-damage -- vm'
        nothing: list[dict[str, Any]] = [{'findings': []}, {'findings': ['lost'], 'accepted': True}]
        self.assertEqual('', self._started(plain))
        self._found(*nothing)
        self.assertEqual('', self._started(plain))
        # it brings what it was told where it came from
        inherited = f'<metadata><damage xmlns="{hook.DAMAGE_NAMESPACE}"/></metadata>'
        self.assertEqual(wanted, self._started(XML.format('/p/vm.pcow', inherited)))
        self._found(*nothing, {'findings': ['lost'], 'accepted': False})
        self.assertEqual(wanted, self._started(plain))
        self.assertEqual(wanted, self._started(self.xml))
        self.assertEqual('', self._started(XML.format('/x', '')))

    def test_domain_that_cannot_be_told_goes_on(self) -> None:
        for text in ('', '[]', '{"images": [1]}', '{"images": {"a": 1}}', '\xff'):
            path = self.directory / 'state/scrubs/uuid.json'
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding='latin-1')
            self.assertEqual('', self._started(XML.format('/p/vm.pcow', '')))
        self._found({'findings': ['lost']})
        with mock.patch.object(hook, 'program', side_effect=hook.HookError('no pcowctl')):
            self.assertEqual('', self._started(XML.format('/p/vm.pcow', '')))
        done = self._run('started', 'begin', xml=f'<domain xmlns="{hook.DAMAGE_NAMESPACE}"')
        self.assertEqual((0, ''), (done.returncode, done.stdout))
        self.assertIn('the domain is not told of damage', done.stderr)

    def test_what_a_service_has_put_there(self) -> None:
        """One that was taken over holds up no start, nor leads root elsewhere."""
        self._found({'findings': ['lost']})
        (real,) = (self.directory / 'state/scrubs').glob('*.json')
        elsewhere = self.directory / 'elsewhere'
        real.rename(elsewhere)
        plain = XML.format('/p/vm.pcow', '')
        for put in (os.mkfifo, lambda path: os.symlink(elsewhere, path), os.mkdir):
            put(real)
            self.assertEqual('', self._started(plain))
            shutil.rmtree(real) if real.is_dir() and not real.is_symlink() else real.unlink()
        real.write_text('[' * 100000)
        self.assertEqual('', self._started(plain))
        elsewhere.rename(real)
        self.assertIn('tell-damage', self._started(plain))

    def test_what_pcowctl_refuses_is_told(self) -> None:
        self.script('pcowctl', '#!/bin/sh\necho "vm.pcow is open" >&2; exit 1\n')
        done = self._run('start', 'begin')
        self.assertEqual((1, 'pcow: vm.pcow is open\n'), (done.returncode, done.stderr))


class ProfileTest(base.TestCase):
    """What the hook writes; with a kernel that has AppArmor: tests/vm/confinement.py."""

    def setUp(self) -> None:
        super().setUp()
        self.profile = 'libvirt-6f0c1c52-5d1e-4c0b-9a3f-2b7e4f90d1a6'
        self.path, self.own = self.directory / self.profile, self.directory / f'{self.profile}.pcow'
        self.path.write_text(
            f'profile {self.profile} {{\n  #include <libvirt/{self.profile}.files>\n}}\n'
        )
        parser = self.script('parser', '#!/bin/sh\ncat "$2" >>"$2.loaded"\n')
        for name, value in (
            ('PROFILES', str(self.directory)),
            ('PARSER', parser),
            ('uses_apparmor', lambda: True),
            ('bases', lambda _program, _image: ['/pool/base.pcow']),
            ('pcow_img', lambda: 'x'),
        ):
            self.useFixture(fixtures.MockPatchObject(hook, name, value))

    def test_what_a_domain_may_open(self) -> None:
        hook.confine(self.profile, hook.rules(['/pool/vm.pcow'], ['/disks/1/socket']))
        self.assertEqual(
            '  "/pool/base.pcow" rk,\n  "/pool/vm.pcow" rwk,\n  "/disks/1/socket" rw,\n',
            self.own.read_text(),
        )
        line = f'\n  include if exists <libvirt/{self.profile}.pcow>\n}}\n'
        self.assertTrue(self.path.read_text().endswith(line), self.path.read_text())
        hook.confine(self.profile, hook.rules(['/pool/other.pcow'], []))
        self.assertEqual(1, self.path.read_text().count('include if'))
        self.assertEqual(
            '  "/pool/base.pcow" rk,\n  "/pool/other.pcow" rwk,\n', self.own.read_text()
        )

    def test_nobody_else_may_read_the_rules_or_hold_the_lock(self) -> None:
        hook.confine(self.profile, hook.rules(['/pool/vm.pcow'], []))
        for path in (self.own, self.directory / '.pcow.lock'):
            self.assertEqual(0o600, stat.S_IMODE(path.stat().st_mode))

    def test_what_is_plugged_in_is_added(self) -> None:
        hook.confine(self.profile, hook.rules(['/pool/vm.pcow'], []))
        hook.confine(self.profile, hook.rules(['/pool/more.pcow'], []), keep=True)
        self.assertEqual(
            '  "/pool/base.pcow" rk,\n  "/pool/vm.pcow" rwk,\n  "/pool/more.pcow" rwk,\n',
            self.own.read_text(),
        )

    def test_no_name_is_a_pattern(self) -> None:
        for name in ('*', 'a?', '[a]', '{a,b}', '@{HOME}', 'a"', 'a\n  /** rw,', 'a\\', '^', 'ä'):
            self.assertRaises(hook.HookError, hook.rules, [f'/pool/{name}.pcow'], [])
            self.assertRaises(hook.HookError, hook.rules, [], [f'/disks/{name}/socket'])

    def test_no_other_profile_is_changed(self) -> None:
        for label in ('libvirtd', '../x', 'libvirt-6f0c1c52', f'{self.profile}/../x'):
            seclabel = (
                f"<seclabel type='dynamic' model='apparmor' "
                f"relabel='yes'><label>{label}</label></seclabel>"
            )
            self.assertIsNone(hook.profile_of(XML.format('/x', seclabel)))
        for kind, wanted in (('dynamic', self.profile), ('static', None)):
            seclabel = (
                f"<seclabel type='{kind}' model='apparmor' "
                f"relabel='yes'><label>{self.profile}</label></seclabel>"
            )
            self.assertEqual(wanted, hook.profile_of(XML.format('/x', seclabel)))
        self.assertRaises(hook.HookError, hook.grant, '/pool/vm.pcow', '../x')

    def test_sockets(self) -> None:
        disk = (
            "<domain><devices><disk type='network'><source protocol='nbd'><host transport='unix' "
            "socket='/disks/1/socket'/>"
            "</source></disk><disk type='network'><source protocol='nbd'><host name='h' "
            "port='1'/></source></disk>"
            '</devices></domain>'
        )
        self.assertEqual(['/disks/1/socket'], hook.sockets(disk))

    def test_a_domain_that_has_ended(self) -> None:
        self.own.touch()
        hook.release(f'<domain><uuid>{self.profile.removeprefix("libvirt-")}</uuid></domain>')
        self.assertFalse(self.own.exists())
        hook.release('<domain><uuid>../../x</uuid></domain>')

    def test_what_the_parser_says_is_told(self) -> None:
        parser = self.script('parser', '#!/bin/sh\necho bad rule >&2; exit 1\n')
        self.useFixture(fixtures.MockPatchObject(hook, 'PARSER', parser))
        self.assertIn(
            'bad rule', str(self.assertRaises(hook.HookError, hook.confine, self.profile, []))
        )
        self.path.write_text('')
        self.assertIn(
            'is no profile', str(self.assertRaises(hook.HookError, hook.confine, self.profile, []))
        )
