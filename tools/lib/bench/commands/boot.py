# SPDX-License-Identifier: Apache-2.0
"""How long a guest's start takes, with its kernel beside the image and through the boot shim.

The guest is the one of the functional tests: Debian with GRUB, until the first program of its root
runs. Each way takes its turn in each round. Without --kvm it is an emulated processor's time; on a
busy machine that of QEMU's processor says more than the clock.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
import select
import signal
import statistics
import subprocess
import time
from typing import Any

from pcow_driver.common import conf
from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.images import info_block
from pcow_driver.virt import boot
from tools.lib.bench import machine
from tools.lib.bench import parts
from tools.lib.bench import plot
from tools.lib.bench import scratch
from tools.lib.bench import table
from tools.lib.bench.guest import disks
from tools.lib.quickstart import cpio
from tools.lib.quickstart import debian_image
from tools.lib.quickstart import guest
from tools.lib.quickstart import state

HELP = "a guest's start with its kernel beside the image, and through the boot shim (as root)"
_MEMORY = 512  # MiB
_SECONDS = 300.0
_READY = b'pcow-ready'
_TAIL = 2000  # bytes of the console that an error shows
# what a root on an NVDIMM needs, in the order in which they are loaded
_MODULES = ('libnvdimm', 'nfit', 'nd_btt', 'nd_pmem')
_PAGE = 4096
# as the shim gives it to this guest
_CMDLINE = (
    f'root=UUID={debian_image.ROOT_UUID} ro console=ttyS0 quiet no_timer_check '
    'rootflags=dax=always rdinit=/pcow/init'
)


@dataclasses.dataclass(frozen=True)
class Way:
    name: str
    kernel: Path
    initrd: Path
    cmdline: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--rounds', type=int, default=5, help='boots of each way (default 5)')
    parser.add_argument('--cpus', type=int, default=1, help='of the guest (default 1)')
    parser.add_argument(
        '--parts', action='store_true', help='how long each part takes, of kernels that say it'
    )
    parser.add_argument('--kvm', action='store_true', help='not an emulated processor')
    parser.add_argument('--other', type=Path, metavar='DIR', help='a boot shim to compare with')
    parser.add_argument(
        '--other-cmdline',
        default=boot.SHIM_CMDLINE,
        metavar='WORDS',
        help="its command line (default: this one's)",
    )


def _take(namespace: Path, directory: Path) -> None:
    """The guest's kernel, its initrd and its modules."""
    place = directory / 'root'
    place.mkdir()
    release = debian_image.release(debian_image.kernels()[0])
    offset = info_block.data_offset(namespace.stat().st_size, info_block.PageMap.RAM)
    offset += debian_image.ROOT_OFFSET
    subprocess.run(['mount', '-o', f'ro,loop,offset={offset}', namespace, place], check=True)
    try:
        modules = place / 'lib/modules' / release
        files = {f'pcow/{number:02}.ko': name for number, name in enumerate(_MODULES)}
        first = {path: next(modules.rglob(f'{name}.ko')) for path, name in files.items()}
        first['pcow/init'] = tool.build_dirs()[0].parent.joinpath(
            'meson/qemu-backend/boot-shim/pcow-first-init'
        )
        front = cpio.archive(first)
        # the kernel wants what follows at a page
        front += bytes(-len(front) % _PAGE)
        initrd = (place / f'boot/initrd.img-{release}').read_bytes()
        (directory / 'initrd').write_bytes(front + initrd)
        (directory / 'kernel').write_bytes((place / f'boot/vmlinuz-{release}').read_bytes())
    finally:
        subprocess.run(['umount', place], check=True)


def _telling(cmdline: str, options: argparse.Namespace) -> str:
    """Of a shim: with --parts both its kernel and the guest's are to tell what they do."""
    return f'{cmdline} {parts.WORDS} -- {parts.WORDS}' if options.parts else cmdline


def _ways(directory: Path, options: argparse.Namespace) -> list[Way]:
    start = boot.shim()
    direct = f'{_CMDLINE} {parts.WORDS}' if options.parts else _CMDLINE
    ways = [Way('direct', directory / 'kernel', directory / 'initrd', direct)]
    if options.other:
        other: Path = options.other
        ways.append(
            Way(
                'other shim',
                other / 'kernel',
                other / 'initrd',
                _telling(options.other_cmdline, options),
            )
        )
    cmdline = _telling(start.cmdline, options)
    ways.append(Way('shim', Path(start.kernel), Path(str(start.initrd)), cmdline))
    return ways


def _wait(output: int, started: float, clock: parts.Clock) -> float:
    seen = b''
    while (left := started + _SECONDS - time.monotonic()) > 0:
        if not select.select([output], [], [], left)[0]:
            break
        data = os.read(output, 65536)
        seen += data
        clock.see(data)
        if _READY in seen:
            return time.monotonic() - started
        if not data:
            break
    raise exception.PcowError(
        reason=f'the guest does not start: {seen[-_TAIL:].decode(errors="replace")}'
    )


