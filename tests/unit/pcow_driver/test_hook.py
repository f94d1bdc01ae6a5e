# SPDX-License-Identifier: Apache-2.0
"""The libvirt hook: real files and ACLs.  With a real chain: tests/functional/test_pcowctl.py."""

import json
import os
import pwd
import stat
import subprocess
import sys

import fixtures

from tests.unit.pcow_driver import base

HOOK = base.TOP / 'etc/libvirt/hooks/qemu.d/pcow'
XML = """<domain type='kvm'><name>vm</name><devices>
 <memory model='nvdimm' access='shared'><source><path>{}</path></source></memory>
 <memory model='nvdimm' access='shared'><source><path>/dev/dax0.0</path></source></memory>
 <memory model='dimm'><source/></memory>
 <disk type='file'><source file='/pool/disk.pcow'/></disk>
</devices>{}</domain>"""
NOBODY = pwd.getpwnam('nobody')


hook = base.load_script(HOOK)


class ParseTest(base.TestCase):
    def test_only_pcow_nvdimms_count(self) -> None:
        self.assertEqual(['/pool/vm.pcow'], hook.images(XML.format('/pool/vm.pcow', '')))
        self.assertEqual([], hook.images(XML.format('vm.pcow', '')))
        self.assertRaises(hook.HookError, hook.images, '<domain>')

    def test_user_of_the_domain(self) -> None:
        for label in ('nobody:nogroup', f'+{NOBODY.pw_uid}:+0', f'{NOBODY.pw_uid}'):
            xml = XML.format('/x', f"<seclabel type='static' model='dac'><label>{label}</label></seclabel>")
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
    def _bases(self, *filenames: object) -> list[str]:
        chain = json.dumps([{'filename': name} for name in ('x', *filenames)])
        (self.directory / 'chain.json').write_text(chain)
        program = self.script('pcow-img', f'#!/bin/sh\ncat {self.directory}/chain.json\n')
        found: list[str] = hook.bases(program, str(self.directory / 'vm.pcow'))
        return found

    def test_in_the_same_directory(self) -> None:
        directory = os.path.realpath(self.directory)
        self.assertEqual([], self._bases())
        self.assertEqual([f'{directory}/a.pcow', f'{directory}/b.pcow'], self._bases('a.pcow', str(self.directory / 'b.pcow')))

    def test_nowhere_else(self) -> None:
        (self.directory / 'sub').mkdir()
        for name in ('/etc/passwd', '../x.pcow', 'sub/x.pcow', f'{self.directory}/sub/../../x'):
            error = self.assertRaises(hook.HookError, self._bases, 'a.pcow', name)
            self.assertIn(name, str(error))

    def test_nonsense(self) -> None:
        for text in ('', '{}', '[]x', '[{}, 3]', '[{}, {"name": "x"}]'):
            program = self.script('pcow-img', f"#!/bin/sh\necho '{text}'\n")
            self.assertRaises(hook.HookError, hook.bases, program, str(self.directory / 'vm.pcow'))
        program = self.script('pcow-img', '#!/bin/sh\necho broken >&2; exit 1\n')
        self.assertIn('broken', str(self.assertRaises(hook.HookError, hook.bases, program, str(self.directory / 'vm.pcow'))))


class GrantTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.path = str(self.directory / 'base.pcow')
        with open(self.path, 'w') as f:
            f.write('data')
        os.chmod(self.path, 0o640)

    def _acl(self) -> dict[tuple[int, int], int]:
        fd = os.open(self.path, os.O_RDONLY)
        try:
            acl: dict[tuple[int, int], int] = hook.read_acl(fd)
        finally:
            os.close(fd)
        return acl

    def test_one_user_may_read_and_nothing_else_changes(self) -> None:
        before = self._acl()
        hook.grant_read(self.path, NOBODY)
        acl = self._acl()
        self.assertEqual(hook.READ, acl.pop((hook.USER, NOBODY.pw_uid)))
        self.assertEqual(4, acl.pop((hook.MASK, hook.NO_ID)))
        self.assertEqual(before, acl)
        hook.grant_read(self.path, NOBODY)
        self.assertEqual(hook.READ, self._acl()[hook.USER, NOBODY.pw_uid])

    def test_the_kernel_sees_it_so(self) -> None:
        os.chmod(self.path, 0o600)
        hook.grant_read(self.path, NOBODY)
        self.assertEqual(0o640, stat.S_IMODE(os.stat(self.path).st_mode))     # the mask shows as the group's permissions
        self.assertEqual(0, self._acl()[hook.GROUP_OBJ, hook.NO_ID])

    def test_other_entries_stay(self) -> None:
        hook.grant_read(self.path, pwd.getpwnam('daemon'))
        hook.grant_read(self.path, NOBODY)
        users = {number: permissions for (tag, number), permissions in self._acl().items() if tag == hook.USER}
        self.assertEqual({pwd.getpwnam('daemon').pw_uid: 4, NOBODY.pw_uid: 4}, users)

    def test_nothing_where_all_may_read(self) -> None:
        os.chmod(self.path, 0o644)
        hook.grant_read(self.path, NOBODY)
        self.assertRaises(OSError, os.getxattr, self.path, hook.ACL_NAME)

    def test_links_and_devices_are_refused(self) -> None:
        link = str(self.directory / 'link.pcow')
        os.symlink(self.path, link)
        pipe = str(self.directory / 'pipe.pcow')
        os.mkfifo(pipe)
        for path in (link, pipe, str(self.directory), str(self.directory / 'missing')):
            self.assertRaises(hook.HookError, hook.grant_read, path, NOBODY)
        self.assertRaises(OSError, os.getxattr, self.path, hook.ACL_NAME)


class MainTest(base.TestCase):
    def _run(self, *args: str, xml: str = '') -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, '-I', '-B', HOOK, *args], input=xml, capture_output=True, text=True, check=False)

    def test_needs_only_the_standard_library_and_ignores_what_is_not_its_business(self) -> None:
        self.useFixture(fixtures.EnvironmentVariable('PATH', ''))
        for args in (('vm', 'started', 'begin', '-'), ('vm', 'release', 'end', '-'), (), ('vm',)):
            done = self._run(*args, xml='not XML')
            self.assertEqual((0, '', ''), (done.returncode, done.stdout, done.stderr))
        self.assertEqual(0, self._run('vm', 'prepare', 'begin', '-', xml='<domain/>').returncode)

    def test_one_line_on_error(self) -> None:
        done = self._run('vm', 'prepare', 'begin', '-', xml='<domain')
        self.assertEqual(1, done.returncode)
        self.assertEqual(1, len(done.stderr.splitlines()))
        self.assertTrue(done.stderr.startswith('pcow: '), done.stderr)
