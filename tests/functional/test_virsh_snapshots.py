# SPDX-License-Identifier: Apache-2.0
"""Unmodified virsh on a running guest whose memory is a pcow image: the guest itself checks its
memory after each revert.

PCOW_TRANSCRIPT=FILE writes what was typed and printed in the first test, for the documentation.
"""

import os
from pathlib import Path
import re

from pcow_driver.common import exception
from tests.functional import images
from tests.functional import libvirt_vm
from tests.functional import long


class VirshTestCase(libvirt_vm.HostTestCase):
    def guest(self, **options: object) -> libvirt_vm.Guest:
        name = self.id().rpartition('.')[2].removeprefix('test_').replace('_', '-')
        guest = libvirt_vm.Guest(self.host, name, **options)  # type: ignore[arg-type]
        self.addCleanup(guest.remove)
        guest.start()
        return guest

    def assert_trees(self, guest: libvirt_vm.Guest, expected: dict[str, str]) -> None:
        """libvirt, pcow-img, the carrier disk and QEMU know the same snapshots, with the same
        parents.
        """
        self.assertEqual(expected, guest.virsh_tree())
        self.assertEqual(expected, guest.image_tree())
        self.assertEqual(set(expected), guest.carrier_snapshots())
        if guest.state() != 'shut off':
            (info,) = guest.qmp('query-pcow')
            self.assertEqual(expected, libvirt_vm.tree(info['snapshots']))

    def assert_goes_on(self, guest: libvirt_vm.Guest, mark: str) -> libvirt_vm.Report:
        """It runs, its two memories agree, and it has not been started anew."""
        report = guest.next_report()
        self.assertEqual(('', mark), (report.booted, report.mark))
        self.assertEqual('running', guest.state())
        return report

    def revert(self, guest: libvirt_vm.Guest, name: str, mark: str, *more: str) -> None:
        guest.reports()
        self.host.virsh('snapshot-revert', guest.name, name, *more)
        self.assert_goes_on(guest, mark)

    def refused(
        self,
        guest: libvirt_vm.Guest,
        words: tuple[object, ...],
        *expected: str,
        state: str = 'running',
    ) -> str:
        """A virsh command that says why it does not work; nothing is different afterwards."""
        before = guest.known()
        message = self.host.virsh_fails(words[0], guest.name, *words[1:])
        for text in expected:
            self.assertIn(text, message)
        self.assertEqual(state, guest.state(), words)
        self.assertEqual(before, guest.known())
        return message

    def check_image(self, guest: libvirt_vm.Guest) -> None:
        libvirt_vm.run(images.program('pcow-img'), 'check', guest.image)


