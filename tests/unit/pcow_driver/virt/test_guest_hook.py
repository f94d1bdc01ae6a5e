# SPDX-License-Identifier: Apache-2.0
"""The guest's own program, whatever its agent answers: the guest may have been taken over."""

import base64
import json
import time
from typing import Any

from pcow_driver.common import exception
from pcow_driver.virt import guest_hook
from tests.unit.pcow_driver import base

_CHANNEL = (
    "<domain><devices><channel type='unix'>"
    "<target type='virtio' name='org.qemu.guest_agent.0' state='{}'/></channel></devices></domain>"
)
_UNRESPONSIVE, _FAILED = 86, 89


class _Error(Exception):
    def __init__(self, code: int, text: str = 'no') -> None:
        super().__init__(text)
        self.code = code

    def get_error_code(self) -> int:
        return self.code


class _Bindings:
    """Both modules of libvirt, and the domain."""

    libvirtError = _Error  # noqa: N815
    VIR_ERR_AGENT_UNRESPONSIVE = _UNRESPONSIVE

    def __init__(self, answers: list[Any], before: list[Any] | None = None) -> None:
        """:param before: what it says of ping and clock, until it says yes"""
        self.answers, self.asked = answers, list[dict[str, Any]]()
        self.before = before or []
        self.timeouts: list[int] = []
        self.xml = _CHANNEL.format('disconnected')

    def XMLDesc(self, _flags: int) -> str:  # noqa: N802
        return self.xml

    def qemuAgentCommand(  # noqa: N802
        self, _domain: Any, request: str, seconds: int, _flags: int
    ) -> str:
        self.asked.append(json.loads(request))
        self.timeouts.append(seconds)
        if self.asked[-1]['execute'] in ('guest-ping', 'guest-set-time'):
            answer: Any = self.before.pop(0) if self.before else {}
        else:
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, str) else json.dumps({'return': answer})


class GuestHookTest(base.TestCase):
    def call(
        self, *answers: Any, seconds: float = 5.0, before: list[Any] | None = None
    ) -> _Bindings:
        found = _Bindings([*answers], before)
        self.bindings = found
        guest_hook.run(
            'web1',
            found,
            guest_hook.Bindings(found, found),
            guest_hook.Event.FORKED,
            'web2',
            seconds=seconds,
        )
        return found

    def fails(self, *answers: Any, seconds: float = 5.0) -> str:
        return str(
            self.assertRaises(exception.GuestHookFailed, self.call, *answers, seconds=seconds)
        )

    def test_it_ends_well(self) -> None:
        done = {'exited': True, 'exitcode': 0}
        before = [_Error(_UNRESPONSIVE), {}, _Error(_FAILED)]  # the clock is worth no failure
        found = self.call({'pid': 7}, {'exited': False}, done, before=before)
        self.assertEqual(
            [*['guest-ping'] * 2, *('guest-set-time', 'guest-exec'), *['guest-exec-status'] * 2],
            [request['execute'] for request in found.asked],
        )
        self.assertAlmostEqual(time.time(), found.asked[2]['arguments']['time'] / 1e9, delta=60)
        self.assertEqual(
            {'path': '/etc/qemu/pcow-hook', 'arg': ['forked', 'web2'], 'capture-output': True},
            found.asked[3]['arguments'],
        )
        self.assertEqual({'pid': 7}, found.asked[-1]['arguments'])
        self.assertTrue(all(0 < seconds <= 5 for seconds in found.timeouts))

    def test_it_fails(self) -> None:
        words = base64.b64encode(b'no\x1b[2J disk\nleft ' + b'x' * 9999).decode()
        said = self.fails({'pid': 7}, {'exited': True, 'exitcode': 3, 'err-data': words})
        self.assertIn('/etc/qemu/pcow-hook forked has failed: no', said)
        self.assertNotIn('\x1b', said)
        self.assertLess(len(said), 400)
        for status, text in (
            ({'exited': True, 'exitcode': 3}, 'exit code 3'),
            ({'exited': True, 'exitcode': 3, 'err-data': '???'}, 'exit code 3'),
            ({'exited': True, 'signal': 9}, 'by a signal'),
        ):
            self.assertIn(text, self.fails({'pid': 7}, status))

    def test_it_is_not_run(self) -> None:
        said = self.fails(_Error(_FAILED, 'Failed to execute child process: No such file'))
        self.assertIn('No such file', said)
        self.assertEqual(3, len(self.bindings.asked))
        self.fails(_Error(_UNRESPONSIVE, 'it has gone'))  # it may have run: not again
        self.assertEqual(3, len(self.bindings.asked))

    def test_nobody_answers(self) -> None:
        begun = time.monotonic()
        self.assertIn('not done in time', self.fails({'pid': 7}, {'exited': False}, seconds=0.3))
        away = [_Error(_UNRESPONSIVE, 'it is not connected')] * 999
        said = self.assertRaises(
            exception.GuestHookFailed, self.call, {'pid': 7}, seconds=0.3, before=away
        )
        self.assertIn('not done in time (it is not connected)', str(said))
        self.assertLess(time.monotonic() - begun, 5)

    def test_no_channel(self) -> None:
        found = _Bindings([])
        found.xml = '<domain><devices/></domain>'
        self.assertRaises(
            exception.GuestHookFailed,
            guest_hook.run,
            'web1',
            found,
            guest_hook.Bindings(found, found),
            guest_hook.Event.FIXATE,
            seconds=1.0,
        )
        self.assertEqual([], found.asked)

    def test_nonsense(self) -> None:
        for answers in (
            ('[' * 100000,),
            ('{"return": 5}',),
            ('{}',),
            ({'pid': 'many'},),
            ({'pid': True},),
            ({'pid': 7}, {'exited': 'yes'}),
            ({'pid': 7}, {'exited': True, 'exitcode': 'none'}),
        ):
            self.assertRaises(exception.ToolOutputInvalid, self.call, *answers)
