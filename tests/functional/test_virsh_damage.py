# SPDX-License-Identifier: Apache-2.0
"""Checksums of what a running guest stands on: its snapshots get them while it runs, and its domain
is told of damage.
"""

from collections.abc import Iterator
import contextlib
import json
import subprocess
import sys
import time
import xml.etree.ElementTree as ET

from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.images import protection
from tests.functional import images
from tests.functional import libvirt_vm

NAMESPACE = 'urn:pcow:damage'
HEADS = 6 * units.MIB  # where data begins, behind the metadata and its mirror
TOLD_SECONDS = 30


class DamageTest(libvirt_vm.HostTestCase):
    def setUp(self) -> None:
        super().setUp()
        name = self.id().rpartition('.')[2].removeprefix('test_').replace('_', '-')
        self.guest = libvirt_vm.Guest(self.host, name, carrier=False)
        self.addCleanup(self.guest.remove)
        self.guest.start()
        self.pool = self.host.place.reference(self.guest.image).partition('/')[0]

    def scrub(self) -> bool:
        """Whether it finds no damage."""
        try:
            self.host.place.pcowctl('pool', 'scrub', self.pool)
        except exception.ToolFailed:
            return False
        return True

    def told(self) -> dict[str, str]:
        """What the metadata of the domain that runs say: the finding, by path."""
        done = self.host.try_virsh('metadata', self.guest.name, NAMESPACE)
        if done.returncode:
            self.assertIn('metadata not found', done.stderr)
            return {}
        return {one.attrib['path']: one.text or '' for one in ET.fromstring(done.stdout)}

    @contextlib.contextmanager
    def events(self) -> Iterator[list[str]]:
        """What listens is told; filled at the end."""
        found: list[str] = []
        words = ('event', '--event', 'metadata-change', '--loop')
        listener = subprocess.Popen(
            ('stdbuf', '-oL', 'virsh', '-q', '-c', self.host.daemon.uri, *words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            time.sleep(1)  # virsh does not say when it listens
            yield found
            time.sleep(1)
        finally:
            listener.terminate()
            found += listener.communicate(timeout=TOLD_SECONDS)[0].splitlines()

    def flip(self) -> None:
        """A bit of the data of the template."""
        with protection.lifted(str(self.host.base)), self.host.base.open('r+b') as file:
            file.seek(HEADS)
            data = file.read(units.MIB)
            at = next(n for n, byte in enumerate(data) if byte)
            file.seek(HEADS + at)
            file.write(bytes([data[at] ^ 1]))

    def test_domain_is_told(self) -> None:
        self.assertTrue(self.scrub())
        self.assertEqual({}, self.told())
        self.flip()
        try:
            with self.events() as heard:
                self.assertFalse(self.scrub())
            (finding,) = self.told().items()
        finally:
            self.flip()
        self.assertEqual(str(self.host.base), finding[0])
        self.assertIn('it is not what its checksum was made of', finding[1])
        self.assertTrue(any(self.guest.name in line and NAMESPACE in line for line in heard), heard)
        # and goes on, as the damaged page may be none of its own
        self.guest.next_report()
        self.assertTrue(self.scrub())
        self.assertEqual({}, self.told())

    def _have_hook_tell(self) -> None:
        """It is libvirt's own run of it; it looks where this host keeps what scrubs have found."""
        program = self.host.directory / 'pcowctl'
        # libvirt gives it hardly any environment
        program.write_text(
            f'#!/bin/sh\nPYTHONPATH={images.TOP} exec {sys.executable} -m pcow_driver.cli.app '
            f'--config-file {self.host.place.config} "$@"\n'
        )
        program.chmod(0o755)
        config = self.host.directory / 'hook.conf'
        config.write_text(f'{self.host.place.config.read_text()}pcowctl = {program}\n')
        hook = self.host.directory / 'etc/hooks/qemu.d/pcow'
        hook.write_text(hook.read_text().replace('/etc/pcow/pcow.conf', str(config)))

    def test_domain_that_starts_is_told(self) -> None:
        self._have_hook_tell()
        self.host.virsh('destroy', self.guest.name)
        self.flip()
        try:
            self.assertFalse(self.scrub())
            # it is not to read what is damaged
            self.host.virsh('start', self.guest.name, '--paused')
            end = time.monotonic() + TOLD_SECONDS
            while not (told := self.told()) and time.monotonic() < end:
                time.sleep(0.2)
        finally:
            self.flip()
        self.assertEqual([str(self.host.base)], [*told])
        self.assertTrue(self.scrub())
        self.assertEqual({}, self.told())

    def test_checksums_of_a_snapshot_beside_the_guest(self) -> None:
        for name in ('one', 'two'):
            self.guest.mark(name)
            self.host.place.pcowctl('snapshot', 'create', '--domain', self.guest.name, name)
        self.host.place.pcowctl('snapshot', 'checksum', '--domain', self.guest.name, 'two')
        self.guest.next_report()
        before = self.check()
        self.assertGreater(before['data-verified'], units.MIB)
        self.host.place.pcowctl('snapshot', 'delete', '--domain', self.guest.name, 'one')
        self.guest.mark('three')
        self.assertLess(self.check()['data-verified'], before['data-verified'])
        self.host.place.pcowctl('snapshot', 'delete', '--domain', self.guest.name, 'two')
        self.guest.next_report()
        self.assertEqual(0, self.check()['data-verified'])

    def check(self) -> dict[str, int]:
        """What a look beside the guest finds: no damage."""
        words = ('check', '--data', '-U', '--output=json', self.guest.image)
        found = json.loads(libvirt_vm.run(images.program('pcow-img'), *words))
        self.assertEqual(0, found['data-damaged'])
        self.assertEqual(0, found['data-unjudged'])
        return dict(found)