class TestSession(VirshTestCase):
    def setUp(self) -> None:
        self.host.transcript = []
        self.addCleanup(setattr, self.host, 'transcript', None)

    def note(self, guest: libvirt_vm.Guest) -> None:
        """What the guest says now, for the transcript."""
        assert self.host.transcript is not None
        lines = [
            line
            for line in guest.log.read_text(errors='replace').splitlines()
            if line.startswith('check: gen')
        ]
        self.host.transcript.append(f'the guest says: {lines[-1]}')

    def step(self, guest: libvirt_vm.Guest, expected: dict[str, str]) -> None:
        silent, self.host.transcript = self.host.transcript, None
        self.assert_trees(guest, expected)
        self.host.transcript = silent
        self.note(guest)

    def test_session(self) -> None:
        guest = self.guest()
        domain = guest.name
        first = guest.mark('first')
        self.host.virsh('snapshot-create-as', domain, 's1', '--description', 'before the upgrade')
        self.step(guest, {'s1': ''})
        second = guest.mark('second')
        self.assertGreater(second.generation, first.generation)
        xml = self.host.directory / 's2.xml'
        xml.write_text('<domainsnapshot><name>s2</name></domainsnapshot>')
        self.host.virsh('snapshot-create', domain, xml)
        self.step(guest, {'s1': '', 's2': 's1'})
        lost = guest.mark('lost')

        guest.reports()
        self.host.virsh('snapshot-revert', domain, 's1')
        report = self.assert_goes_on(guest, 'first')
        # exactly from the snapshot's moment: behind its own mark, and in front of what came later
        self.assertGreaterEqual(report.generation, first.generation)
        self.assertLess(report.generation, lost.generation)
        self.step(guest, {'s1': '', 's2': 's1'})
        self.assertEqual('s1', self.host.virsh('snapshot-current', domain, '--name').strip())

        guest.mark('third')
        self.host.virsh('snapshot-create-as', domain, 's3')
        self.host.virsh('snapshot-list', domain, '--tree')
        self.step(guest, {'s1': '', 's2': 's1', 's3': 's1'})
        self.revert(guest, 's2', 'second')
        self.step(guest, {'s1': '', 's2': 's1', 's3': 's1'})
        self.host.virsh('snapshot-delete', domain, 's1')
        self.host.virsh('snapshot-list', domain)
        self.step(guest, {'s2': '', 's3': ''})
        self.revert(guest, 's3', 'third')
        self.note(guest)
        info = self.host.virsh('snapshot-info', domain, 's3')
        for line in (r'^State: +running$', r'^Location: +internal$', r'^Current: +yes$'):
            self.assertRegex(info, re.compile(line, re.MULTILINE))
        self.revert(guest, 's2', 'second')
        for name in ('s3', 's2'):
            self.host.virsh('snapshot-delete', domain, name)
        self.step(guest, {})
        self.assert_goes_on(guest, 'second')
        transcript, self.host.transcript = self.host.transcript, None
        self.host.virsh('destroy', domain)
        self.check_image(guest)
        if 'PCOW_TRANSCRIPT' in os.environ:
            Path(os.environ['PCOW_TRANSCRIPT']).write_text(self.cleaned(transcript or [], domain))

    def cleaned(self, transcript: list[str], domain: str) -> str:
        """Without what only the test asks for, and with names as a person would choose."""
        lines, shown = [], True
        for line in transcript:
            if line.startswith('$ '):
                shown = line.split()[2].startswith('snapshot-')
            if shown or line.startswith('the guest says'):
                lines.append(
                    line.rstrip().replace(domain, 'web1').replace(f'{self.host.directory}/', '')
                )
        return '\n'.join(lines) + '\n'

    @long.only_long
    def test_the_guest_would_notice(self) -> None:
        """The check can fail: a few bytes of its persistent memory are changed behind its back."""
        guest = self.guest()
        word = b'to-be-changed-from-outside'
        guest.mark(word.decode())
        self.host.virsh('suspend', guest.name)
        self.assertGreater(self.change_memory(guest, word), 0)
        self.host.virsh('resume', guest.name)
        with self.assertRaisesRegex(AssertionError, 'the guest found: BROKEN mark'):
            guest.next_report()

    def change_memory(self, guest: libvirt_vm.Guest, word: bytes) -> int:
        """Change one letter of a word wherever it is found in QEMU's mapping of the image; returns
        how often.
        """
        changed = 0
        with (
            open(f'/proc/{guest.pid()}/maps') as maps,
            open(f'/proc/{guest.pid()}/mem', 'r+b') as memory,
        ):
            for line in maps:
                fields = line.split()
                if fields[-1] == str(guest.image) and 'w' in fields[1]:
                    start, end = (int(field, 16) for field in fields[0].split('-'))
                    for address in range(start, end, 4096):
                        memory.seek(address)
                        try:
                            position = memory.read(4096).find(word + b'\0')
                        except OSError:  # not in the file yet
                            continue
                        if position >= 0:
                            memory.seek(address + position)
                            memory.write(b'T')
                            memory.flush()
                            changed += 1
        return changed


