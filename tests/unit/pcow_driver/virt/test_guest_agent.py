# SPDX-License-Identifier: Apache-2.0
"""Snapshots with --quiesce: however freeze, snapshot and signals end, the guest's file systems do
not stay frozen unsaid.
"""

import logging
import os
import signal
import sys
import time
from types import ModuleType
from typing import Any
from unittest import mock

import fixtures

from pcow_driver.common import exception
from pcow_driver.common import interrupt
from pcow_driver.virt import domain
from tests.unit.pcow_driver import base
from tests.unit.pcow_driver.virt import test_domain

CHANNEL = "<channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'{}/></channel>"
LOST = 'Guest agent not available for now'
ANSWERED = (
    "unable to execute QEMU agent command 'guest-fsfreeze-freeze': Command guest-fsfreeze-freeze "
    "has been disabled"
)


class LibvirtError(Exception):
    """libvirt.libvirtError"""


class _Guest(test_domain.RecordedDomain):
    """It runs and has an agent, of which a test says how freeze and thaw end."""

    def __init__(self, path: str) -> None:
        super().__init__([path], True)
        self.frozen = False
        self.after_freeze: BaseException | None = None  # it has frozen, and then this comes
        self.during_thaw: BaseException | int | None = None  # a number: that signal
        self.state_of_agent = " state='connected'"
        self.seconds = -2  # it is waited for without end

    def XMLDesc(self, flags: int) -> str:  # noqa: N802
        return (
            super()
            .XMLDesc(flags)
            .replace('</devices>', CHANNEL.format(self.state_of_agent) + '</devices>')
        )

    def agentSetResponseTimeout(self, seconds: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        self.seconds = seconds
        return 0

    def setTime(self, _time: dict[str, int], _flags: int) -> int:  # noqa: N802
        self.calls.append(('time', self.seconds))
        if self.after_freeze:
            raise self.after_freeze
        return 0

    def fsFreeze(self) -> int:  # noqa: N802
        assert self.seconds > 0
        self.calls.append('freeze')
        self.frozen = True
        if self.after_freeze:
            raise self.after_freeze
        return 1

    def fsThaw(self) -> int:  # noqa: N802
        assert self.seconds > 0
        self.calls.append('thaw')
        if isinstance(self.during_thaw, int):
            os.kill(os.getpid(), self.during_thaw)
            time.sleep(0.05)  # the main thread, which waits, takes it
        elif self.during_thaw:
            raise self.during_thaw
        self.frozen = False
        return 1


class FrozenTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        test_domain.record_libvirt(self)
        libvirt: ModuleType = sys.modules['libvirt']
        setattr(libvirt, 'libvirtError', LibvirtError)  # noqa: B010
        setattr(libvirt, 'VIR_DOMAIN_AGENT_RESPONSE_TIMEOUT_BLOCK', -2)  # noqa: B010
        self.useFixture(fixtures.MockPatchObject(interrupt, '_received', []))
        self.log = self.useFixture(fixtures.FakeLogger(level=logging.WARNING))
        self.guest = _Guest(str(self.directory / 'vm.pcow'))
        self.domain = domain.Domain(self.guest, 'vm')

    def create(self) -> None:
        self.domain.snapshot_create('s1', quiesce=True)

    def fails(self, error: type[BaseException]) -> str:
        try:
            self.create()
        except error as e:  # assertRaises lets KeyboardInterrupt end the tests
            return str(e)
        raise AssertionError('it did not fail')

    def commands(self) -> list[Any]:
        return [one if isinstance(one, str) else one['execute'] for one in self.guest.calls]

    def test_in_order(self) -> None:
        self.create()
        self.assertEqual(['freeze', 'pcow-snapshot-create', 'thaw'], self.commands())
        self.assertEqual(-2, self.guest.seconds)  # as others have it

    def test_the_clock(self) -> None:
        """Nobody waits for long for a guest that does not answer."""
        self.domain.arrive()
        self.assertEqual(('time', 5), self.guest.calls[-1])
        self.guest.after_freeze = LibvirtError(LOST)
        self.domain.arrive()
        self.assertIn('its clock cannot be set', self.log.output)
        self.assertEqual(-2, self.guest.seconds)

    def test_an_answer_in_time_that_cannot_be_asked_for(self) -> None:
        self.guest.seconds = 60
        error = LibvirtError('it is gone')
        with mock.patch.object(self.guest, 'agentSetResponseTimeout', side_effect=error):
            self.create()
        self.assertEqual(['freeze', 'pcow-snapshot-create', 'thaw'], self.commands())

    def test_signal_while_the_agent_freezes(self) -> None:
        """Python raises when the call has returned, and so the guest is frozen."""
        for error in (KeyboardInterrupt(), SystemExit(143)):
            self.guest.after_freeze = error
            self.fails(type(error))
            self.assertEqual((['freeze', 'thaw'], False), (self.commands(), self.guest.frozen))
            self.guest.calls.clear()

    def test_agent_that_freezes_after_the_time(self) -> None:
        self.guest.after_freeze = LibvirtError(LOST)
        message = self.fails(exception.DomainInvalid)
        self.assertFalse(self.guest.frozen)
        self.assertIn(LOST, message)
        self.assertIn('leave out --quiesce', message)
        self.assertNotIn('install', message)
        self.assertEqual('', self.log.output)

    def test_agent_that_stays_away(self) -> None:
        self.guest.after_freeze = self.guest.during_thaw = LibvirtError(LOST)
        self.assertIn('cannot be frozen', self.fails(exception.DomainInvalid))
        for words in ('may still be frozen', LOST, 'virsh domfsthaw vm'):
            self.assertIn(words, self.log.output)

    def test_agent_that_refuses(self) -> None:
        """It froze nothing then, and what is frozen is so for somebody else, as for a backup."""
        self.guest.after_freeze = LibvirtError(ANSWERED)
        self.assertIn(ANSWERED, self.fails(exception.DomainInvalid))
        self.assertEqual(['freeze'], self.commands())

    def test_no_agent(self) -> None:
        for state in (" state='disconnected'", None):
            if state is None:
                self.useFixture(fixtures.MockPatch(f'{__name__}.CHANNEL', ''))
            self.guest.state_of_agent = state or ''
            self.assertIn(
                'install qemu-guest-agent in the guest', self.fails(exception.DomainInvalid)
            )
        self.assertEqual([], self.commands())

    def test_libvirt_that_tells_no_state(self) -> None:
        self.guest.state_of_agent = ''
        self.create()
        self.assertEqual(['freeze', 'pcow-snapshot-create', 'thaw'], self.commands())

    def test_signals_while_it_thaws(self) -> None:
        """In the ordinary course, and after what was interrupted."""
        for error in (None, KeyboardInterrupt()):
            for number in (signal.SIGTERM, signal.SIGHUP):
                self.guest.after_freeze, self.guest.during_thaw = error, int(number)
                usual = signal.signal(number, interrupt._handle)
                self.addCleanup(signal.signal, number, usual)
                with mock.patch.object(interrupt, '_received', []):
                    if error:
                        self.fails(KeyboardInterrupt)
                    else:
                        self.create()
                self.assertFalse(self.guest.frozen)

    def test_snapshot_that_fails(self) -> None:
        self.guest.reply = {'error': {'class': 'GenericError', 'desc': 'the pool is full'}}
        self.assertIn('the pool is full', self.fails(exception.QmpFailed))
        self.assertEqual(
            (['freeze', 'pcow-snapshot-create', 'thaw'], False),
            (self.commands(), self.guest.frozen),
        )

    def test_snapshot_and_thaw_fail(self) -> None:
        """Both are said; whoever called knows that there is no snapshot."""
        self.guest.reply = {'error': {'class': 'GenericError', 'desc': 'the pool is full'}}
        self.guest.during_thaw = LibvirtError(LOST)
        self.assertIn('the pool is full', self.fails(exception.QmpFailed))
        for words in (LOST, 'virsh domfsthaw vm'):
            self.assertIn(words, self.log.output)

    def test_thaw_that_fails(self) -> None:
        self.guest.during_thaw = LibvirtError(LOST)
        message = self.fails(exception.StillFrozen)
        for words in ('the snapshot was made', LOST, 'virsh domfsthaw vm'):
            self.assertIn(words, message)
