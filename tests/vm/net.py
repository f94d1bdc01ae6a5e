# SPDX-License-Identifier: Apache-2.0
"""A guest whose RAM is an image, with a network device that vhost in the host's kernel serves: the
kernel loads from guest memory and stores to it by itself, also to what a snapshot has just frozen.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import dataclasses
import errno
import fcntl
import functools
import json
import os
from pathlib import Path
import select
import socket
import struct
import time
from typing import TYPE_CHECKING
from typing import Any
from typing import Self

from tests.vm import chain
from tests.vm import machine
from tests.vm import ram
from tests.vm import silence
from tests.vm import space

if TYPE_CHECKING:
    from tests.vm import scenarios

_TAP = 'pcow-net'
_GUEST, _HOST = bytes.fromhex('525400706377'), bytes.fromhex('525400706378')  # addresses
_TYPE = 0x88B5  # of Ethernet, for experiments
_HEADER = 14
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_REQUEST, _ANSWER = 0, 1
_SHORTEST, _LONGEST = 46, 1500
_WORDS = _LONGEST // 8  # after the number, which is a word as well
_NUMBER = 8  # bytes
_MASK = (1 << 64) - 1
_ONES = sum(1 << 64 * index for index in range(_WORDS))

_PACKETS = 300  # of a round
_WINDOW = 32  # packets on their way
_AGAIN_SECONDS = 2.0  # after which a packet is sent once more
_POLL_SECONDS = 0.25
_QUIET_SECONDS = 60.0  # without any answer
_SILENT_SECONDS = 2.0
_LOST = 0.1  # of the packets of a round
# more: those in a queue that is made anew, and their answers
_LOST_WITH_QUEUES = 2 * _WINDOW
# for a packet, at least; in an emulator it is a hundred times that
_VHOST_NS = 1000
_SNAPSHOTS = 3
_ENTRIES = (128, 256)  # of each queue; the latter is how it begins
_VHOST_GET_FEATURES, _RING_RESET = 0x8008AF00, 1 << 40
_BOOTING_SECONDS = 0.5
_POOL_SIZE = 1024 * chain.MIB
_POOL_LEFT = 8 * chain.MIB  # when RAM is frozen
# stores to as much RAM as the image is large what is there already
_FILL = 'level 5'
_CONTROL_SECONDS = 60.0
_FALLBACKS = ('falling back', 'vhost cannot be used')


def _mix(value: int) -> int:
    """The same as in guest/layout.c."""
    value ^= value >> 31
    value = value * 0x7FB5D329728EA185 & _MASK
    value ^= value >> 27
    value = value * 0x81DADEF4BC2DD44D & _MASK
    return value ^ value >> 33


_PATTERN = sum(_mix(index + 1) << 64 * index for index in range(_WORDS))


def _payload(number: int, kind: int) -> bytes:
    """The same as in guest/net.c."""
    key = _mix(number << 1 | kind)
    length = _SHORTEST + (key >> 2) % (_LONGEST - _SHORTEST + 1) if key & 3 else _LONGEST
    # with one operation for all words, as this runs in an emulator
    words = (_PATTERN ^ key * _ONES).to_bytes(_WORDS * 8, 'little')
    return (number.to_bytes(_NUMBER, 'little') + words)[:length]


def _vhost_time(pid: int) -> int | None:
    """Nanoseconds for which the thread of the kernel's vhost has run for a QEMU; None: there is
    none.

    Since Linux 6.4 it is one of QEMU's threads.
    """
    for directory in (*Path('/proc').glob('[0-9]*'), *Path(f'/proc/{pid}/task').iterdir()):
        with contextlib.suppress(OSError):  # others end at any time
            if (directory / 'comm').read_text().strip() == f'vhost-{pid}':
                return int((directory / 'schedstat').read_text().split()[0])
    return None


@dataclasses.dataclass
class _Round:
    """What became of the packets; *late*: sent once more although the answer was on its way."""

    packets: int
    lost: int = 0
    late: int = 0
    per_second: float = 0.0
    vhost_ns: int | None = None  # None: there is no such thread


class Traffic:
    """Sends packets to the guest and awaits its answers; context manager."""

    def __init__(self, vm: machine.Machine) -> None:
        self._vm = vm
        self._next = 1
        self.rounds: dict[str, _Round] = {}

    def __enter__(self) -> Self:
        # of no type, until it is bound
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        fcntl.ioctl(self._socket, _SIOCSIFFLAGS, struct.pack('16sH22x', _TAP.encode(), _IFF_UP))
        self._socket.bind((_TAP, _TYPE))
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.close()

    def _send(self, number: int) -> None:
        try:
            self._socket.send(
                _GUEST + _HOST + struct.pack('>H', _TYPE) + _payload(number, _REQUEST)
            )
        except OSError as e:
            # nobody takes them from the tap: it is sent again later
            if e.errno != errno.ENOBUFS:
                raise

    def _send_next(self) -> int:
        self._next += 1
        self._send(self._next - 1)
        return self._next - 1

    def send(self) -> None:
        """Have some packets on their way, whose answers nobody awaits."""
        for _number in range(_WINDOW):
            self._send_next()

    def fall_silent(self) -> None:
        """Send until the guest answers no more.

        :raises Failure: it goes on
        """
        limit = time.monotonic() + _QUIET_SECONDS
        while True:
            self.send()
            heard = self._answers(_SILENT_SECONDS)
            if not heard:
                return
            while heard:
                heard = self._answers(_POLL_SECONDS)
            if time.monotonic() > limit:
                raise self._vm.failure('packets are still answered')

    def _receive(self) -> int:
        """The number of an answer.

        :raises Failure: a byte of it is wrong
        """
        packet = self._socket.recv(_HEADER + _LONGEST + 100)
        header, payload = packet[:_HEADER], packet[_HEADER:]
        number = int.from_bytes(payload[:_NUMBER], 'little')
        wanted = _payload(number, _ANSWER) if number < self._next else b''
        if header[:12] != _HOST + _GUEST or payload != wanted:
            at = next(
                (
                    index
                    for index, (byte, other) in enumerate(zip(payload, wanted, strict=False))
                    if byte != other
                ),
                min(len(payload), len(wanted)),
            )
            raise self._vm.failure(
                f'answer {number:#x} of {len(payload)} bytes, not {len(wanted)}, is wrong from '
                f'byte {at} on: '
                f'{header.hex()} {payload[at : at + 32].hex()}, not {wanted[at : at + 32].hex()}'
            )
        return number

    def _answers(self, seconds: float) -> list[int]:
        found: list[int] = []
        while (
            len(found) < _WINDOW
            and select.select([self._socket], [], [], 0 if found else seconds)[0]
        ):
            found.append(self._receive())
        return found

    def _exchange(self, result: _Round, midway: Callable[[], object] | None) -> None:
        first, end = self._next, self._next + result.packets
        waiting: dict[int, float] = {}  # when each was sent last
        again = 0
        begun = heard = time.monotonic()
        while waiting or self._next < end:
            while self._next < end and len(waiting) < _WINDOW:
                waiting[self._send_next()] = time.monotonic()
            if midway is not None and end - self._next < result.packets // 2:
                midway()
                midway = None
                heard = time.monotonic()
            for number in self._answers(_POLL_SECONDS):
                heard = time.monotonic()
                if waiting.pop(number, None) is None and number >= first:
                    result.late += 1
            now = time.monotonic()
            if now - heard > _QUIET_SECONDS:
                raise self._vm.failure(
                    f'{len(waiting)} packets have no answer, from {min(waiting)} on',
                    silence.describe(self._vm.process.pid, self._vm.qmp, self._vm.kvm),
                )
            for number in [
                number for number, sent in waiting.items() if now - sent > _AGAIN_SECONDS
            ]:
                again += 1
                waiting[number] = now
                self._send(number)
        # between answers, on a busy machine
        pause = max(_AGAIN_SECONDS, 20 * (time.monotonic() - begun) / result.packets)
        while again > result.late:  # those that are not lost are on their way still
            found = self._answers(pause)
            if not found:
                break
            result.late += sum(number >= first for number in found)
        result.lost = max(0, again - result.late)

    def round(
        self,
        name: str,
        midway: Callable[[], object] | None = None,
        command: str = '',
        more_lost: int = 0,
    ) -> None:
        """Send packets and get all their answers.

        :param midway: called while packets are on their way
        :param command: that the guest has been given then, while packets go on
        :param more_lost: packets that it may lose for that
        :raises Failure: a byte is wrong, too many were lost, or no answer came
        """
        vm, result = self._vm, _Round(_PACKETS)
        vm.command('net-start')
        before, begun = _vhost_time(vm.process.pid), time.monotonic()
        self._exchange(result, midway)
        result.per_second = round(result.packets / (time.monotonic() - begun), 1)
        if command:
            vm.result(command)
        after = _vhost_time(vm.process.pid)
        if before is not None and after is not None:
            result.vhost_ns = after - before
        answered = int(vm.command('net-stop').split()[0])
        self.rounds[name] = result
        if answered < result.packets or result.lost > result.packets * _LOST + more_lost:
            # tried again: of a busy machine as well
            raise vm.failure(
                f'{name}: the guest has answered {answered} packets: {self.dump()}',
                kind=machine.Silence,
            )

    def dump(self) -> dict[str, dict[str, Any]]:
        return {name: dataclasses.asdict(result) for name, result in self.rounds.items()}

    def check_vhost(self) -> None:
        """The kernel has served the device, in each round.

        :raises Failure: QEMU did it, in one of them
        """
        said = self._vm.said()
        idle = [
            name
            for name, result in self.rounds.items()
            if (result.vhost_ns or 0) < result.packets * _VHOST_NS
        ]
        if idle or any(words in said for words in _FALLBACKS):
            raise machine.Failure(
                f'vhost in the kernel did nothing in {", ".join(idle) or "no round"}: '
                f'{json.dumps(self.dump())}\n--- QEMU:\n{said.strip()}'
            )


def device() -> tuple[str, ...]:
    """Arguments for QEMU."""
    return (
        '-netdev',
        f'tap,id=net0,ifname={_TAP},script=no,downscript=no,vhost=on',
        '-device',
        f'virtio-net-pci,netdev=net0,mac={_GUEST.hex(":")},disable-legacy=on,romfile=',
    )


def _snapshot(vm: machine.Machine, name: str, *backends: str) -> None:
    for backend in backends or ('ram0', 'mem0'):
        vm.run_qmp('pcow-snapshot-create', id=backend, name=name)


def _stop_and_go(vm: machine.Machine) -> None:
    vm.run_qmp('stop')
    _snapshot(vm, 'stopped')
    vm.run_qmp('cont')


def _resets_queues() -> bool:
    """Whether the kernel's vhost lets a guest make a single queue anew; Linux 6.1 does not, 6.12
    does.
    """
    descriptor = os.open('/dev/vhost-net', os.O_RDWR)
    try:
        features = fcntl.ioctl(descriptor, _VHOST_GET_FEATURES, bytes(8))
    finally:
        os.close(descriptor)
    return bool(int.from_bytes(features, 'little') & _RING_RESET)


def _resize(vm: machine.Machine, traffic: Traffic, entries: int) -> None:
    """Have the queues made anew while packets come, right after the rings were frozen."""
    command = f'net-resize {entries}'

    def begin() -> None:
        _snapshot(vm, f'resized-{entries}', 'ram0')
        vm.send(command)

    traffic.round(f'resized-{entries}', begin, command, _LOST_WITH_QUEUES)


def vhost(context: scenarios.Context) -> dict[str, Any]:
    """What the kernel loads from RAM and stores there for the network is right, to the byte.

    At first, after a reset with frozen RAM and a revert, after live snapshots while the guest
    stores as well, after its driver has made the queues anew, and after it was stopped.
    """
    if context.place.accel != 'kvm':
        raise machine.Failure('only the outer machine is sure to have vhost')
    image, (path, memory) = (
        context.image(context.directory),
        ram.prepare(context, context.directory),
    )
    with (
        context.test_guest(*context.backend(image), *memory, *device()) as vm,
        Traffic(vm) as traffic,
    ):
        vm.wait_ready()
        traffic.round('begin', functools.partial(_snapshot, vm, 'early', 'mem0'))
        # with packets on their way to RAM that is frozen; the boot after it is interrupted by the
        # revert, to save the time
        vm.command('net-start')
        _snapshot(vm, 'before-reset', 'ram0')
        traffic.send()
        vm.run_qmp('system_reset')
        time.sleep(_BOOTING_SECONDS)
        vm.run_qmp('stop')
        vm.run_qmp('pcow-snapshot-revert', id='mem0', name='early')
        vm.run_qmp('cont')
        vm.wait_ready()
        vm.command('read')
        traffic.round('reverted')
        vm.command('load-start')
        for number in range(1, _SNAPSHOTS + 1):
            # receive buffers that the kernel has not stored to yet, and the rings, are frozen then
            traffic.round(f'live-{number}', functools.partial(_snapshot, vm, f'live-{number}'))
        resizes = _resets_queues()
        for entries in _ENTRIES if resizes else ():
            _resize(vm, traffic, entries)
        traffic.round('load')
        vm.command('load-stop')
        traffic.round('stopped', functools.partial(_stop_and_go, vm))
        counters = ram.counters(vm)
        info = vm.power_off()
    for each in (image, path):
        context.check_image(each)
    traffic.check_vhost()
    return {
        'engine': info['engine'],
        'persistence': info['persistence'],
        'stats': info['stats'],
        'times': info['times'],
        'ram': counters,
        'resizes': resizes,
        'rounds': traffic.dump(),
    }


def _control(vm: machine.Machine) -> float:
    """Seconds in which a VM that waits for space is stopped and let go on."""
    begun = time.monotonic()
    for command, wanted in (('query-status', 'running'), ('stop', 'paused'), ('cont', 'running')):
        vm.run_qmp(command)
        status = vm.run_qmp('query-status')['status']
        if status != wanted:
            raise vm.failure(f'the VM that waits for space is {status} after {command}')
    seconds = time.monotonic() - begun
    if seconds > _CONTROL_SECONDS:
        raise vm.failure(f'QEMU has answered after {seconds:.1f} s')
    return round(seconds, 3)


def vhost_full(context: scenarios.Context) -> dict[str, Any]:
    """RAM on a pool that is full for a while after a snapshot: packets wait, QEMU does not, and no
    byte is wrong later.
    """
    if context.place.accel != 'kvm':
        raise machine.Failure('only the outer machine is sure to have vhost')
    pool = context.directory / 'full'
    pool.mkdir()
    space.mount(pool, f'size={_POOL_SIZE}')
    try:
        image, (path, memory) = context.image(context.directory), ram.prepare(context, pool)
        with (
            context.test_guest(*context.backend(image), *memory, *device()) as vm,
            Traffic(vm) as traffic,
        ):
            vm.wait_ready()
            traffic.round('begin')
            vm.command('net-start')
            found = os.statvfs(pool)
            used = (found.f_blocks - found.f_bfree) * found.f_frsize
            space.mount(pool, f'remount,size={used + _POOL_LEFT}')
            vm.run_qmp('pcow-snapshot-create', id='ram0', name='frozen')
            vm.send(_FILL)  # what is left, and what was prepared
            taken = space.take(pool)
            event = vm.wait_event('PCOW_POOL_FULL', machine.COMMAND_SECONDS)
            if event['id'] != 'ram0':
                raise vm.failure(f'PCOW_POOL_FULL came with {event}')
            traffic.fall_silent()
            seconds = _control(vm)
            traffic.fall_silent()
            space.mount(pool, f'remount,size={_POOL_SIZE}')
            taken.unlink()
            vm.wait_event('PCOW_POOL_RESUMED', machine.COMMAND_SECONDS)
            vm.result(_FILL)
            vm.command('net-stop')  # what waited had no wrong byte either
            vm.command('read')
            traffic.round('room')
            _snapshot(vm, 'last')
            traffic.round('again')
            vm.command(f'stores 1 2000 {ram.GRANULE}')
            vm.command('read')
            counters = ram.counters(vm)
            info = vm.power_off()
        for each in (image, path):
            context.check_image(each)
        traffic.check_vhost()
        return {
            'engine': info['engine'],
            'persistence': info['persistence'],
            'stats': info['stats'],
            'times': info['times'],
            'ram': counters,
            'rounds': traffic.dump(),
            'control_seconds': seconds,
        }
    finally:
        space.unmount(pool)