class TestStates(VirshTestCase):
    def test_paused(self) -> None:
        guest = self.guest()
        guest.mark('asleep')
        self.host.virsh('suspend', guest.name)
        self.host.virsh('snapshot-create-as', guest.name, 'p')
        self.assertEqual('paused', guest.state())
        self.host.virsh('resume', guest.name)
        guest.mark('awake')
        self.host.virsh('snapshot-revert', guest.name, 'p')
        self.assertEqual('paused', guest.state())
        guest.reports()
        self.host.virsh('resume', guest.name)
        self.assert_goes_on(guest, 'asleep')
        guest.mark('awake')
        self.revert(guest, 'p', 'asleep', '--running')
        self.assert_trees(guest, {'p': ''})

    def test_off(self) -> None:
        """libvirt runs qemu-img then; etc/libvirt/bin/qemu-img takes the image along."""
        guest = self.guest()
        guest.mark('on')
        self.host.virsh('snapshot-create-as', guest.name, 'on')
        self.host.virsh('destroy', guest.name)
        self.host.virsh('snapshot-create-as', guest.name, 'off')
        self.assert_trees(guest, {'on': '', 'off': 'on'})
        before = self.contents(guest, '-l', 'off')
        self.assertEqual(before, self.contents(guest))
        guest.start()
        guest.mark('later')
        self.host.virsh('snapshot-revert', guest.name, 'off')
        self.assertEqual('shut off', guest.state())
        self.assertEqual(before, self.contents(guest))
        # RAM and image of a snapshot of the running VM, from off
        self.host.virsh('snapshot-revert', guest.name, 'on')
        self.assert_goes_on(guest, 'on')
        self.host.virsh('destroy', guest.name)
        self.refused_while_off(guest)
        for name in ('on', 'off'):
            self.host.virsh('snapshot-delete', guest.name, name)
        self.assert_trees(guest, {})
        self.check_image(guest)

    def contents(self, guest: libvirt_vm.Guest, *words: str) -> str:
        raw = self.host.directory / 'contents.raw'
        libvirt_vm.run(
            images.program('pcow-img'),
            'convert',
            '-f',
            'pcow',
            '-O',
            'raw',
            *words,
            guest.image,
            raw,
        )
        digest = images.digest(raw)
        raw.unlink()
        return digest

    def refused_while_off(self, guest: libvirt_vm.Guest) -> None:
        def refused(words: tuple[object, ...], *expected: str) -> None:
            self.refused(guest, words, *expected, state='shut off')

        refused(
            ('snapshot-create-as', 'd', '--disk-only'),
            'would leave out',
            str(guest.image),
            'without --disk-only',
        )
        refused(
            ('snapshot-create-as', 'm', '--memspec', self.host.directory / 'memory'),
            'cannot be saved with offline',
        )
        image = images.program('pcow-img')
        libvirt_vm.run(image, 'snapshot', '-c', 'mine', guest.image)
        refused(('snapshot-create-as', 'mine'), str(guest.image), "has a snapshot 'mine' already")
        libvirt_vm.run(image, 'snapshot', '-d', 'mine', guest.image)
        libvirt_vm.run(image, 'snapshot', '--rename', 'off', 'hidden', guest.image)
        refused(
            ('snapshot-revert', 'off'),
            str(guest.image),
            "has no snapshot 'off'",
            'nothing was changed',
        )
        libvirt_vm.run(image, 'snapshot', '--rename', 'hidden', 'off', guest.image)


