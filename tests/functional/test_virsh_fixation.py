# SPDX-License-Identifier: Apache-2.0
"""VMs that outlive their host, or their QEMU, through libvirt: the guest itself checks its memory
when it goes on. A host that goes down is what happens to it then: its domains end.
"""

import json
import re
import time

from tests.functional import fixation_case
from tests.functional import images
from tests.functional import libvirt_vm


class FixationTest(fixation_case.FixationTestCase):
    def test_the_host_goes_down(self) -> None:
        """While the loop is there, as it is at a shutdown."""
        first, second, other = (
            self.protected(name, *words, agent=name == 'first')
            for name, words in (
                ('first', ('--interval', 'off', '--priority', '1', '--guest-hook')),
                ('second', ('--interval', 'off', '--guest-hook')),  # it has no agent
                ('other', ('--on-shutdown', 'stop', '--interval', '1s')),
            )
        )
        self.wait_for_agent(first.name)
        loop = self.watch()
        first.mark('kept')
        second.mark('kept')
        self.host.virsh('suspend', second.name)
        self.wait(lambda: self.row(other)['last checkpoint'])
        done = {row['name']: row for row in self.pcowctl('host', 'fixate', '--deadline', '60s')}
        self.assertEqual({first.name, second.name}, set(done))
        self.assertEqual([''] * 2, [row['problem'] for row in done.values()])
        for guest in (first, second):
            self.assertEqual([done[guest.name]['checkpoint']], self.names(guest))
        self.host.virsh('destroy', other.name)  # as libvirt-guests does then
        self.wait(lambda: self.row(other)['state'] == 'off')
        time.sleep(2)
        self.assertEqual(['shut off'] * 3, [guest.state() for guest in (first, second, other)])
        self.assertEqual('fixated', self.row(first)['state'])
        self.assertEqual([], self.pcowctl('host', 'fixate'))
        self.end(loop)

        back = {row['name']: row for row in self.pcowctl('host', 'recover')}
        self.assertEqual({first.name, second.name}, set(back))
        for name, row in back.items():
            self.assertEqual(done[name]['checkpoint'], row['checkpoint'])
        self.assert_goes_on(first, 'kept')
        self.assertEqual('paused', second.state())
        self.host.virsh('resume', second.name)
        self.assert_goes_on(second, 'kept')
        self.assertEqual(['fixate', 'recovered'], self.hook_calls(first))
        self.assertEqual('runs', self.row(first)['state'])
        self.assertEqual([], self.pcowctl('host', 'recover'))
        self.assertNotIn('unsaved', str(first.image_snapshots()))
        self.check(first, second)

    @staticmethod
    def hook_calls(guest: libvirt_vm.Guest) -> list[str]:
        """What the program of the guest was told."""
        return re.findall(r'pcow-hook (\w+)', guest.log.read_text(errors='replace'))

    def test_the_host_was_started_again(self) -> None:
        """The loop has go on what was fixated before that."""
        guest = self.protected('again', '--interval', 'off')
        loop = self.watch()
        guest.mark('kept')
        (done,) = self.pcowctl('host', 'fixate')
        self.assertEqual('', done['problem'])
        time.sleep(2)
        self.assertEqual('shut off', guest.state())
        self.end(loop)
        (path,) = (self.host.run.directory / 'pcow/protected').glob('*.json')
        record = json.loads(path.read_text())
        path.write_text(json.dumps(record | {'run': 'another-boot/1-1'}))
        loop = self.watch()
        self.wait(lambda: guest.state() == 'running')
        self.assert_goes_on(guest, 'kept')
        self.end(loop)
        self.check(guest)

    def test_shut_down_as_it_could_not_be_fixated(self) -> None:
        guest = self.protected('late', '--interval', '1s')
        loop = self.watch()
        self.wait(lambda: self.row(guest)['last checkpoint'])
        self.fails('host', 'fixate', '--deadline', '0.001s')
        self.host.virsh('destroy', guest.name)  # as libvirt-guests does then
        self.wait(lambda: 'was not fixated' in self.row(guest)['state'])
        self.end(loop)
        self.assertEqual([], self.pcowctl('host', 'recover'))
        self.assertEqual('shut off', guest.state())

    def check(self, *guests: libvirt_vm.Guest) -> None:
        for guest in guests:
            self.host.virsh('destroy', guest.name)
            for path in (guest.image, guest.ram):
                libvirt_vm.run(images.program('pcow-img'), 'check', path)

    def test_a_killed_one_goes_on_by_itself(self) -> None:
        guest = self.protected('killed', '--interval', '1s')
        loop = self.watch()
        guest.mark('kept')
        known = self.row(guest)['last checkpoint']
        self.wait(lambda: self.row(guest)['last checkpoint'] not in ('', known))
        known = self.row(guest)['last checkpoint']
        self.assertTrue(known.startswith('pcow-auto-'))
        self.wait(lambda: self.row(guest)['last checkpoint'] != known)
        pid = guest.pid()
        self.kill(guest)
        self.wait(lambda: guest.state() == 'running')
        self.assertNotEqual(pid, guest.pid())
        self.assert_goes_on(guest, 'kept')
        self.assertIn('pcow-unsaved-', str(guest.image_snapshots()))
        # a checkpoint of somebody's is one as well, and stays
        self.vm('checkpoint', guest.name, 'mine')
        self.wait(lambda: self.row(guest)['last checkpoint'] not in (known, 'mine'))
        self.assertIn('mine', self.names(guest))

        self.host.virsh('destroy', guest.name)
        self.wait(lambda: self.row(guest)['state'] == 'off')
        time.sleep(2)
        self.assertEqual('shut off', guest.state())
        self.end(loop)
        self.assertEqual([], self.pcowctl('host', 'recover'))

    def test_the_loop_was_not_there(self) -> None:
        """A power cut: libvirt does not know how it ended, nor does anybody else."""
        guest = self.protected('cut', '--interval', '1s')
        loop = self.watch()
        guest.mark('kept')
        known = self.row(guest)['last checkpoint']
        self.wait(lambda: self.row(guest)['last checkpoint'] not in ('', known))
        loop.kill()
        loop.wait()
        self.kill(guest)
        self.assertEqual('ended, goes on', self.row(guest)['state'])
        (back,) = self.pcowctl('host', 'recover')
        self.assertIn('pcow-auto-', back['checkpoint'])
        self.assert_goes_on(guest, 'kept')
        # what cannot go on is left to its owner, with words
        self.host.virsh('suspend', guest.name)
        for name in self.names(guest):
            self.vm('delete-checkpoint', guest.name, name)
        self.kill(guest)
        self.assertIn('boots it', self.fails('host', 'recover'))
        self.assertEqual([], self.pcowctl('host', 'recover'))
        self.assertIn('boots it', self.fails('host', 'recover', '--failed'))
        self.assertIn('no checkpoint of its last run to go on from', self.row(guest)['state'])
        self.assertEqual('shut off', guest.state())
        guest.start()
        self.assertEqual('runs', self.row(guest)['state'])

    def test_refused(self) -> None:
        plain = self.guest('plain')
        self.assertIn('domain-xml --ram', self.fails('vm', 'protect', plain.name))
        guest = self.guest('refused', ram=True)
        self.host.virsh('autostart', guest.name)
        self.assertIn('autostart --disable', self.fails('vm', 'protect', guest.name))
        self.host.virsh('autostart', '--disable', guest.name)
        for words, said in (
            (('--interval', '0s'), 'not from 1 s'),
            (('--interval', 'often'), 'give seconds'),
            (('--priority', '5000'), '-1000 to 1000'),
            (('--list',), 'give DOMAIN, or --list alone'),
            (('--remove', '--interval', '1s'), '--remove goes with DOMAIN alone'),
        ):
            self.assertIn(said, self.fails('vm', 'protect', guest.name, *words))
        self.assertEqual([], self.pcowctl('vm', 'protect', '--list'))
        self.host.place.pcowctl('vm', 'protect', guest.name, '--interval', '30s')
        self.host.place.pcowctl('vm', 'protect', guest.name, '--priority', '3')
        row = self.row(guest)
        self.assertEqual(
            ('off', '30', 'fixate', 3, 'end of QEMU', ''),
            (
                row['state'],
                row['interval'],
                row['on shutdown'],
                row['priority'],
                row['outlives'],
                row['last checkpoint'],
            ),
        )
        self.host.place.pcowctl('vm', 'protect', guest.name, '--remove')
        self.assertEqual([], self.pcowctl('vm', 'protect', '--list'))
