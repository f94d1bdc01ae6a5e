# SPDX-License-Identifier: Apache-2.0
"""A guest whose RAM is an image, with a socket device that vhost in the host's kernel serves."""

from __future__ import annotations

from collections.abc import Callable
import functools
import random
import select
import socket
import time
from typing import TYPE_CHECKING
from typing import Any
from typing import Self

from tests.vm import chain
from tests.vm import machine
from tests.vm import ram
from tests.vm import silence

if TYPE_CHECKING:
    from tests.vm import scenarios

_CID, _PORT = 77, 1234
_CHUNK = 65536
# bytes whose answer is not here yet, at most: more than fits into the queues
_AHEAD = 512 * 1024
_ROUND = 4 * chain.MIB  # there, and back
_SNAPSHOTS = 4
_QUIET_SECONDS = 60.0  # without any byte
_POLL_SECONDS = 0.25
_CONNECT_SECONDS = 60.0
_PLUS_ONE = bytes((value + 1) % 256 for value in range(256))


class Stream:
    """A connection to the guest, which sends back what it gets, each byte with one added; context
    manager.
    """

    def __init__(self, vm: machine.Machine) -> None:
        self._vm = vm
        self._seed = 0
        self.rates: dict[str, float] = {}  # MiB in a second, in each direction

    def __enter__(self) -> Self:
        self._vm.command(f'vsock-start {_PORT}')
        limit = time.monotonic() + _CONNECT_SECONDS
        while True:
            self._socket = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
            try:
                self._socket.connect((_CID, _PORT))
            except TimeoutError:  # Linux waits for 2 s only
                self._socket.close()
                if time.monotonic() > limit:
                    raise self._failure('the guest takes no connection') from None
            else:
                break
        self._socket.setblocking(False)
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.close()

    def _failure(self, what: str) -> machine.Failure:
        return self._vm.failure(
            what, silence.describe(self._vm.process.pid, self._vm.qmp, self._vm.kvm)
        )

    def _receive(self, wanted: bytes, at: int) -> int:
        """How many bytes came, which are those of ``wanted`` from ``at`` on.

        :raises Failure: one of them is wrong
        """
        data = self._socket.recv(_CHUNK)
        if not data:
            raise self._failure(f'the guest has hung up after {at} bytes')
        if data != wanted[at : at + len(data)]:
            wrong = next(
                index
                for index, byte in enumerate(data)
                if wanted[at + index : at + index + 1] != bytes([byte])
            )
            begin = at + wrong
            raise self._vm.failure(
                f'round {self._seed}: byte {begin} is wrong: {data[wrong : wrong + 32].hex()}, not '
                f'{wanted[begin : begin + 32].hex()}'
            )
        return len(data)

    def round(self, name: str, midway: Callable[[], object] | None = None) -> None:
        """Send bytes and get all their answers.

        :param midway: called when a half was sent, and not yet answered
        :raises Failure: a byte is wrong, or no more came
        """
        self._seed += 1
        data = random.Random(self._seed).randbytes(_ROUND)
        wanted = data.translate(_PLUS_ONE)
        sent = received = 0
        heard = begun = time.monotonic()
        while received < _ROUND:
            if midway is not None and sent > _ROUND // 2:
                midway()
                midway = None
                heard = time.monotonic()
            may_send = sent < _ROUND and sent - received < _AHEAD
            readable, writable, _other = select.select(
                [self._socket], [self._socket] if may_send else [], [], _POLL_SECONDS
            )
            if writable:
                sent += self._socket.send(data[sent : sent + _CHUNK])
            if readable:
                received += self._receive(wanted, received)
                heard = time.monotonic()
            if time.monotonic() - heard > _QUIET_SECONDS:
                raise self._failure(f'{name}: {sent} bytes were sent, {received} came back')
        self.rates[name] = round(_ROUND / chain.MIB / (time.monotonic() - begun), 2)

    def check(self) -> None:
        """:raises Failure: the guest has not sent as many bytes as came"""
        echoed, wanted = int(self._vm.command('vsock-stop')), self._seed * _ROUND
        if echoed != wanted:
            raise self._vm.failure(f'the guest has sent {echoed} bytes, not {wanted}')


def device() -> tuple[str, ...]:
    """Arguments for QEMU."""
    return '-device', f'vhost-vsock-pci,guest-cid={_CID}'


def _snapshot(vm: machine.Machine, name: str) -> None:
    for backend in ('ram0', 'mem0'):
        vm.run_qmp('pcow-snapshot-create', id=backend, name=name)


def _stop_and_go(vm: machine.Machine) -> None:
    vm.run_qmp('stop')
    _snapshot(vm, 'stopped')
    vm.run_qmp('cont')


def vhost_vsock(context: scenarios.Context) -> dict[str, Any]:
    """What the kernel loads from RAM and stores there for a socket is right, to the byte, as in
    scenario vhost.
    """
    if context.place.accel != 'kvm':
        raise machine.Failure('only the outer machine is sure to have vhost')
    image, (path, memory) = (
        context.image(context.directory),
        ram.prepare(context, context.directory),
    )
    with context.test_guest(*context.backend(image), *memory, *device()) as vm:
        vm.wait_ready()
        with Stream(vm) as stream:
            stream.round('begin')
            vm.command('load-start')
            for number in range(1, _SNAPSHOTS + 1):
                stream.round(f'live-{number}', functools.partial(_snapshot, vm, f'live-{number}'))
            stream.round('load')
            vm.command('load-stop')
            stream.round('stopped', functools.partial(_stop_and_go, vm))
            stream.check()
        counters = ram.counters(vm)
        info = vm.power_off()
    for each in (image, path):
        context.check_image(each)
    return {
        'engine': info['engine'],
        'persistence': info['persistence'],
        'stats': info['stats'],
        'times': info['times'],
        'ram': counters,
        'rates': stream.rates,
    }
