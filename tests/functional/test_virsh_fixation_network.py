# SPDX-License-Identifier: Apache-2.0
"""A connection of a guest lives through a fixation and the recovery: TCP from another network
namespace, over a bridge.
"""

import atexit
import json
from pathlib import Path
import signal
import subprocess
import sys
import time
from typing import Any

from tests.functional import fixation_case
from tests.functional import libvirt_vm
from tools.lib.quickstart import state

GUEST, PEER = '203.0.113.2', '203.0.113.1'  # RFC 5737
AWAY_SECONDS = 3
MORE = 100  # lines after it
CLIENT = Path(__file__).parent / 'tcp_client.py'

_PREFIX = 'pcow'  # of the bridge of a run


def _namespace(bridge: str) -> str:
    return f'{bridge}-peer'


def _take_down(bridge: str) -> None:
    """As far as it is there."""
    for words in (('link', 'delete', bridge), ('netns', 'delete', _namespace(bridge))):
        subprocess.run(['ip', *words], capture_output=True, check=False)


class NetworkTest(fixation_case.FixationTestCase):
    bridge: str
    namespace: str

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.bridge = f'{_PREFIX}{cls.host.run.id}'
        cls.namespace = _namespace(cls.bridge)
        link = f'{cls.bridge[:12]}-v'
        # an interrupted run does not get to class cleanups, and a killed one to nothing
        for left in Path('/sys/class/net').glob(f'{_PREFIX}*/bridge'):
            if not (state.ROOT / left.parent.name.removeprefix(_PREFIX)).exists():
                _take_down(left.parent.name)
        cls.addClassCleanup(_take_down, cls.bridge)
        atexit.register(_take_down, cls.bridge)
        for words in (
            ('link', 'add', cls.bridge, 'type', 'bridge'),
            ('netns', 'add', cls.namespace),
            ('link', 'add', link, 'type', 'veth', 'peer', 'eth0', 'netns', cls.namespace),
            ('link', 'set', link, 'master', cls.bridge, 'up'),
            ('link', 'set', cls.bridge, 'up'),
            ('-n', cls.namespace, 'address', 'add', f'{PEER}/24', 'dev', 'eth0'),
            ('-n', cls.namespace, 'link', 'set', 'eth0', 'up'),
        ):
            libvirt_vm.run('ip', *words)

    def connect(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ['ip', 'netns', 'exec', self.namespace, sys.executable, CLIENT, GUEST, '7'],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        return process

    def told(self, process: subprocess.Popen[str], lines: int) -> dict[str, Any]:
        """What it says when so many lines have come back; it says something some times a second,
        and what it has said before now does not count.
        """
        assert process.stdout is not None
        begun = time.monotonic()
        while time.monotonic() < begun + fixation_case.SECONDS:
            line = process.stdout.readline()
            self.assertTrue(line, 'the client has ended')
            said: dict[str, Any] = json.loads(line)
            self.assertEqual('', said['problem'])
            if said['time'] > begun and said['lines'] >= lines:
                return said
        self.fail(f'not {lines} lines came back, but {said["lines"]}')

    def test_a_connection_goes_on(self) -> None:
        guest = self.protected(
            'net', '--interval', 'off', bridge=self.bridge, address=f'{GUEST}/24'
        )
        guest.mark('kept')
        client = self.connect()
        self.told(client, MORE)
        (done,) = self.pcowctl('host', 'fixate')
        self.assertEqual('', done['problem'])
        gone = time.monotonic()
        time.sleep(AWAY_SECONDS)
        (back,) = self.pcowctl('host', 'recover')
        self.assertEqual(done['checkpoint'], back['checkpoint'])
        away = time.monotonic() - gone
        self.assert_goes_on(guest, 'kept')
        last = self.told(client, self.told(client, 0)['lines'] + MORE)
        client.send_signal(signal.SIGTERM)
        self.assertEqual(0, client.wait(fixation_case.SECONDS))
        # it was cut off, and not for longer than the peer's next tries allow
        self.assertGreater(last['longest'], AWAY_SECONDS)
        self.assertLess(last['longest'], 3 * away)
