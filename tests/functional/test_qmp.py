# SPDX-License-Identifier: Apache-2.0
"""The tests' own QMP client, against a socket that answers as QEMU does."""

import contextlib
import json
import socket
import threading
import unittest

from tests.functional import qmp

EVENTS = 3


def _serve(connection: socket.socket) -> None:
    """An event before the greeting; behind each reply, in the same packet, another."""
    with connection, connection.makefile('rb') as commands:
        connection.sendall(b'{"event": "FIRST"}\n{"QMP": {}}\n')
        for line in commands:
            name = json.loads(line)['execute']
            connection.sendall(
                ''.join(
                    f'{json.dumps(line)}\n' for line in ({'return': {}}, {'event': f'AFTER_{name}'})
                ).encode()
            )


class ClientTest(unittest.TestCase):
    def test_an_event_behind_a_reply(self) -> None:
        ours, theirs = socket.socketpair()
        server = threading.Thread(target=_serve, args=(theirs,))
        server.start()
        self.addCleanup(server.join)
        with contextlib.closing(qmp.Qmp(ours)) as client:
            for number in range(EVENTS):
                client.run(f'command-{number}')
            client.run('last')
            self.assertEqual({}, client.take_event('FIRST'))
            for number in range(EVENTS):
                self.assertEqual({}, client.take_event(f'AFTER_command-{number}'), client.events)
