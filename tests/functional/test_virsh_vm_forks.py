# SPDX-License-Identifier: Apache-2.0
"""pcowctl vm fork on a running guest, through libvirt: each child checks its own memory."""

from collections.abc import Iterator
import json
import os
import time
from typing import Any
import xml.etree.ElementTree as ET

from pcow_driver.virt import fork_xml
from tests.functional import images
from tests.functional import libvirt_vm
from tests.functional import long
from tests.functional import test_virsh_checkpoints

_ETHERNET = 0x0200  # class of a PCI device
_INTERFACE = "<interface type='user'><model type='virtio'/></interface>"


class ForkTest(test_virsh_checkpoints.CheckpointTestCase):
    def fork(self, guest: libvirt_vm.Guest, *words: str) -> list[str]:
        """Names of the children; they go with the test."""
        made = json.loads(self.vm('fork', guest.name, *words, '-f', 'json'))
        for one in made:
            self.addCleanup(self._remove, one['name'])
            self.assertGreater(one['running after'], 0)
        return [one['name'] for one in made]

    def _remove(self, name: str) -> None:
        self.host.try_virsh('destroy', name)
        self.host.try_virsh('undefine', name)

    def report(self, name: str, mark: str = '') -> libvirt_vm.Report:
        """What a child says on its terminal, after it was given a mark, if any."""
        source = ET.fromstring(self.host.virsh('dumpxml', name)).find('devices/serial/source')
        assert source is not None
        terminal = os.open(source.get('path', ''), os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            if mark:
                os.write(terminal, f'mark {mark}\n'.encode())
            text, limit = b'', time.monotonic() + libvirt_vm.ANSWER_SECONDS
            while time.monotonic() < limit:
                try:
                    text += os.read(terminal, 65536)
                except BlockingIOError:
                    time.sleep(0.02)
                for generation, found, broken, booted in libvirt_vm.REPORT.findall(text):
                    self.assertFalse(broken or booted, text)
                    if not mark or found.decode() == mark:
                        return libvirt_vm.Report(int(generation), found.decode(), '')
        finally:
            os.close(terminal)
        raise AssertionError(f'{name} says nothing: {text!r}')

    def test_children(self) -> None:
        guest = self.guest('parent', ram=True)
        guest.start()
        first = guest.mark('warm')
        self.vm('checkpoint', guest.name, 'warm')
        guest.mark('later')
        children = self.fork(guest, '--checkpoint', 'warm', '--name', 'child-{n}', '--count', '2')
        self.assertEqual(['child-1', 'child-2'], children)
        for number, child in enumerate(children):
            found = self.report(child)
            self.assertEqual('warm', found.mark)
            self.assertGreaterEqual(found.generation, first.generation)
            self.report(child, f'own{number}')
        self.assert_goes_on(guest, 'later')
        for number, child in enumerate(children):
            self.assertEqual(f'own{number}', self.report(child).mark)
        uuids = {self.host.virsh('domuuid', name) for name in (guest.name, *children)}
        self.assertEqual(3, len(uuids))
        self.of_this_moment(guest)
        self.checkpoints_of_a_child(guest, children[0])
        self.refused(guest)
        # it is kept while there are children
        self.assertIn('stand', self.vm_fails('delete-checkpoint', guest.name, 'warm'))
        self.vm('revert', guest.name, 'warm')
        self.assert_goes_on(guest, 'warm')

    def of_this_moment(self, guest: libvirt_vm.Guest) -> None:
        (live,) = self.fork(guest, '--live', '--name', 'live')
        self.assertEqual('later', self.report(live).mark)
        self.assertIn('fork-live', self.tree(guest))

    def checkpoints_of_a_child(self, guest: libvirt_vm.Guest, child: str) -> None:
        """Of its own, from which others go on."""
        self.vm('checkpoint', child, 'own')
        self.report(child, 'lost')
        self.vm('revert', child, 'own')
        self.assertEqual('own0', self.report(child).mark)
        grand = json.loads(
            self.vm('fork', child, '--checkpoint', 'own', '--name', 'grand', '-f', 'json')
        )
        self.addCleanup(self._remove, 'grand')
        self.assertEqual(['grand'], [one['name'] for one in grand])
        self.assertEqual('own0', self.report('grand').mark)
        self.host.virsh('destroy', child)
        self.vm('revert', child, 'own')
        self.assertEqual('own0', self.report(child).mark)
        self.assert_goes_on(guest, 'later')

    def refused(self, guest: libvirt_vm.Guest) -> None:
        """In words, and nothing is left of it."""
        before = sorted(path.name for path in guest.image.parent.iterdir())
        domains = self.host.virsh('list', '--all', '--name')
        for words, said in (
            (('--checkpoint', 'none', '--name', 'x'), 'no checkpoint none'),
            (('--checkpoint', 'warm', '--name', 'child-1'), 'there is a domain child-1'),
            (('--checkpoint', 'warm', '--name', 'x', '--count', '2'), '{n}'),
            (('--checkpoint', 'warm', '--name', 'x', '--count', '0'), 'at least 1'),
            (('--checkpoint', 'warm', '--name', 'a/b'), 'a/b'),
        ):
            self.assertIn(said, self.vm_fails('fork', guest.name, *words))
        self.assertEqual(domains, self.host.virsh('list', '--all', '--name'))
        self.assertEqual(before, sorted(path.name for path in guest.image.parent.iterdir()))

    def test_guest_hook(self) -> None:
        """The guest of a fork learns who it is; one that does not do it is no fork."""
        parent = self.guest('hooked', ram=True, agent=True)
        parent.start()
        parent.mark('warm')
        self.wait_for_agent(parent.name)
        self.vm('checkpoint', parent.name, 'warm')
        words = ('--checkpoint', 'warm', '--guest-hook')
        (child,) = self.fork(parent, *words, '--name', 'another')
        self.assertEqual('another', self.host_name(child))
        self.assertEqual('warm', self.report(child).mark)
        before = sorted(path.name for path in parent.image.parent.iterdir())
        said = self.vm_fails('fork', parent.name, *words, '--name', 'refused')
        self.assertIn('this guest stays what it is', said)
        self.assertNotIn('refused', self.host.virsh('list', '--all', '--name').split())
        self.assertEqual(before, sorted(path.name for path in parent.image.parent.iterdir()))
        self.assert_goes_on(parent, 'warm')

    def test_guest_hook_without_agent(self) -> None:
        parent = self.guest('silent', ram=True)
        parent.start()
        self.vm('checkpoint', parent.name, 'warm')
        words = ('--checkpoint', 'warm', '--guest-hook', '--name', 'x')
        self.assertIn('install qemu-guest-agent', self.vm_fails('fork', parent.name, *words))
        self.assertNotIn('x', self.host.virsh('list', '--all', '--name').split())

    def host_name(self, name: str) -> str:
        asked = '{"execute": "guest-get-host-name"}'
        found = json.loads(self.host.virsh('qemu-agent-command', name, asked))
        return str(found['return']['host-name'])

    def test_new_interface(self) -> None:
        """As Nova begins a server with a warm image: the child has gone back, and has not run, when
        its interface comes, which its guest then finds.
        """
        guest = self.guest('alone', ram=True)
        self._add_port(guest.name)
        guest.start()
        guest.mark('warm')
        self.vm('checkpoint', guest.name, 'warm')
        child, paths = 'child', {}
        for path in (guest.ram, guest.image):
            made = path.with_stem(f'{path.stem}-{child}')
            self.host.place.pcowctl('image', 'fork', str(path), 'warm', made.stem)
            paths[str(path)] = str(made)
        xml = self.host.directory / 'child.xml'
        definition = self.host.virsh('dumpxml', '--inactive', guest.name)
        xml.write_text(fork_xml.fork(definition, child, paths))
        self.host.virsh('define', xml)
        self.addCleanup(self._remove, child)
        self.host.virsh('start', '--paused', child)
        self.host.virsh(
            'qemu-monitor-command', child, json.dumps({'execute': 'pcow-checkpoint-revert'})
        )
        interface = self.host.directory / 'interface.xml'
        interface.write_text(_INTERFACE)
        self.host.virsh('attach-device', child, interface, '--live', '--config')
        self.assertFalse(self._is_configured(child))
        self.host.virsh('resume', child)
        self.assertEqual('warm', self.report(child).mark)
        limit = time.monotonic() + libvirt_vm.ANSWER_SECONDS
        while not self._is_configured(child):
            self.assertLess(time.monotonic(), limit, 'its guest does not see the interface')
            time.sleep(0.1)
        self.assert_goes_on(guest, 'warm')

    def _add_port(self, name: str) -> None:
        """To which a q35 can have something attached."""
        root = ET.fromstring(self.host.virsh('dumpxml', '--inactive', name))
        devices = root.find('devices')
        assert devices is not None
        ET.SubElement(devices, 'controller', {'type': 'pci', 'model': 'pcie-root-port'})
        path = self.host.directory / 'port.xml'
        path.write_text(ET.tostring(root, encoding='unicode'))
        self.host.virsh('define', path)

    def _is_configured(self, name: str) -> bool:
        """Whether its guest has given the interface an address, as it does with what it finds."""
        request = json.dumps({'execute': 'query-pci'})
        found = json.loads(self.host.virsh('qemu-monitor-command', name, request))['return']
        return any(
            region.get('address', -1) not in (-1, 0)
            for item in self._devices(found)
            if item['class_info']['class'] == _ETHERNET
            for region in item['regions']
        )

    def _devices(self, buses: list[Any]) -> Iterator[Any]:
        for bus in buses:
            for item in bus['devices']:
                yield item
                yield from self._devices(
                    [{'devices': item.get('pci_bridge', {}).get('devices', [])}]
                )

    @long.only_long
    def test_guest_that_would_not_learn_of_it(self) -> None:
        guest = self.guest('plain', ram=True)
        root = ET.fromstring(self.host.virsh('dumpxml', '--inactive', guest.name))
        generation = root.find('genid')
        assert generation is not None
        root.remove(generation)
        path = self.host.directory / 'plain.xml'
        path.write_text(ET.tostring(root, encoding='unicode'))
        self.host.virsh('define', path)
        guest.start()
        guest.mark('warm')
        self.vm('checkpoint', guest.name, 'warm')
        words = ('--checkpoint', 'warm', '--name', 'twin')
        self.assertIn('--insecure', self.vm_fails('fork', guest.name, *words))
        self.assertEqual(['twin'], self.fork(guest, *words, '--insecure'))
        self.assertEqual('warm', self.report('twin').mark)
        for name in ('twin', 'twin-ram'):
            libvirt_vm.run(
                images.program('pcow-img'), 'info', '-U', guest.image.with_name(f'{name}.pcow')
            )
