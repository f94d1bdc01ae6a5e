# SPDX-License-Identifier: Apache-2.0
"""Who does the work, QEMU or pcow-img.

The connection here is a stand-in that records what it is told; real libvirt and QEMU do the same in
tests/functional.
"""

from collections.abc import Callable
import itertools
import json
import os
import subprocess
import sys
from types import ModuleType
from typing import Any
from unittest import mock
import uuid
import xml.etree.ElementTree as ET

import fixtures

from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.export import control_socket
from pcow_driver.virt import disk_xml
from pcow_driver.virt import domain
from pcow_driver.virt import libvirt_domain
from tests.unit.pcow_driver import base

NVDIMM = (
    "<memory model='nvdimm' access='shared'><source><path>{0}</path></source>"
    "<target><size unit='KiB'>67584</size><node>0</node></target><alias name='{1}'/></memory>"
)


class RecordedDomain:
    def __init__(self, paths: list[str], active: bool) -> None:
        self.paths, self.active, self.calls = paths, active, list[Any]()
        self.reply: dict[str, Any] = {'return': {}}
        self.on_disk: list[disk_xml.Disk] = []
        self.saved = False
        self.monitor: Callable[[str], str] | None = None  # QEMU, where it does not only record
        self.uuid = '6f0c1c52-5d1e-4c0b-9a3f-2b7e4f90d1a6'
        self.label = ''

    def hasManagedSaveImage(self, flags: int) -> int:  # noqa: N802
        assert flags == 0
        return int(self.saved)

    def isActive(self) -> int:  # noqa: N802
        return int(self.active)

    def XMLDesc(self, _flags: int) -> str:  # noqa: N802
        devices = ''.join(NVDIMM.format(path, f'nvdimm{i}') for i, path in enumerate(self.paths))
        metadata = ET.tostring(disk_xml.metadata(self.on_disk), encoding='unicode')
        return (
            f"<domain type='qemu'><metadata>{metadata}</metadata>"
            f"<devices>{devices}</devices>{self.seclabel()}</domain>"
        )

    def seclabel(self) -> str:
        return f"<seclabel model='dac'><label>{self.label}</label></seclabel>" if self.label else ''

    def UUIDString(self) -> str:  # noqa: N802
        return self.uuid

    def state(self) -> tuple[int, int]:
        return 1, 0

    def listAllSnapshots(self) -> list[object]:  # noqa: N802
        return []

    def suspend(self) -> None:
        self.calls.append('suspend')

    def resume(self) -> None:
        self.calls.append('resume')

    def lookupByName(self, _name: str) -> 'RecordedDomain':  # noqa: N802 - the connection as well
        return self


def _monitor(recorded: RecordedDomain, command: str, flags: int) -> str:
    assert flags == 0
    if recorded.monitor is not None:
        return recorded.monitor(command)
    if json.loads(command) != {'execute': 'query-status'}:  # whether it answers
        recorded.calls.append(json.loads(command))
    return json.dumps(recorded.reply)


def record_libvirt(test: base.TestCase) -> None:
    """Let the test import a libvirt that records."""
    for name in ('libvirt', 'libvirt_qemu'):
        module = ModuleType(name)
        test.useFixture(fixtures.MonkeyPatch('sys.modules', sys.modules | {name: module}))
        setattr(module, 'VIR_DOMAIN_RUNNING', 1)  # noqa: B010
        setattr(module, 'VIR_DOMAIN_PAUSED', 3)  # noqa: B010
        setattr(module, 'VIR_DOMAIN_PAUSED_USER', 1)  # noqa: B010
        setattr(module, 'VIR_DOMAIN_PAUSED_FROM_SNAPSHOT', 7)  # noqa: B010
        setattr(module, 'VIR_DOMAIN_PAUSED_STARTING_UP', 11)  # noqa: B010
        setattr(module, 'VIR_DOMAIN_PAUSED_IOERROR', 5)  # noqa: B010
        setattr(module, 'VIR_DOMAIN_PAUSED_WATCHDOG', 6)  # noqa: B010
        setattr(module, 'VIR_DOMAIN_PAUSED_SHUTTING_DOWN', 8)  # noqa: B010
        setattr(module, 'VIR_DOMAIN_PAUSED_CRASHED', 10)  # noqa: B010
        setattr(module, 'VIR_DOMAIN_JOB_NONE', 0)  # noqa: B010
        setattr(module, 'qemuMonitorCommand', _monitor)  # noqa: B010


class DomainTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        record_libvirt(self)
        self.image = self.directory / 'vm.pcow'
        self.image.write_text('')
        self.log = self.directory / 'log'
        self.configure(
            pcow_img=self.script(
                'pcow-img', f'#!/bin/sh\necho "$@" >> {self.log}\necho \'{{"freed": 4096}}\'\n'
            )
        )

    def _domain(self, *paths: str, active: bool) -> tuple[RecordedDomain, domain.Domain]:
        recorded = RecordedDomain(list(paths) or [str(self.image)], active)
        return recorded, domain.Domain(recorded, 'vm')

    def _command(self, name: str) -> dict[str, Any]:
        return {'execute': f'pcow-snapshot-{name}', 'arguments': {'id': 'memnvdimm0', 'name': 's1'}}

    def test_running(self) -> None:
        recorded, found = self._domain(active=True)
        found.snapshot_create('s1')
        found.snapshot_delete('s1')
        self.assertEqual([self._command('create'), self._command('delete')], recorded.calls)
        self.assertFalse(self.log.exists())

    def test_off(self) -> None:
        recorded, found = self._domain(active=False)
        found.snapshot_create('s1')
        found.snapshot_revert('s1')
        found.snapshot_rename('s1', 's2')
        self.assertEqual(4096, found.snapshot_delete('s2'))
        self.assertEqual([], recorded.calls)
        commands = ('-c s1', '-a s1', '--rename s1 s2', '--output=json -d s2')
        self.assertEqual(
            [f'snapshot {words} {self.image}' for words in commands],
            self.log.read_text().splitlines(),
        )

    def test_qemu_cannot_see_whether_images_stand_on_a_snapshot(self) -> None:
        """pcow-img looks in its place, then QEMU is asked again."""
        recorded, found = self._domain(active=True)
        recorded.reply = {
            'error': {'class': 'GenericError', 'desc': "run 'pcow-img snapshot --unpin'"}
        }
        self.assertRaises(exception.QmpFailed, found.snapshot_delete, 's1')
        self.assertEqual([self._command('delete')] * 2, recorded.calls)
        self.assertEqual([f'snapshot --unpin s1 {self.image}'], self.log.read_text().splitlines())

    def test_revert_of_a_running_guest_needs_a_reset(self) -> None:
        recorded, found = self._domain(active=True)
        error = self.assertRaises(exception.DomainInvalid, found.snapshot_revert, 's1')
        self.assertIn('--reset', str(error))
        self.assertEqual([], recorded.calls)
        found.snapshot_revert('s1', reset=True)
        self.assertEqual(['suspend', self._command('revert'), 'resume'], recorded.calls)

    def test_ram_that_was_saved_goes_with_what_the_image_held(self) -> None:
        recorded, found = self._domain(active=False)
        recorded.saved = True
        error = self.assertRaises(exception.DomainInvalid, found.snapshot_revert, 's1')
        self.assertIn('virsh managedsave-remove', str(error))
        self.assertFalse(self.log.exists())
        found.snapshot_create('s1')
        self.assertTrue(self.log.exists())

    def test_the_guest_goes_on_when_revert_fails(self) -> None:
        recorded, found = self._domain(active=True)
        recorded.reply = {'error': {'class': 'GenericError', 'desc': 'no snapshot s1'}}
        error = self.assertRaises(exception.QmpFailed, found.snapshot_revert, 's1', reset=True)
        self.assertIn('no snapshot s1', str(error))
        self.assertEqual('resume', recorded.calls[-1])

    def test_rename_of_a_running_guest(self) -> None:
        recorded, found = self._domain(active=True)
        found.snapshot_rename('s1', 's2')
        command = self._command('rename')
        command['arguments']['new-name'] = 's2'
        self.assertEqual([command], recorded.calls)
        self.assertRaises(exception.InvalidName, found.snapshot_rename, 's1', 'a\nb')
        self.assertFalse(self.log.exists())

    def test_qemu_without_the_backend(self) -> None:
        recorded, found = self._domain(active=True)
        recorded.reply = {'error': {'class': 'CommandNotFound', 'desc': 'x'}}
        self.assertIn(
            '<emulator>', str(self.assertRaises(exception.QmpFailed, found.snapshot_create, 's1'))
        )

    def _on_disk(self, *, active: bool) -> tuple[RecordedDomain, domain.Domain]:
        recorded, found = self._domain(active=active)
        recorded.paths = []
        recorded.on_disk = [disk_xml.Disk(path=str(self.image), size=2 * units.MIB)]
        return recorded, found

    def test_a_disk_of_a_running_guest_is_its_servers(self) -> None:
        recorded, found = self._on_disk(active=True)
        server = mock.Mock(spec=control_socket.Server)
        with mock.patch.object(control_socket, 'find', return_value=server) as find:
            found.snapshot_create('s1', 'vda')
            found.snapshot_rename('s1', 's2')
            self.assertIsNone(found.snapshot_delete('s2', 'vm.pcow'))
        self.assertEqual([mock.call(str(self.image))] * 3, find.mock_calls)
        self.assertEqual(
            [
                mock.call.snapshot_create('s1'),
                mock.call.close(),
                mock.call.snapshot_rename('s1', 's2'),
                mock.call.close(),
                mock.call.snapshot_delete('s2'),
                mock.call.close(),
            ],
            server.mock_calls,
        )
        self.assertEqual([], recorded.calls)
        self.assertFalse(self.log.exists())

    def test_a_disk_of_a_running_guest_is_not_reverted(self) -> None:
        recorded, found = self._on_disk(active=True)
        for reset in (False, True):
            error = self.assertRaises(
                exception.DomainInvalid, found.snapshot_revert, 's1', reset=reset
            )
            self.assertIn('shut it down', str(error))
        self.assertEqual([], recorded.calls)
        self.assertFalse(self.log.exists())

    def test_a_disk_that_nobody_serves(self) -> None:
        _recorded, found = self._on_disk(active=True)
        error = self.assertRaises(exception.DomainInvalid, found.snapshot_create, 's1')
        self.assertIn(f'nobody serves {self.image}', str(error))

    def test_a_disk_that_is_off_is_a_file(self) -> None:
        _recorded, found = self._on_disk(active=False)
        found.snapshot_create('s1')
        found.snapshot_revert('s1')
        self.assertEqual(2, len(self.log.read_text().splitlines()))

    def test_what_state_its_guest_is_in(self) -> None:
        """One that was started paused, as after a revert, has not run, and could go on."""
        recorded, found = self._domain(active=True)
        for status, whole, has_run in (
            ('running', True, True),
            ('paused', True, True),
            ('prelaunch', True, False),
            ('restore-vm', False, False),
            ('guest-panicked', False, True),
            ('io-error', False, True),
        ):
            recorded.reply = {'return': {'status': status}}
            self.assertEqual((whole, has_run), (found.is_whole(), found.has_run()), status)

    def test_answers_that_make_no_sense(self) -> None:
        """A QEMU that its guest has taken over says what it likes."""
        recorded, found = self._domain(active=True)
        deep = '[' * 100000 + ']' * 100000
        for text in ('', '[]', 'null', '1', '"x"', '{"error": 1}', '{"error": [1]}', '{"x', deep):
            monitor = mock.Mock(return_value=text)
            with mock.patch.object(sys.modules['libvirt_qemu'], 'qemuMonitorCommand', new=monitor):
                self.assertRaises(exception.ToolOutputInvalid, found.qmp, 'query-status')
        wrong: tuple[Any, ...] = ([], None, 1, 'x', {}, {'status': 1}, [1], [None])
        for value in wrong:
            recorded.reply = {'return': value}
            for question in (found.is_whole, found.has_run):
                self.assertRaises(exception.ToolOutputInvalid, question)
            if value != []:
                self.assertRaises(exception.ToolOutputInvalid, found.query)
        wrong = ([], None, {'freed': 'x'}, {'freed': -1})
        for value in wrong:
            recorded.reply = {'return': value}
            self.assertRaises(exception.ToolOutputInvalid, found.snapshot_delete, 's1')

    def test_while_another_user_takes_a_checkpoint(self) -> None:
        """It waits, and not without end."""
        said = 'another checkpoint of the VM is being taken: wait until that has ended'
        refusal = json.dumps({'error': {'class': 'GenericError', 'desc': said}})
        _recorded, found = self._domain(active=True)
        monitor = mock.Mock(side_effect=['{"return": {}}', refusal, refusal, '{"return": {}}'])
        with (
            mock.patch.object(sys.modules['libvirt_qemu'], 'qemuMonitorCommand', new=monitor),
            mock.patch.object(libvirt_domain, '_RETRY', new=0.001),
        ):
            found.snapshot_create('s1')
            self.assertEqual(4, monitor.call_count)
            monitor.side_effect = itertools.repeat(refusal)
            with mock.patch.object(libvirt_domain, '_WAITS', new={'is being taken: wait': 0.01}):
                self.assertRaises(exception.QmpFailed, found.snapshot_create, 's1')

    def process_of(self, *words: str, **more: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ['sh', '-c', 'echo; read _x', *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **more,
        )
        self.addCleanup(process.communicate)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    def test_which_process_it_is(self) -> None:
        """No other user's that only says so."""
        recorded, found = self._domain(active=True)
        recorded.uuid = str(uuid.uuid4())
        words = ('-uuid', recorded.uuid, 'end')
        libvirt = self.directory / 'libvirt'
        libvirt.mkdir()
        self.useFixture(fixtures.MonkeyPatch('pcow_driver.virt.qemu_process._PIDS', str(libvirt)))
        if os.geteuid() == 0:
            foreign = self.process_of(*words, user=65534)
            self.assertRaises(exception.DomainInvalid, found.process)
            recorded.label = '+65534:+65534'  # libvirt runs it so
            self.assertTrue(found.process().startswith(f'{foreign.pid}-'))
            recorded.label = ''
        first, second = (self.process_of(*words) for _number in range(2))
        for process in (first, second):  # libvirt knows
            (libvirt / 'vm.pid').write_text(f'{process.pid}\n')
            self.assertTrue(found.process().startswith(f'{process.pid}-'))
        for text in ('', 'x', str(os.getpid()), '-1'):  # of one that has ended
            (libvirt / 'vm.pid').write_text(text)
            self.assertIn(found.process().partition('-')[0], (str(first.pid), str(second.pid)))

    def test_who_stops_it(self) -> None:
        recorded, found = self._domain(active=True)
        for state, starts, on_purpose in (
            ((1, 0), False, False),
            ((3, 1), False, True),
            ((3, 7), False, True),
            ((3, 5), False, False),
            ((3, 11), True, False),
        ):
            with mock.patch.object(recorded, 'state', return_value=state):
                self.assertEqual(
                    (starts, on_purpose), (found.is_starting(), found.paused_on_purpose())
                )
                for job in (0, 5):
                    with mock.patch.object(recorded, 'jobInfo', return_value=[job], create=True):
                        self.assertEqual(starts or job > 0, found.is_busy())

    def test_who_has_failed(self) -> None:
        recorded, found = self._domain(active=True)
        for state, failed in (((3, 1), False), ((3, 3), False), ((3, 5), True), ((6, 1), True)):
            with mock.patch.object(recorded, 'state', return_value=state):
                self.assertEqual(failed, found.has_failed())

    def test_select(self) -> None:
        _recorded, found = self._domain(
            '/pool/a.pcow', '/pool/disk.raw', '/pool/b.pcow', active=True
        )
        for device in ('nvdimm2', '/pool/b.pcow', 'b.pcow'):
            self.assertEqual('nvdimm2', found.select(device).alias)
        for wrong in (None, 'nvdimm1', 'c.pcow', ''):
            error = self.assertRaises(exception.DomainInvalid, found.select, wrong)
            self.assertIn('/pool/a.pcow', str(error))
        _recorded, found = self._domain('/pool/disk.raw', active=True)
        self.assertRaises(exception.DomainInvalid, found.select)

    def test_bad_names_go_nowhere(self) -> None:
        recorded, found = self._domain(active=True)
        for operation in (found.snapshot_create, found.snapshot_delete, found.snapshot_revert):
            self.assertRaises(exception.InvalidName, operation, '')
        self.assertEqual([], recorded.calls)
