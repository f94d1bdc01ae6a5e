# SPDX-License-Identifier: Apache-2.0
"""The warm start: a guest's Redis after a fixation, and after a boot that loads its log. What
counts is when it answers as fast as before.
"""

from __future__ import annotations

from pathlib import Path
import re
import statistics
import time
from typing import Any

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.images import image
from tools.lib.bench.guest import console
from tools.lib.bench.guest import disks
from tools.lib.bench.persist import place
from tools.lib.quickstart import guest as quickstart_guest

PACKAGES = ('redis-server', 'redis-tools')
KEYS, VALUE = 1_000_000, 2000  # bytes: 2 GiB with what Redis has of its own
FULL = 0.9  # of the rate before
_MEMORY, _DATA = 4096, 6144  # MiB of RAM, and of the file system that has the log
_SETS = 3 * KEYS  # at random: 95 % of the keys are there then
_BATCH = 2000  # requests
_BATCHES = 9
_COMMAND_SECONDS = 1800.0
_NAME = 'last'
_SOCKET = '/run/redis.sock'
_RATE = re.compile(r'"GET [^"]*","([\d.]+)"')
_START = (
    'export PATH=/usr/sbin:/usr/bin:/sbin:/bin; sysctl -qw vm.overcommit_memory=1; '
    'mkdir -p /srv; mount -o dax=always /dev/pmem1 /srv; '
    f'redis-server --port 0 --unixsocket {_SOCKET} --dir /srv --save "" --appendonly yes '
    '--appendfsync no --auto-aof-rewrite-percentage 0 --daemonize yes >/dev/null; '
    f'until redis-cli -s {_SOCKET} ping | grep -q PONG; do sleep 0.05; done'
)
_FILL = (
    f'redis-cli -s {_SOCKET} config set appendonly no; '
    f'redis-benchmark -s {_SOCKET} -q -n {_SETS} -r {KEYS} -d {VALUE} -c 4 -P 32 -t set; '
    f'redis-cli -s {_SOCKET} config set appendonly yes; '
    f'while redis-cli -s {_SOCKET} info persistence | grep -Eq '
    '"aof_rewrite_(in_progress|scheduled):1"; do sleep 1; done; sync; '
    f'redis-cli -s {_SOCKET} info memory | sed -n "s/^used_memory://p"'
)


class _Server:
    """The guest's images, and its QEMU when it runs."""

    def __init__(self, where: place.Place, guest: quickstart_guest.Guest) -> None:
        self._guest, self._directory = guest, where.run.directory / 'redis'
        self._directory.mkdir()
        self.ram = where.image('redis-ram', _MEMORY * units.MIB)
        self._root, self._root_size = self._disk(where, 'redis-root', guest.image, 'qcow2')
        empty = self._directory / 'empty.raw'
        tool.run('/sbin/mkfs.ext4', '-q', '-b', '4096', '-m', '0', str(empty), f'{_DATA}M')
        self._data, self._data_size = self._disk(where, 'redis-data', empty, 'raw')
        empty.unlink()

    @staticmethod
    def _disk(where: place.Place, name: str, source: Path, source_format: str) -> tuple[Path, int]:
        raw, path = where.workplace.scratch / f'{name}.raw', where.workplace.image_path(name)
        size = disks.write_namespace(source, source_format, raw)
        image.convert(str(raw), 'raw', str(path))
        raw.unlink()
        return path, size

    def start(self, *more: str) -> console.Guest:
        """One that has been entered."""
        return console.Guest(
            [
                tool.find('emulator', build_first=True),
                *('-name', 'guest=bench-redis', '-nodefaults', '-no-user-config'),
                *('-display', 'none', '-accel', 'tcg', '-cpu', 'max'),
                *('-machine', 'q35,nvdimm=on,hpet=off,memory-backend=ram'),
                *('-m', f'{_MEMORY}M,slots=2,maxmem=70G'),
                '-object',
                f'memory-backend-file,id=ram,mem-path={self.ram},share=on,size={_MEMORY}M',
                *disks.nvdimm('root', self._root, self._root_size),
                *disks.nvdimm('data', self._data, self._data_size),
                *('-kernel', str(self._guest.kernel), '-initrd', str(self._guest.initrd)),
                *('-append', f'{place.CMDLINE} rw pcow.init=shell'),
                *more,
            ],
            self._directory,
        ).__enter__()

    def boot(self) -> console.Guest:
        """Redis has loaded what its log has."""
        vm = self.start()
        vm.wait_ready(place.BOOT_SECONDS)
        vm.run(_START, _COMMAND_SECONDS)
        return vm

    def remove(self) -> None:
        for path in (self.ram, self._root, self._data):
            path.unlink()


def rate(said: str) -> float:
    """Requests a second, as redis-benchmark says."""
    match = _RATE.search(said)
    if match is None:
        raise exception.PcowError(reason=f'redis-benchmark has not measured: {said}')
    return float(match[1])


def _batch(vm: console.Guest) -> float:
    return rate(
        vm.run(
            f'redis-benchmark -s {_SOCKET} --csv -n {_BATCH} -r {KEYS} -c 4 GET key:__rand_int__',
            _COMMAND_SECONDS,
        )
    )


def _until_full(vm: console.Guest, before: float, begun: float) -> float:
    """Seconds since then, at the end of the first batch that is as fast as before."""
    while time.monotonic() < begun + _COMMAND_SECONDS:
        if _batch(vm) >= FULL * before:
            return time.monotonic() - begun
    raise exception.PcowError(reason='Redis does not get as fast as it was')


def measure(where: place.Place, rounds: int) -> dict[str, Any]:
    """Both from the start of QEMU; pools in DRAM, as what a host has kept."""
    guest, _cache = quickstart_guest.prepare(where.run, None, None, None, PACKAGES, ())
    server = _Server(where, guest)
    found: dict[str, list[float]] = {'recovered': [], 'booted': []}
    vm = server.boot()
    try:
        used = int(vm.run(_FILL, _COMMAND_SECONDS).split()[-1])
        before = statistics.median(_batch(vm) for _number in range(_BATCHES))
        for number in range(rounds):
            vm.qmp('stop', {})
            vm.qmp('pcow-checkpoint-create', {'name': _NAME})
            vm.__exit__(None, None, None)
            begun = time.monotonic()
            vm = server.start('-S')
            vm.qmp('pcow-checkpoint-revert', {'name': _NAME})
            vm.qmp('cont', {})
            found['recovered'].append(_until_full(vm, before, begun))
            vm.qmp('pcow-checkpoint-delete', {'name': _NAME})
            print(f'Redis, recovery {number + 1}: {found["recovered"][-1]:.2f} s', flush=True)
        for number in range(rounds):
            vm.__exit__(None, None, None)
            begun = time.monotonic()
            vm = server.boot()
            found['booted'].append(_until_full(vm, before, begun))
            print(f'Redis, boot {number + 1}: {found["booted"][-1]:.2f} s', flush=True)
    finally:
        vm.__exit__(None, None, None)
        server.remove()
    return {'memory': _MEMORY, 'used': used, 'rate': before, 'sides': found}
