# SPDX-License-Identifier: Apache-2.0
"""Pools of other hosts, by SSH: as root of this service's host, with the keys and names that its
configuration of SSH has.

Nova's migrations of servers that are off need the same. On the other host ``pcowctl`` does the
work.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import socket
import subprocess

from oslo_log import log as logging

from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.copies import transfer
from pcow_driver.images import info_block
from pcow_driver.pools import device

LOG = logging.getLogger(__name__)

_OPTIONS = ('-o', 'BatchMode=yes', '-o', 'ConnectTimeout=10', '-o', 'ServerAliveInterval=15')
_ADDRESS = re.compile(r'[0-9A-Za-z:._-]{1,255}')


@dataclasses.dataclass(frozen=True)
class RemotePool:
    """A pool of another host.

    :param address: under which that host is reached by SSH
    """

    address: str
    pool: str
    uuid: str

    def __post_init__(self) -> None:
        if not _ADDRESS.fullmatch(self.address) or self.address.startswith('-'):
            raise exception.ConfigInvalid(
                reason=f'{self.address!r} is no address of a host (pcow_migration_address)'
            )
        names.check_name('pool', self.pool)

    def has(self, name: str) -> bool:
        """Whether the pool has an image of this name. One that is on its way does not count, and
        neither does what is only kept there for its clones: pcowctl lists neither.

        :raises TransferFailed:
        """
        return self._lists('image', name)

    def _lists(self, kind: str, name: str) -> bool:
        return {'name': name} in json.loads(
            self._run(name, kind, 'list', self.pool, '-f', 'json', '-c', 'name')
        )

    def send(self, path: str, name: str, data_size: int) -> None:
        """Copy an image of this host, with the template on which it stands if that is not there.

        :param data_size: of the volume; it comes as it is
        :raises TransferFailed: nothing is left there then
        :raises PcowError: the image cannot be read
        """
        base = transfer.template_below(path)
        if base is None and device.window(path).offset != info_block.OFFSET:
            raise exception.DeviceInvalid(
                path=path,
                reason=(
                    'its data begin behind a page map (--page-map pmem), which one file cannot '
                    'say: '
                    'migrate the volume to another pool of its host first'
                ),
            )
        if base is not None and not self._lists('template', base):
            self._send(os.path.join(os.path.dirname(path), base + names.IMAGE_SUFFIX), base)
        self._send(path, name)

    def discard(self, name: str) -> bool:
        """Delete an image that was sent; what is on its way does not arrive. Done also if there is
        none.

        :return: False if clones keep some of it, of an earlier stay there
        :raises TransferFailed:
        """
        return (
            self._run(name, 'image', 'receive', '--discard', f'{self.pool}/{name}').strip()
            != transfer.KEPT
        )

    def _send(self, path: str, name: str) -> None:
        LOG.info('%s goes to the pool %s of %s', path, self.pool, self.address)
        # Not a pipe: eventlet tries again for ever to write to one whose reader has ended (EPIPE),
        # and not to a socket.
        own, receivers = socket.socketpair()
        with own:
            with receivers:
                # as programs expect it, which eventlet changes
                os.set_blocking(receivers.fileno(), True)
                receiver = self._start(
                    'image', 'receive', f'{self.pool}/{name}', stdin=receivers.fileno()
                )
            with receiver:
                try:
                    with own.makefile('wb') as stream:
                        transfer.send(path, stream)
                    own.shutdown(socket.SHUT_WR)
                except ConnectionError:
                    LOG.debug('the receiver has ended; it says why')
                except BaseException:
                    receiver.kill()  # it ends without the end of the stream
                    raise
                self._finish(receiver, name)

    def _run(self, name: str, *words: str) -> str:
        with self._start(*words) as process:
            return self._finish(process, name)

    def _start(self, *words: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        """pcowctl on the other host."""
        return subprocess.Popen(
            ('ssh', *_OPTIONS, self.address, shlex.join(('pcowctl', *words))),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def _finish(self, process: subprocess.Popen[bytes], name: str) -> str:
        stdout, stderr = process.communicate()
        if process.returncode:
            lines = stderr.decode(errors='replace').strip().splitlines() or ['it said nothing']
            raise exception.TransferFailed(
                name=name, reason=f'the host {self.address} says: {lines[-1]}'
            )
        return stdout.decode(errors='replace')
