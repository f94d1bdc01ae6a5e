# SPDX-License-Identifier: Apache-2.0
"""pcowctl vm on a running guest whose RAM and NVDIMM are images, through libvirt, without a disk:
the guest itself checks its memory after each revert.
"""

import json
import os
import signal
import time
from typing import Any

from pcow_driver.common import exception
from tests.functional import images
from tests.functional import libvirt_vm


class CheckpointTestCase(libvirt_vm.HostTestCase):
    def guest(self, name: str, **options: Any) -> libvirt_vm.Guest:
        guest = libvirt_vm.Guest(self.host, name, carrier=False, **options)
        self.addCleanup(guest.remove)
        return guest

    def vm(self, command: str, *words: str) -> str:
        return self.host.place.pcowctl('vm', command, *words)

    def vm_fails(self, command: str, *words: str) -> str:
        """What is said; one line, of words."""
        with self.assertRaises(exception.ToolFailed) as caught:
            self.vm(command, *words)
        message = str(caught.exception)
        self.assertEqual(1, len(message.splitlines()), message)
        return message

    def wait_for_agent(self, name: str) -> None:
        end = time.monotonic() + libvirt_vm.ANSWER_SECONDS
        ping = ('qemu-agent-command', name, '{"execute": "guest-ping"}')
        while self.host.try_virsh(*ping).returncode:
            self.assertLess(time.monotonic(), end)
            time.sleep(0.2)

    def tree(self, guest: libvirt_vm.Guest) -> dict[str, str]:
        """The parent of each, '' for a root; the images have a snapshot of each, and no other."""
        found: list[dict[str, Any]] = json.loads(self.vm('tree', guest.name, '--json'))
        names = {one['name'] for one in found}
        for path in (guest.image, guest.ram):
            listed = libvirt_vm.run(
                images.program('pcow-img'), 'snapshot', '-l', '-U', '--output=json', path
            )
            self.assertEqual(names, {one['name'] for one in json.loads(listed)})
        return {one['name']: one['parent'] for one in found}

    def assert_goes_on(self, guest: libvirt_vm.Guest, mark: str) -> libvirt_vm.Report:
        """It runs, its two memories agree, and it has not been started anew."""
        report = guest.next_report()
        self.assertEqual(('', mark), (report.booted, report.mark))
        self.assertEqual('running', guest.state())
        return report

    def kill(self, guest: libvirt_vm.Guest) -> None:
        """Its QEMU, as it stands."""
        os.kill(guest.pid(), signal.SIGKILL)
        limit = time.monotonic() + libvirt_vm.ANSWER_SECONDS
        while guest.state() != 'shut off':
            self.assertLess(time.monotonic(), limit)
            time.sleep(0.05)


