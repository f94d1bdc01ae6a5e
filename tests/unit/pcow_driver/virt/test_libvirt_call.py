# SPDX-License-Identifier: Apache-2.0
"""A QEMU, or a libvirt, that does not answer: who asks is told on time, and what was begun ends
well when it answers again.
"""

from collections.abc import Callable
import json
import os
import threading
import time
from typing import Any
from unittest import mock

import fixtures

from pcow_driver.common import exception
from pcow_driver.virt import domain
from pcow_driver.virt import guest_agent
from pcow_driver.virt import libvirt_call
from pcow_driver.virt import libvirt_host
from tests.unit.pcow_driver import base
from tests.unit.pcow_driver.virt import test_domain

LIMIT = 1  # seconds


class Standing:
    """What is asked of it waits until :meth:`go_on`."""

    def __init__(self, test: base.TestCase) -> None:
        self._goes_on = threading.Event()
        test.addCleanup(self.go_on)

    def wait(self) -> None:
        self._goes_on.wait()

    def go_on(self) -> None:
        self._goes_on.set()


class LibvirtCallCase(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.configure(libvirt_timeout=LIMIT)
        self.standing = Standing(self)

    def no_answer(self, asked: Callable[[], Any], *words: str) -> exception.NoAnswer:
        begun = time.monotonic()
        error = self.assertRaises(exception.NoAnswer, asked)
        self.assertLess(time.monotonic() - begun, LIMIT + 20)
        for one in words:
            self.assertIn(one, str(error))
        return error

    def until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + 10
        while not holds():
            self.assertLess(time.monotonic(), end, 'it does not come')
            time.sleep(0.01)


class LibvirtCallTest(LibvirtCallCase):
    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return libvirt_call.call('vm', 'a-command', function, *arguments, seconds=LIMIT)

    def test_answer(self) -> None:
        self.assertEqual(7, self.ask(lambda a, b: a + b, 3, 4))
        error = self.assertRaises(LookupError, self.ask, {}.__getitem__, 'x')
        self.assertEqual(('x',), error.args)

    def test_no_answer(self) -> None:
        error = self.no_answer(
            lambda: self.ask(self.standing.wait),
            'the domain vm does not answer: a-command has not ended after 1 s',
            "'virsh destroy vm'",
        )
        self.assertEqual('vm', error.details['domain'])

    def test_libvirt_that_does_not(self) -> None:
        with mock.patch.object(libvirt_host, 'binding') as bindings:
            bindings.return_value.libvirtError = OSError
            bindings.return_value.open = lambda _uri: self.standing.wait()
            opened = libvirt_host.connect('test:///x')
            self.no_answer(opened.__enter__, 'libvirt does not answer: open')

    def test_no_descriptor_stays(self) -> None:
        before = os.listdir('/proc/self/fd')
        self.ask(int)
        self.no_answer(lambda: self.ask(self.standing.wait))
        self.standing.go_on()
        self.until(lambda: len(os.listdir('/proc/self/fd')) == len(before))

    def test_afterwards(self) -> None:
        """Once each, whether it has ended meanwhile or not."""
        undone: list[object] = []

        def late() -> str:
            self.standing.wait()
            return 'done'

        error = self.no_answer(lambda: self.ask(late))
        libvirt_call.afterwards(error, undone.append)
        self.assertEqual([], undone)
        self.standing.go_on()
        self.until(lambda: undone == ['done'])
        libvirt_call.afterwards(error, lambda _answer: 1 // 0)
        libvirt_call.afterwards(error, undone.append)
        self.until(lambda: undone == ['done', 'done'])

    def test_all_of_its_ram(self) -> None:
        """What is written or read so takes as long as it takes."""

        class Fake:
            def snapshotCreateXML(self, words: str) -> str:  # noqa: N802
                time.sleep(LIMIT + 0.5)
                return words

        found = libvirt_call.Proxy(Fake(), 'vm')
        with mock.patch.object(libvirt_call, '_LONG', 1):
            self.assertEqual('x', found.snapshotCreateXML('x'))

    def test_await_undone(self) -> None:
        """A program that ends does not before that."""
        said: list[str] = []
        undone: list[object] = []
        libvirt_call.await_undone(said.append)
        self.assertEqual([], said)
        error = self.no_answer(lambda: self.ask(self.standing.wait))
        libvirt_call.afterwards(error, undone.append)
        threading.Timer(0.5, self.standing.go_on).start()
        libvirt_call.await_undone(said.append)
        self.assertEqual([None], undone)
        self.assertEqual(1, len(said))
        self.assertIn('Ctrl-C', said[0])

    def test_signal(self) -> None:
        """What was begun ends before its caller undoes it; a second signal does not wait."""
        ended: list[str] = []
        wait = libvirt_call._Call.wait

        def slow() -> None:
            time.sleep(0.3)
            ended.append('slow')

        left: list[type[KeyboardInterrupt]] = []

        def first(call: libvirt_call._Call, end: float) -> bool:
            if left:
                raise left.pop()
            return wait(call, end)

        for signals, expected in ((1, ['slow']), (2, [])):
            left.extend([KeyboardInterrupt] * signals)
            ended.clear()
            with mock.patch.object(libvirt_call._Call, 'wait', first):
                self.assertRaises(KeyboardInterrupt, self.ask, slow)
            self.assertEqual(expected, ended)

    def test_proxy(self) -> None:
        """Everything that is got from it is asked by a thread of its own, too."""
        asked: list[bool] = []

        class Fake:
            number = 3

            def name(self) -> str:
                return 'vm'

            def state(self) -> tuple[int, int]:
                asked.append(threading.current_thread() is threading.main_thread())
                return 1, 0

            def others(self, *given: object) -> list[object]:
                self.state()
                return [Fake(), *map(type, given)]

        found = libvirt_call.Proxy(Fake(), 'vm')
        self.assertEqual((3, 'vm', (1, 0)), (found.number, found.name(), found.state()))
        other, kind = found.others(found)
        self.assertEqual((1, 0), other.state())
        self.assertIs(Fake, libvirt_call.bare(kind))
        self.assertEqual([False] * 3, asked)


class DomainTest(LibvirtCallCase):
    def setUp(self) -> None:
        super().setUp()
        test_domain.record_libvirt(self)
        image = self.directory / 'vm.pcow'
        image.write_text('')
        self.recorded = test_domain.RecordedDomain([str(image)], True)
        self.recorded.monitor = self.monitor
        self.found = domain.Domain(self.recorded, 'vm')
        self.stands_at, self.limited = 'query-status', False

    def monitor(self, command: str) -> str:
        request = json.loads(command)
        name = request['execute']
        if name == self.stands_at:
            self.standing.wait()
        self.recorded.calls.append(name)
        limited = 'max-wait' in request.get('arguments', {})
        self.assertEqual(name == 'pcow-snapshot-create' and self.limited, limited, command)
        return json.dumps(self.recorded.reply)

    def test_nothing_is_begun(self) -> None:
        """A QEMU that stands already: not as long as a slow storage would be waited for."""
        for asked in (
            lambda: self.found.snapshot_create('s1'),
            lambda: self.found.snapshot_delete('s1'),
            lambda: self.found.qmp('pcow-checkpoint-create', name='c1'),
        ):
            self.no_answer(asked, 'query-status has not ended after 1 s')
        self.standing.go_on()
        self.until(lambda: self.recorded.calls == ['query-status'] * 3)

    def given_up(self, **reply: Any) -> None:
        self.useFixture(fixtures.MonkeyPatch('pcow_driver.virt.libvirt_call._LONG', 1))
        self.stands_at, self.recorded.reply = 'pcow-snapshot-create', {'return': {}}
        self.limited = True
        self.found.check_answers()
        self.recorded.reply, self.recorded.calls = reply, []
        with mock.patch.object(domain.Domain, 'check_answers'):
            self.no_answer(
                lambda: self.found.snapshot_create('s1', max_wait=7), 'pcow-snapshot-create'
            )
        self.assertEqual([], self.recorded.calls)
        self.standing.go_on()

    def test_snapshot_that_nobody_knows(self) -> None:
        """QEMU makes it when it goes on, and it is deleted."""
        self.given_up(**{'return': {}})
        made = ['pcow-snapshot-create', 'pcow-snapshot-delete']
        self.until(lambda: self.recorded.calls == made)

    def test_snapshot_that_was_there(self) -> None:
        """QEMU refuses one of that name, and it stays."""
        self.given_up(error={'class': 'GenericError', 'desc': 'there is one'})
        self.until(lambda: self.recorded.calls == ['pcow-snapshot-create'])
        time.sleep(0.2)
        self.assertEqual(['pcow-snapshot-create'], self.recorded.calls)

    def test_paused(self) -> None:
        def work() -> None:
            with self.found.paused():
                self.found.snapshot_create('s1')

        self.no_answer(work)
        self.assertEqual(['suspend'], self.recorded.calls)
        self.standing.go_on()
        self.until(lambda: self.recorded.calls == ['suspend', 'query-status', 'resume'])

    def test_paused_for_another_one(self) -> None:
        """Of a group: who answers goes on at once."""
        other = test_domain.RecordedDomain(self.recorded.paths, True)

        def work() -> None:
            with domain.Domain(other, 'other').paused():
                self.found.snapshot_create('s1')

        self.no_answer(work, 'the domain vm')
        self.assertEqual(['suspend', 'resume'], other.calls)

    def test_paused_with_another_one_that_fails(self) -> None:
        """It goes on when it answers, though the other one was not let run."""
        other = test_domain.RecordedDomain(self.recorded.paths, True)

        def refuse() -> None:
            raise LookupError('it does not run on')

        def work() -> None:
            with self.found.paused(), domain.Domain(other, 'other').paused():
                self.found.snapshot_create('s1')

        with mock.patch.object(other, 'resume', refuse):
            self.assertRaises(LookupError, work)
        self.assertEqual(['suspend'], self.recorded.calls)
        self.standing.go_on()
        self.until(lambda: self.recorded.calls == ['suspend', 'query-status', 'resume'])

    def test_started(self) -> None:
        def create(_flags: int) -> int:
            self.standing.wait()
            self.recorded.calls.append('create')
            return 0

        def work() -> None:
            with self.found.started():
                self.fail('it has not')

        self.useFixture(fixtures.MonkeyPatch('pcow_driver.virt.libvirt_call._LONG', 1))
        with (
            mock.patch.object(self.recorded, 'createWithFlags', create, create=True),
            mock.patch.object(
                self.recorded, 'destroy', lambda: self.recorded.calls.append('destroy'), create=True
            ),
            mock.patch.object(libvirt_host, 'binding'),
        ):
            self.no_answer(work, 'createWithFlags')
            self.standing.go_on()
            self.until(lambda: self.recorded.calls == ['create', 'destroy'])

    def guest_with_agent(self) -> mock.Mock:
        """What libvirt has of it."""
        self.useFixture(
            fixtures.MonkeyPatch('pcow_driver.virt.libvirt_xml.has_agent', lambda _xml: True)
        )
        return mock.Mock(XMLDesc=lambda _flags: '<domain/>')

    def test_frozen_with_another_one_that_fails(self) -> None:
        """It is thawed when it answers, whatever became of the other one."""
        bindings, guest = mock.Mock(libvirtError=OSError), self.guest_with_agent()

        def work() -> None:
            with guest_agent.frozen('vm', libvirt_call.Proxy(guest, 'vm'), bindings):
                try:
                    self.found.snapshot_create('s1')
                finally:
                    raise LookupError('another one does not run on')

        self.assertRaises(LookupError, work)
        guest.fsThaw.assert_not_called()
        self.standing.go_on()
        self.until(lambda: guest.fsThaw.called)

    def test_frozen(self) -> None:
        """The guest's file systems do not stay so."""
        bindings, guest = mock.Mock(libvirtError=OSError), self.guest_with_agent()

        def work() -> None:
            with guest_agent.frozen('vm', libvirt_call.Proxy(guest, 'vm'), bindings):
                self.found.snapshot_create('s1')

        self.no_answer(work)
        guest.fsFreeze.assert_called_once_with()
        guest.fsThaw.assert_not_called()
        self.standing.go_on()
        self.until(lambda: guest.fsThaw.called)
