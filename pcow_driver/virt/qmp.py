# SPDX-License-Identifier: Apache-2.0
"""QEMU's control channel (QEMU's docs/interop/qmp-spec) of a QEMU without libvirt.

qemu.qmp, the project's own library, is made for asyncio, and what it has for other programs is
under the GPL version 2 alone.
"""

from __future__ import annotations

import itertools
import json
import secrets
import socket
from typing import Any

from pcow_driver.common import exception
from pcow_driver.images import model

_QEMU = 'QEMU'
_LONGEST = 16 << 20  # bytes of an answer


class Qmp:
    """One thread's at a time."""

    def __init__(self, connection: socket.socket) -> None:
        """:param connection: connected, with a timeout; it belongs to this from now on
        :raises QmpFailed: nobody answers there
        """
        self._socket = connection
        self._answers = connection.makefile('rb')
        # A command that somebody has given up is answered to whoever is connected then.
        self._ids = map(f'{secrets.token_hex(8)}-{{}}'.format, itertools.count())
        try:
            self._read('the greeting')
            self.run('qmp_capabilities')
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._answers.close()
        self._socket.close()

    def run(self, command: str, **arguments: Any) -> Any:
        """What the command returns.

        :raises QmpFailed: QEMU refuses it, or does not answer
        :raises ToolOutputInvalid: that is no answer
        """
        number = next(self._ids)
        request = json.dumps({'execute': command, 'arguments': arguments, 'id': number})
        try:
            self._socket.sendall(request.encode() + b'\n')
        except OSError as e:
            raise self._failed(command, str(e)) from None
        while (reply := self._read(command)).fields.get('id') != number:
            if 'error' in reply.fields and 'id' not in reply.fields:
                break  # it did not come as far as that
        if 'error' in reply.fields:
            error = reply.object('error')
            raise exception.QmpFailed(
                command=command, error_class=error.string('class'), description=error.string('desc')
            )
        return reply.fields.get('return')

    def _read(self, command: str) -> model.Reader:
        try:
            line = self._answers.readline(_LONGEST)
        except OSError as e:
            raise self._failed(command, str(e)) from None
        if not line.endswith(b'\n'):
            raise self._failed(command, 'QEMU has closed the connection')
        try:
            return model.Reader(json.loads(line), command, _QEMU)
        except (ValueError, RecursionError) as e:
            raise exception.ToolOutputInvalid(tool=_QEMU, reason=f'{command}: {e}') from None

    @staticmethod
    def _failed(command: str, why: str) -> exception.QmpFailed:
        return exception.QmpFailed(command=command, error_class='', description=why)