class CheckpointTest(CheckpointTestCase):
    def test_session(self) -> None:
        guest = self.guest('vm', ram=True)
        guest.start()
        first = guest.mark('first')
        taken = json.loads(self.vm('checkpoint', guest.name, 'warm', '-f', 'json'))
        self.assertGreater(taken['pause'], 0)
        self.assertGreaterEqual(taken['durable after'], taken['pause'])
        self.assertGreater(taken['VM state size'], 0)
        pid, lost = guest.pid(), guest.mark('lost')
        self.assertGreater(lost.generation, first.generation)

        self.revert_in_place(guest, first)
        self.assertEqual(pid, guest.pid())
        guest.mark('second')
        self.vm('checkpoint', guest.name, 'hot')
        self.assertEqual({'warm': '', 'hot': 'warm'}, self.tree(guest))
        self.paused(guest)
        self.refused(guest)

        guest.mark('later')
        self.kill(guest)
        self.assertEqual({'warm': '', 'hot': 'warm'}, self.tree(guest))
        self.assertIn('started anew', self.vm('revert', guest.name, 'hot'))
        self.assert_goes_on(guest, 'second')
        self.assertNotEqual(pid, guest.pid())
        self.delete(guest)

    def revert_in_place(self, guest: libvirt_vm.Guest, first: libvirt_vm.Report) -> None:
        """Behind its own mark; that what came later is lost, its mark says. How far it has come
        since depends on the machine.
        """
        guest.reports()
        self.vm('revert', guest.name, 'warm')
        report = self.assert_goes_on(guest, 'first')
        self.assertGreaterEqual(report.generation, first.generation)

    def paused(self, guest: libvirt_vm.Guest) -> None:
        self.host.virsh('suspend', guest.name)
        self.vm('revert', guest.name, 'warm')
        self.assertEqual('paused', guest.state())
        self.host.virsh('resume', guest.name)
        self.assert_goes_on(guest, 'first')

    def refused(self, guest: libvirt_vm.Guest) -> None:
        """What cannot be, in words; the guest runs on."""
        self.assertIn('warm', self.vm_fails('checkpoint', guest.name, 'warm'))
        for command in ('revert', 'delete-checkpoint'):
            self.assertIn('cold', self.vm_fails(command, guest.name, 'cold'))
        self.assertIn('nobody', self.vm_fails('tree', 'nobody'))
        for words in (('delete', 'warm'), ('revert', '--reset', 'warm'), ('rename', 'warm', 'x')):
            with self.assertRaises(exception.ToolFailed) as caught:
                self.host.place.pcowctl('snapshot', words[0], '--domain', guest.name, *words[1:])
            self.assertIn('checkpoint of the whole VM', str(caught.exception))
        assert guest.ram is not None
        with self.assertRaises(exception.ToolFailed) as caught:
            self.host.place.pcowctl('image', 'delete', self.host.place.reference(guest.ram))
        self.assertIn('is open for writing', str(caught.exception))
        # libvirt wants a qcow2 disk, which would keep the state
        self.assertIn(
            'require all disks', self.host.virsh_fails('snapshot-create-as', guest.name, 's1')
        )
        self.assertEqual({'warm': '', 'hot': 'warm'}, self.tree(guest))
        self.assert_goes_on(guest, 'first')

    def delete(self, guest: libvirt_vm.Guest) -> None:
        """Running, and off; nothing of the run is left."""
        self.assertIn('given back', self.vm('delete-checkpoint', guest.name, 'warm'))
        self.assertEqual({'hot': ''}, self.tree(guest))
        self.assert_goes_on(guest, 'second')
        self.host.virsh('destroy', guest.name)
        self.assertEqual([], list((self.host.directory / 'lib/qemu/ram').iterdir()))
        self.assertIn('does not run', self.vm_fails('checkpoint', guest.name, 'x'))
        self.vm('delete-checkpoint', guest.name, 'hot')
        self.assertEqual({}, self.tree(guest))
        self.assertIn('hot', self.vm_fails('revert', guest.name, 'hot'))
        self.assertEqual('shut off', guest.state())
        for path in (guest.image, guest.ram):
            libvirt_vm.run(images.program('pcow-img'), 'check', path)

    def test_ram_that_is_no_image(self) -> None:
        guest = self.guest('plain')
        for command in (('tree',), ('revert', 'x'), ('delete-checkpoint', 'x')):
            self.assertIn('--ram', self.vm_fails(command[0], guest.name, *command[1:]))
        guest.start()
        for command in (('checkpoint', 'x'), ('revert', 'x'), ('delete-checkpoint', 'x')):
            self.assertIn('no pcow image', self.vm_fails(command[0], guest.name, *command[1:]))

    def test_domain_xml(self) -> None:
        """The image is made with the XML, counts in its pool, and goes as any other."""
        place = self.host.place
        words = [
            'domain-xml',
            place.reference(self.host.base),
            '--name',
            'x',
            '--kernel',
            str(self.host.kernel),
            '--memory',
            '64M',
            '--ram',
            place.pool_name,
        ]
        with self.assertRaises(exception.ToolFailed):  # a template is no NVDIMM to write to
            place.pcowctl(*words)
        place.image_path('xml')
        place.pcowctl('image', 'create', f'{place.pool_name}/{place.pool_name}-xml', '--size', '8M')
        words[1] = f'{place.pool_name}/{place.pool_name}-xml'
        path = self.host.directory / 'x.xml'
        path.write_text(place.pcowctl(*words))
        self.assertEqual(path.read_text(), place.pcowctl(*words))
        self.host.virsh('define', path)
        self.addCleanup(self.host.virsh, 'undefine', 'x')
        listed = {one['name'] for one in place.pcowctl_json('image', 'list', place.pool_name)}
        self.assertIn('x-ram', listed)
        self.assertEqual([], place.pcowctl_json('vm', 'tree', 'x'))
        place.pcowctl('image', 'delete', f'{place.pool_name}/x-ram')
