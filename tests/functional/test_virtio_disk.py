# SPDX-License-Identifier: Apache-2.0
"""A Debian image is a disk of a libvirt domain, from which BIOS boots, and then persistent memory
of another one, with what was written.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import os
from pathlib import Path
import re
import select
import time
from typing import Self
import unittest
import xml.etree.ElementTree as ET

from pcow_driver.virt import disk_xml
from tests.functional import images
from tests.functional import libvirt_vm
from tools.lib.quickstart import debian_image
from tools.lib.quickstart import guest
from tools.lib.quickstart import libvirtd
from tools.lib.quickstart import state
from tools.lib.quickstart import teardown
from tools.lib.quickstart import workplace

BOOT_SECONDS = 400  # of two kernels, one after the other
COMMAND_SECONDS = 120
STOP_SECONDS = 60
TEMPLATE, IMAGE = 'debian', 'web1'


class Console:
    """The serial line of a running domain, on which Debian's init (quickstart/debian-init)
    takes commands.
    """

    def __init__(self, xml: str) -> None:
        path = ET.fromstring(xml).findall('devices/serial/source')[0].get('path', '')
        self._terminal = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        self._seen = b''

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_args: object) -> None:
        os.close(self._terminal)

    def expect(self, pattern: bytes, seconds: float) -> re.Match[bytes]:
        end = time.monotonic() + seconds
        while not (match := re.search(pattern, self._seen)):
            left = end - time.monotonic()
            if left <= 0:
                raise AssertionError(f'{pattern!r} did not come: {self._seen[-2000:]!r}')
            if select.select([self._terminal], [], [], left)[0]:
                with contextlib.suppress(OSError):  # QEMU has just ended
                    self._seen += os.read(self._terminal, 65536)
        self._seen = self._seen[match.end() :]
        return match

    def send(self, command: str) -> None:
        for byte in f'{command}\n'.encode():  # a UART has no flow control
            os.write(self._terminal, bytes([byte]))

    def run(self, command: str) -> str:
        self.send(command)
        match = self.expect(rb'(?s)(.*)pcow-done: (\d+)\r?\n', COMMAND_SECONDS)
        text = match[1].decode(errors='replace').replace('\r', '')
        if match[2] != b'0':
            raise AssertionError(f'{command}: {text}')
        return text.strip()


class VirtioDiskTest(unittest.TestCase):
    def setUp(self) -> None:
        teardown.reap()
        self.run_ = state.Run.create()
        self.addCleanup(teardown.tear_down, self.run_)
        disk = debian_image.prepare(guest.Cache(self.run_))
        self.daemon = libvirtd.Libvirtd(self.run_.directory)
        self.daemon.install_hook()
        self.place = workplace.Workplace(self.run_, self.daemon.uri)
        self.place.make_pool(None)
        self.image = self.place.image_path(IMAGE)
        reference = self.place.reference
        template = self.place.image_path(TEMPLATE)
        self.place.pcowctl(
            *('template', 'build', '--source-format', 'qcow2', str(disk), reference(template))
        )
        self.place.pcowctl('image', 'create', reference(self.image), '--template', template.stem)
        self.daemon.start()
        self.names: list[str] = []
        self.addCleanup(self._destroy)

    def _destroy(self) -> None:
        """What serves a disk ends with its domain."""
        for name in self.names:
            libvirt_vm.try_virsh(self.daemon.uri, 'destroy', name)

    def virsh(self, *words: object) -> str:
        done = libvirt_vm.try_virsh(self.daemon.uri, *words)
        self.assertEqual(0, done.returncode, f'{words}: {done.stderr}')
        return done.stdout

    def define(self, name: str, *options: str) -> str:
        """The name of the domain."""
        name = f'{self.run_.domain_name}-{name}'
        xml = self.place.pcowctl(
            *('domain-xml', self.place.reference(self.image), '--name', name, '--type', 'qemu'),
            *('--memory', '256M', '--emulator', images.program('qemu-system-x86_64'), *options),
        )
        path = self.run_.directory / f'{name}.xml'
        path.write_text(xml)
        self.virsh('define', path)
        self.names.append(name)
        return name

    def served(self, name: str) -> list[str]:
        """What is left of the disks of a domain."""
        uuid = self.virsh('domuuid', name).strip()
        place = Path(disk_xml.DIRECTORY)
        return [entry.name for entry in place.glob(f'{uuid}-*')] if place.exists() else []

    def wait_off(self, name: str) -> None:
        end = time.monotonic() + STOP_SECONDS
        while self.virsh('domstate', name).strip() != 'shut off':
            self.assertLess(time.monotonic(), end)
            time.sleep(0.1)

    @contextlib.contextmanager
    def boot(self, name: str, number: int, root: str) -> Iterator[Console]:
        self.virsh('start', name)
        with Console(self.virsh('dumpxml', name)) as console:
            release = debian_image.release(debian_image.kernels()[0])
            console.expect(
                rb'pcow-guest: boot %d of %s on %s\b' % (number, release.encode(), root.encode()),
                BOOT_SECONDS,
            )
            console.expect(rb'pcow-ready\r?\n', COMMAND_SECONDS)
            yield console

    def test_a_disk_and_then_memory(self) -> None:
        name = self.define('disk', '--bus', 'virtio')
        with self.boot(name, 1, '/dev/vda2 / ext4') as console:
            console.run('echo kept >/root/note; sync')
            self._snapshots(name)
            self._second_domain(name)
            console.run('echo later >>/root/note; sync')
            self.assertEqual('0', console.run('cat /sys/block/vda/ro'))
            console.send('mount -o remount,ro /; echo o >/proc/sysrq-trigger')
            self.wait_off(name)
        self.assertEqual([], self.served(name))
        self.virsh('undefine', name)
        name = self.define('memory')
        with self.boot(name, 2, '/dev/pmem0p2 / ext4') as console:
            self.assertEqual('kept\nlater', console.run('cat /root/note'))

    def _snapshots(self, name: str) -> None:
        """While the guest runs, by the domain."""
        snapshot = ('snapshot', '{}', '--domain', name)

        def ctl(verb: str, *words: str) -> str:
            return self.place.pcowctl(snapshot[0], verb, *snapshot[2:], *words)

        ctl('create', 'before')
        ctl('rename', 'before', 'first')
        self.assertIn('first', ctl('list', '-f', 'value', '-c', 'name'))
        with self.assertRaisesRegex(Exception, 'shut it down first'):
            ctl('revert', 'first')
        ctl('delete', 'first')
        self.assertNotIn('first', ctl('list', '-f', 'value', '-c', 'name'))

    def _second_domain(self, first: str) -> None:
        """It is refused, and the first one goes on."""
        second = self.define('second', '--bus', 'virtio')
        done = libvirt_vm.try_virsh(self.daemon.uri, 'start', second)
        self.assertNotEqual(0, done.returncode)
        self.assertIn(f'{self.image} is open for writing elsewhere', done.stderr)
        self.assertEqual([], self.served(second))
        self.assertEqual(1, len(self.served(first)))
