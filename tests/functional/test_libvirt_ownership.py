# SPDX-License-Identifier: Apache-2.0
"""A libvirtd that gives files to QEMU's user (dynamic_ownership), as distributions have it, and
images on an immutable template.
"""

import json
import os
from pathlib import Path
import pwd
import re
import shutil
import signal
import subprocess
import time

from pcow_driver.common import immutable
from pcow_driver.images import protection
from pcow_driver.virt import domain_xml
from pcow_driver.virt import libvirt_xml
from tests.functional import images
from tests.functional import test_pcowctl
from tools.lib.quickstart import libvirtd
from tools.lib.quickstart import state
from tools.lib.quickstart import teardown

USER, GROUP = 'libvirt-qemu', 'kvm'
SETTINGS = f'user = "{USER}"\ngroup = "{GROUP}"\ndynamic_ownership = 1\nremember_owner = 1\n'
MIB = 1 << 20


class OwnershipTest(test_pcowctl.TestCase):
    """A pool in /var/tmp, which is on a disk, with a chain of an immutable template, an image and a
    second one.
    """

    def setUp(self) -> None:
        super().setUp()
        place = self._temporary('/var/tmp')
        # runs before what the line above has registered
        self.addCleanup(teardown.delete, place)
        self.pool = place / 'pool'
        self.template = self.make_template()
        self.assertTrue(
            immutable.is_set(str(self.template)),
            'this test needs a file system with the immutable flag in /var/tmp',
        )
        self.ctl('image', 'create', 'p/middle', '--template', 't')
        self.io(self.pool / 'middle.pcow', 'write -P 0x33 6M 4k')
        self.ctl('image', 'create', 'p/vm', '--template', 'middle')
        for path in self.pool.glob('*.pcow'):
            with protection.lifted(str(path)):
                path.chmod(0o600)
        self._start_libvirtd(place)

    def _start_libvirtd(self, place: Path) -> None:
        """QEMU is where everybody finds it: the checkout may be in a home directory."""
        self.run_ = state.Run.create()
        self.addCleanup(teardown.tear_down, self.run_)
        self.emulator = place / 'qemu-system-x86_64'
        shutil.copy(images.program('qemu-system-x86_64'), self.emulator)
        hooks = self.run_.directory / 'etc/hooks/qemu.d'
        hooks.mkdir(parents=True)
        shutil.copy(test_pcowctl.HOOK, hooks / 'pcow')
        self.daemon = libvirtd.Libvirtd(self.run_.directory, SETTINGS)
        # where /dev/kvm is root's alone, libvirt asks QEMU anew whether it can do KVM, some ten
        # times for every command
        kvm = self.run_.directory / 'kvm'
        kvm.touch(0)
        setup = (f'[ ! -e /dev/kvm ] || mount --bind {kvm} /dev/kvm',)
        self.daemon.start(
            setup=setup, environment={'PATH': f'{test_pcowctl.BIN}:{os.environ["PATH"]}'}
        )

    def virsh(self, *words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ('virsh', '-q', '-c', self.daemon.uri, *map(str, words)),
            stdin=subprocess.DEVNULL,
            text=True,
            capture_output=True,
            timeout=images.TIMEOUT,
            env=os.environ | {'LC_ALL': 'C'},
            check=False,
        )

    def must(self, *words: object) -> str:
        done = self.virsh(*words)
        self.assertEqual(
            0, done.returncode, done.stderr + self.daemon.log.read_text(errors='replace')[-2000:]
        )
        return done.stdout

    def define(self, name: str, ram: Path | None = None, **options: bool) -> str:
        """A domain with an image and nothing to boot: what its memory holds is looked at from
        outside.
        """
        size = self.show('image', 'show', f'p/{name}')['virtual size']
        domain = f'{self.run_.domain_name}-{name}'
        spec = domain_xml.Domain(
            name=domain,
            memory=64 * MIB,
            kernel='/none',
            emulator=str(self.emulator),
            volatile=True,
            ram=str(ram) if ram else None,
            nvdimms=[
                libvirt_xml.Nvdimm(path=str(self.pool / f'{name}.pcow'), size=size, **options)
            ],
        )
        element = spec.to_element()
        boot = element.find('os')
        assert boot is not None
        for part in ('kernel', 'cmdline'):
            boot.remove(boot.find(part))  # type: ignore[arg-type]
        path = self.directory / f'{name}.xml'
        path.write_text(libvirt_xml.to_string(element))
        self.must('define', path)
        return domain

    def monitor(self, domain: str, command: str, **arguments: str) -> object:
        request = json.dumps({'execute': command, 'arguments': arguments})
        return json.loads(self.must('qemu-monitor-command', domain, request))['return']

    def guest_byte(self, domain: str, offset: int) -> str:
        """What a CPU of the guest would read there."""
        (device,) = self.monitor(domain, 'query-memory-devices')  # type: ignore[misc]
        text = self.monitor(
            domain,
            'human-monitor-command',
            **{'command-line': f'xp /1bx {device["data"]["addr"] + offset:#x}'},
        )
        return str(text).split()[-1]

    def test_all(self) -> None:
        """One libvirtd for both: it takes some time to look at a QEMU that it does not know."""
        self.check_image_on_an_immutable_template()
        self.check_template_itself()
        self.check_ram()

    def check_image_on_an_immutable_template(self) -> None:
        """libvirt gives away the image alone; the hook lets QEMU's user read what is below it."""
        before = {name: (self.pool / name).stat() for name in ('t.pcow', 'middle.pcow')}
        digest = images.digest(self.template)
        user = pwd.getpwnam(USER)
        domain = self.define('vm')
        for _again in range(2):
            self.must('start', domain)
            pid = int((self.run_.directory / 'run/qemu' / f'{domain}.pid').read_text())
            self.assertEqual(user.pw_uid, os.stat(f'/proc/{pid}').st_uid)
            self.assertEqual(user.pw_uid, (self.pool / 'vm.pcow').stat().st_uid)
            for offset, wanted in (
                (test_pcowctl.OFFSET, '0x11'),
                (test_pcowctl.OFFSET + MIB, '0x22'),
                (6 * MIB, '0x33'),
            ):
                self.assertEqual(wanted, self.guest_byte(domain, offset))
            self.must('destroy', domain)
            self.assertEqual(0, (self.pool / 'vm.pcow').stat().st_uid)  # as it was
            for name, status in before.items():
                now = (self.pool / name).stat()
                self.assertEqual((status.st_uid, status.st_gid), (now.st_uid, now.st_gid), name)
            self.assertTrue(immutable.is_set(str(self.template)))
            self.assertEqual(digest, images.digest(self.template))
        self.assertRegex(
            self.run_program('getfacl', '-cn', self.template).stdout,
            f'(?m)^user:{user.pw_uid}:r--$',
        )
        self.must('undefine', domain)

    def check_template_itself(self) -> None:
        """No domain runs on a template: libvirt cannot give it away, and says so; nothing about it
        is changed.
        """
        digest, before = images.digest(self.template), self.template.stat()
        for readonly in (False, True):
            domain = self.define('t', readonly=readonly)
            done = self.virsh('start', domain)
            self.assertNotEqual(0, done.returncode)
            self.assertRegex(done.stderr, re.escape(str(self.template)))
            self.must('undefine', domain)
            now = self.template.stat()
            self.assertEqual(
                (before.st_uid, before.st_gid, before.st_mode),
                (now.st_uid, now.st_gid, now.st_mode),
            )
            self.assertTrue(immutable.is_set(str(self.template)))
            self.assertEqual(digest, images.digest(self.template))

    def check_ram(self) -> None:
        """The hook opens the image that is the RAM to QEMU's user, as long as the domain runs, and
        libvirt deletes what leads to it.
        """
        ram = self.pool / 'ram.pcow'
        self.ctl('image', 'create', 'p/ram', '--size', str(64 * MIB))
        ram.chmod(0o600)
        user, before = pwd.getpwnam(USER), ram.stat()
        domain = self.define('vm', ram)
        for number in range(2):
            self.must('start', domain)
            (_nvdimm, found) = sorted(
                self.monitor(domain, 'query-pcow'),  # type: ignore[call-overload]
                key=lambda one: one['filename'] == str(ram),
            )
            self.assertEqual((str(ram), 'ram-node0'), (found['filename'], found['id']))
            acl = self.run_program('getfacl', '-cn', ram).stdout
            self.assertRegex(acl, f'(?m)^user:{user.pw_uid}:rw-$')
            self.assertRegex(acl, '(?m)^other::---$')
            self.assertRegex(acl, '(?m)^group::---$')
            if number:
                pid = int((self.run_.directory / 'run/qemu' / f'{domain}.pid').read_text())
                os.kill(pid, signal.SIGKILL)
                self.wait_until_off(domain)
            else:
                self.must('destroy', domain)
            now = ram.stat()
            for name in ('st_uid', 'st_gid', 'st_mode', 'st_ino'):
                self.assertEqual(getattr(before, name), getattr(now, name), name)
            self.assertNotIn('user:', self.run_program('getfacl', '-cns', ram).stdout)
            self.assertEqual([], list((self.run_.directory / 'lib/qemu/ram').iterdir()))
        self.must('undefine', domain)
        self.run_program('pcow-img', 'check', ram)

    def wait_until_off(self, domain: str) -> None:
        limit = time.monotonic() + images.TIMEOUT
        while self.must('domstate', domain).strip() != 'shut off':
            self.assertLess(time.monotonic(), limit)
            time.sleep(0.05)