class TestRefused(VirshTestCase):
    def test_what_would_leave_the_image_out(self) -> None:
        guest = self.guest()
        guest.mark('unharmed')
        file = self.host.directory / 'saved'
        moved = ('cannot be migrated or saved to a file', str(guest.image), 'virsh snapshot-create')
        left_out = (
            'would leave out the pcow image',
            str(guest.image),
            'virsh snapshot-create without --disk-only',
        )
        for words, expected in (
            (('save', file), moved),
            (('managedsave',), moved),
            (('snapshot-create-as', 'm', '--memspec', file), moved),
            (
                (
                    'snapshot-create-as',
                    'm',
                    '--memspec',
                    file,
                    '--diskspec',
                    f'vda,snapshot=external,file={file}',
                ),
                moved,
            ),
            (('snapshot-create-as', 'd', '--disk-only'), left_out),
            (('snapshot-create-as', 'd', '--disk-only', '--quiesce'), ('agent',)),
            (
                ('snapshot-create-as', 'd', '--quiesce'),
                ("'VIR_DOMAIN_SNAPSHOT_CREATE_DISK_ONLY' is required",),
            ),
        ):
            self.refused(guest, words, *expected)
            self.assert_goes_on(guest, 'unharmed')
        message = self.host.virsh(
            'qemu-monitor-command', guest.name, '--hmp', f'migrate file:{file}'
        )
        self.assertIn('cannot be migrated', message)
        self.assert_goes_on(guest, 'unharmed')
        self.assertFalse(file.exists())
        self.assert_trees(guest, {})

    def test_no_carrier_disk(self) -> None:
        """libvirt refuses; pcowctl and QMP work on the same tree."""
        guest = self.guest(carrier=False)
        guest.mark('diskless')
        self.refused(guest, ('snapshot-create-as', 's'), 'disk')
        self.host.place.pcowctl('snapshot', 'create', '--domain', guest.name, 'by-pcowctl')
        guest.qmp('pcow-snapshot-create', id='memnvdimm0', name='qmp')
        self.host.place.pcowctl('snapshot', 'rename', '--domain', guest.name, 'qmp', 'by-qmp')
        expected = {'by-pcowctl': '', 'by-qmp': 'by-pcowctl'}
        self.assertEqual(expected, guest.image_tree())
        shown = self.host.place.pcowctl_json('snapshot', 'list', '--domain', guest.name)
        self.assertEqual(expected, {row['name']: row['parent'] for row in shown})
        (info,) = guest.qmp('query-pcow')
        self.assertEqual(list(expected), [snapshot['name'] for snapshot in info['snapshots']])
        with self.assertRaisesRegex(exception.ToolFailed, 'its memory would change beneath it'):
            self.host.place.pcowctl('snapshot', 'revert', '--domain', guest.name, 'by-pcowctl')
        self.assert_goes_on(guest, 'diskless')
        self.host.virsh('destroy', guest.name)
        self.host.place.pcowctl('snapshot', 'revert', '--domain', guest.name, 'by-pcowctl')
        self.host.place.pcowctl('snapshot', 'delete', '--domain', guest.name, 'by-qmp')
        self.assertEqual({'by-pcowctl': ''}, guest.image_tree())
        self.check_image(guest)
        guest.start()


