# SPDX-License-Identifier: Apache-2.0
"""QEMU's control channel, against a socket that answers as QEMU does."""

import contextlib
import json
import socket
import threading

from pcow_driver.common import exception
from pcow_driver.virt import qmp
from tests.unit.pcow_driver import base


class QmpTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.before: list[object] = []  # what comes before each reply
        self.reply: dict[str, object] = {'return': []}
        ours, theirs = socket.socketpair()
        ours.settimeout(10)
        server = threading.Thread(target=self.serve, args=(theirs,))
        server.start()
        self.addCleanup(server.join)
        self.client = qmp.Qmp(ours)
        self.addCleanup(self.client.close)

    def serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection, connection.makefile('rb') as commands:
            connection.sendall(b'{"QMP": {}}\n')
            for line in commands:
                request = json.loads(line)
                own = {'return': {}} if request['execute'] == 'qmp_capabilities' else self.reply
                for answer in (*self.before, own | {'id': request['id']}):
                    connection.sendall(json.dumps(answer).encode() + b'\n')

    def test_answer_to_a_command_that_was_given_up(self) -> None:
        """QEMU gives it to whoever is connected when it is there."""
        self.before = [
            {'event': 'STOP'},
            {'return': {'pause': 1}, 'id': 'another-1'},
            {'error': {'class': 'GenericError', 'desc': 'exists'}, 'id': 'another-2'},
        ]
        for _ in range(2):
            self.assertEqual([], self.client.run('query-pcow'))

    def test_refused(self) -> None:
        self.reply = {'error': {'class': 'GenericError', 'desc': 'it is full'}}
        error = self.assertRaises(exception.QmpFailed, self.client.run, 'pcow-checkpoint-create')
        self.assertEqual('pcow-checkpoint-create: it is full', str(error))

    def test_not_understood(self) -> None:
        self.before = [{'error': {'class': 'GenericError', 'desc': 'JSON parse error'}}]
        error = self.assertRaises(exception.QmpFailed, self.client.run, 'query-pcow')
        self.assertEqual('query-pcow: JSON parse error', str(error))