def _boot(
    way: Way, image: Path, options: argparse.Namespace
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of the clock and of the processor, and of the processor for each part."""
    command = [
        *(tool.find('emulator', build_first=True), '-nodefaults', '-no-user-config'),
        *('-machine', 'q35,nvdimm=on', '-display', 'none', '-no-reboot', '-serial', 'stdio'),
        *(('-accel', 'kvm', '-cpu', 'host') if options.kvm else ('-accel', 'tcg', '-cpu', 'max')),
        *('-smp', str(options.cpus), '-m', f'{_MEMORY}M,slots=2,maxmem=8G'),
        *('-kernel', str(way.kernel), '-initrd', str(way.initrd), '-append', way.cmdline),
        *('-object', f'memory-backend-file,id=image,mem-path={image},share=on'),
        *('-device', 'nvdimm,memdev=image,id=dimm,pcow-volatile=on'),
    ]
    output, inner = os.pipe()
    started = time.monotonic()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=inner, stderr=inner)
    os.close(inner)
    watched = parts.of(direct=way.name == 'direct') if options.parts else ()
    progress = parts.Clock(process.pid, watched)
    try:
        clock = _wait(output, started, progress)
    finally:
        os.kill(process.pid, signal.SIGKILL)  # nobody has waited for it: kill() would
        _pid, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        os.close(output)
    return {'clock': clock, 'processor': usage.ru_utime + usage.ru_stime}, progress.took


def _measure(
    run_state: state.Run, directory: Path, options: argparse.Namespace
) -> list[dict[str, Any]]:
    print('making the guest', flush=True)
    namespace, image = directory / 'namespace', directory / 'image.pcow'
    disks.write_namespace(debian_image.prepare(guest.Cache(run_state)), 'qcow2', namespace)
    _take(namespace, directory)
    tool.run(
        *(tool.find('pcow_img', build_first=True), 'convert', '-f', 'raw', '-O', 'pcow'),
        *(str(namespace), str(image)),
    )
    namespace.unlink()
    ways = _ways(directory, options)
    turns: dict[str, list[dict[str, float]]] = {way.name: [] for way in ways}
    took: dict[str, list[dict[str, float]]] = {way.name: [] for way in ways}
    for number in range(options.rounds):
        for way in ways:
            turn, progress = _boot(way, image, options)
            turns[way.name].append(turn)
            took[way.name].append(progress)
            print(
                f'round {number + 1} of {options.rounds}: {way.name}, '
                f'{turn["clock"]:.2f} s, {turn["processor"]:.2f} s of the processor',
                flush=True,
            )
    return [
        {
            'name': name,
            **{what: statistics.median(turn[what] for turn in found) for what in found[0]},
            'turns': found,
            'parts': {
                part: statistics.median(turn[part] for turn in took[name]) for part in took[name][0]
            },
        }
        for name, found in turns.items()
    ]


def run(options: argparse.Namespace) -> dict[str, Any]:
    if options.rounds < 1:
        raise exception.UsageInvalid(reason=f'--rounds {options.rounds}: give at least 1')
    conf.CONF([], project='pcow', default_config_files=[])
    with scratch.directory() as (run_state, directory):
        return {
            'rows': _measure(run_state, directory, options),
            'machine': machine.describe(),
            'load': os.getloadavg()[0],
            'accelerator': 'KVM' if options.kvm else 'TCG',
            'cpus': options.cpus,
            'rounds': options.rounds,
        }


def _parts_table(row: dict[str, Any]) -> table.Table:
    return table.Table(
        f'The parts of it: {row["name"]}',
        ('part', 'processor'),
        [(part, f'{seconds:.2f} s') for part, seconds in row['parts'].items()],
        'The median of each. The kernels say on the console what they do, which takes time itself.',
    )


def tables(result: dict[str, Any]) -> list[table.Table]:
    direct = result['rows'][0]
    rows: list[tuple[str, ...]] = []
    for row in result['rows']:
        cells = [row['name']]
        for what in ('processor', 'clock'):
            times = [turn[what] for turn in row['turns']]
            cells += [
                f'{row[what]:.2f} s ({min(times):.2f} to {max(times):.2f})',
                '-' if row is direct else f'{row[what] - direct[what]:.2f} s',
                table.ratio_text(row[what] / direct[what]),
            ]
        rows.append(tuple(cells))
    made = [
        table.Table(
            f'From the start of QEMU to the first program of the root ({result["accelerator"]})',
            ('way', 'processor', 'more', 'ratio', 'clock', 'more', 'ratio'),
            rows,
            f'{result["rounds"]} boots of each way by turns, of {result["cpus"]} processors and '
            f'{_MEMORY} MiB: the median, in brackets the least and the most. What is "more" than '
            f'direct is of the medians. Load of the machine at the end: {result["load"]:.1f}.',
        )
    ]
    return made + [_parts_table(row) for row in result['rows'] if row.get('parts')]


def plots(_result: dict[str, Any]) -> dict[str, plot.Bars]:
    return {}