class TestAllOrNothing(VirshTestCase):
    def test_full_carrier(self) -> None:
        guest = self.guest(carrier_directory=self.host.small)
        guest.mark('kept')
        self.refused(
            guest,
            ('snapshot-create-as', 's'),
            'Failed to take snapshot',
            'Error while writing VM state',
        )
        self.assert_goes_on(guest, 'kept')
        self.assert_trees(guest, {})

    def test_name_on_one_side(self) -> None:
        guest = self.guest()
        self.host.place.pcowctl('snapshot', 'create', '--domain', guest.name, 'image')
        self.refused(
            guest,
            ('snapshot-create-as', 'image'),
            str(guest.image),
            "has a snapshot 'image' already",
            'delete that one first',
        )
        self.host.place.pcowctl('snapshot', 'delete', '--domain', guest.name, 'image')
        self.host.virsh('destroy', guest.name)
        libvirt_vm.run('/usr/bin/qemu-img', 'snapshot', '-c', 'disk', guest.carrier)
        guest.start()
        guest.mark('kept')
        self.refused(
            guest,
            ('snapshot-create-as', 'disk'),
            "has a snapshot 'disk' already",
            'delete that one first',
        )
        self.assert_goes_on(guest, 'kept')

    def test_deleted_behind_the_back_of_libvirt(self) -> None:
        """libvirt ends the running QEMU before it tries to revert, and nothing can stop it; nothing
        else is lost.
        """
        guest = self.guest()
        self.host.virsh('snapshot-create-as', guest.name, 's')
        guest.qmp('pcow-snapshot-delete', id='memnvdimm0', name='s')
        before = guest.image_snapshots()
        message = self.host.virsh_fails('snapshot-revert', guest.name, 's')
        for text in (str(guest.image), "has no snapshot 's'"):
            self.assertIn(text, message)
        self.assertEqual('shut off', guest.state())
        self.assertEqual(before, guest.image_snapshots())
        libvirt_vm.run(images.program('pcow-img'), 'snapshot', '-c', 's', guest.image)
        message = self.host.virsh_fails('snapshot-revert', guest.name, 's')
        for text in (str(guest.image), 'do not belong together', 'nothing was changed'):
            self.assertIn(text, message)
        self.host.virsh('snapshot-delete', guest.name, 's')
        self.assert_trees(guest, {})
        self.check_image(guest)
        guest.start()

    def test_pcowctl_deletes_all_of_it(self) -> None:
        guest = self.guest()
        guest.mark('kept')
        for name in ('s1', 's2'):
            self.host.virsh('snapshot-create-as', guest.name, name)
        self.host.place.pcowctl('snapshot', 'delete', '--domain', guest.name, 's1')
        self.assert_trees(guest, {'s2': ''})
        self.revert(guest, 's2', 'kept')
        self.host.virsh('destroy', guest.name)
        with self.assertRaisesRegex(exception.ToolFailed, 'snapshot of the whole VM'):
            self.host.place.pcowctl('snapshot', 'rename', '--domain', guest.name, 's2', 's3')
        self.host.place.pcowctl('snapshot', 'delete', '--domain', guest.name, 's2')
        self.assert_trees(guest, {})

    def test_pcowctl_reverts_the_image_alone_on_request_only(self) -> None:
        guest = self.guest()
        guest.mark('then')
        self.host.virsh('snapshot-create-as', guest.name, 's')
        self.host.virsh('destroy', guest.name)
        libvirt_vm.run(images.program('pcow-io'), '-c', 'write -q -P 7 8M 4k', guest.image)
        before = guest.image_snapshots()
        with self.assertRaisesRegex(
            exception.ToolFailed,
            'snapshot of the whole VM.*use virsh snapshot-revert.*--image-only',
        ):
            self.host.place.pcowctl('snapshot', 'revert', '--domain', guest.name, 's')
        self.assertEqual(before, guest.image_snapshots())
        libvirt_vm.run(images.program('pcow-io'), '-c', 'read -q -P 7 8M 4k', guest.image)
        self.host.place.pcowctl('snapshot', 'revert', '--image-only', '--domain', guest.name, 's')
        with self.assertRaises(AssertionError):
            libvirt_vm.run(images.program('pcow-io'), '-c', 'read -q -P 7 8M 4k', guest.image)
        with self.assertRaisesRegex(exception.ToolFailed, 'unfinished work'):
            self.host.place.pcowctl('snapshot', 'create', '--domain', guest.name, '.loading-1.2-1')
        self.host.virsh('snapshot-delete', guest.name, 's')
        self.assert_trees(guest, {})

    def test_an_image_stands_on_it(self) -> None:
        """libvirt does not hear QEMU's refusal and forgets its part; image and disk keep theirs
        until it is deleted there.
        """
        guest = self.guest()
        guest.mark('kept')
        self.host.virsh('snapshot-create-as', guest.name, 's')
        fork = guest.image.with_name('fork.pcow')
        libvirt_vm.run(
            images.program('pcow-img'),
            'create',
            '-q',
            '-b',
            guest.image,
            '-o',
            'base_snapshot=s',
            fork,
        )
        self.addCleanup(fork.unlink, missing_ok=True)
        self.host.virsh('snapshot-delete', guest.name, 's')
        self.assertEqual(
            ({}, {'s': ''}, {'s'}),
            (guest.virsh_tree(), guest.image_tree(), guest.carrier_snapshots()),
        )
        self.assert_goes_on(guest, 'kept')
        said = self.host.virsh('qemu-monitor-command', guest.name, '--hmp', 'delvm s')
        for text in (str(guest.image), "on snapshot 's'", fork.name):
            self.assertIn(text, said)
        self.refused(guest, ('snapshot-create-as', 's'), "has a snapshot 's' already")
        fork.unlink()
        self.assertEqual(
            '', self.host.virsh('qemu-monitor-command', guest.name, '--hmp', 'delvm s').strip()
        )
        self.assert_trees(guest, {})
        self.assert_goes_on(guest, 'kept')
        self.host.virsh('destroy', guest.name)
        self.check_image(guest)


class TestQuiesce(VirshTestCase):
    def needs_recovery(self, guest: libvirt_vm.Guest, snapshot: str) -> bool:
        """Whether the journal of the file system in a snapshot has to be replayed: not if it was
        frozen.
        """
        raw = self.host.directory / 'snapshot.raw'
        words = ('convert', '-U', '-l', snapshot, '-f', 'pcow', '-O', 'raw', guest.image, raw)
        libvirt_vm.run(images.program('pcow-img'), *words)
        shown = libvirt_vm.run('/sbin/dumpe2fs', '-h', f'{raw}?offset={libvirt_vm.FILE_SYSTEM}')
        raw.unlink()
        (features,) = re.findall(r'^Filesystem features: +(.*)$', shown, re.MULTILINE)
        return 'needs_recovery' in features

    def test_agent(self) -> None:
        guest = self.guest(agent=True)
        self.host.place.pcowctl('snapshot', 'create', '--domain', guest.name, 'crash-consistent')
        self.host.place.pcowctl('snapshot', 'create', '--quiesce', '--domain', guest.name, 'quiet')
        self.assertTrue(self.needs_recovery(guest, 'crash-consistent'))
        self.assertFalse(self.needs_recovery(guest, 'quiet'))
        self.assertEqual('thawed', self.fs_status(guest))
        guest.mark('thawed')
        with self.assertRaisesRegex(exception.ToolFailed, "has a snapshot 'quiet' already"):
            self.host.place.pcowctl(
                'snapshot', 'create', '--quiesce', '--domain', guest.name, 'quiet'
            )
        self.assertEqual('thawed', self.fs_status(guest))
        self.host.virsh('suspend', guest.name)
        with self.assertRaisesRegex(
            exception.ToolFailed, 'does not run, so its agent cannot quiesce it'
        ):
            self.host.place.pcowctl(
                'snapshot', 'create', '--quiesce', '--domain', guest.name, 'asleep'
            )
        self.host.virsh('resume', guest.name)
        self.assertEqual({'crash-consistent', 'quiet'}, set(guest.image_tree()))

    def fs_status(self, guest: libvirt_vm.Guest) -> str:
        reply = self.host.virsh(
            'qemu-agent-command', guest.name, '{"execute": "guest-fsfreeze-status"}'
        )
        return re.sub(r'.*"return": *"(\w+)".*', r'\1', reply.strip())

    def test_no_agent(self) -> None:
        guest = self.guest()
        with self.assertRaisesRegex(
            exception.ToolFailed, 'install qemu-guest-agent in the guest.*or leave out --quiesce'
        ):
            self.host.place.pcowctl(
                'snapshot', 'create', '--quiesce', '--domain', guest.name, 'quiet'
            )
        self.assertEqual({}, guest.image_tree())
