# SPDX-License-Identifier: Apache-2.0
"""What guests take of the host's memory, with their roots on pcow and on qcow2.

Each has the same Debian with a web server that has answered some requests. What is counted is what
a process maps (``/proc/PID/smaps``): a page that several of them map is shared out among them
(Pss). The pages of a qcow2 file are in the host's page cache, which nobody maps: they are not
counted. Under TCG most of QEMU's own memory is translated code, so that is told apart.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from pathlib import Path
import statistics
import time
from typing import Any

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.images import info_block
from pcow_driver.virt import boot
from tools.lib.bench import machine
from tools.lib.bench import plot
from tools.lib.bench import scratch
from tools.lib.bench import smaps
from tools.lib.bench import table
from tools.lib.bench.guest import console
from tools.lib.bench.guest import disks
from tools.lib.bench.guest import web
from tools.lib.quickstart import guest as quickstart_guest
from tools.lib.quickstart import state

HELP = 'memory of 1, 2, 4 and 6 guests on pcow and on qcow2 (minutes; as root)'
SIDES = {
    'qcow2': 'qcow2 on virtio-blk',
    'pcow': 'pcow on an NVDIMM',
    'pcow-page-map': 'the same, its page map in the image',
    'pcow-swiotlb': 'pcow without swiotlb=noforce',
}
TARGET = 0.85  # RAM of a guest on pcow by that of one on qcow2
_MODULES = ('virtio_pci', 'virtio_balloon', 'virtio_blk')
_MEMORY = 256  # MiB
_BOOT_SECONDS = 600.0
_COMMAND_SECONDS = 300.0
_SETTLE_SECONDS = 5


@dataclasses.dataclass(frozen=True)
class Memory:
    """Of one guest, in bytes."""

    used: int  # by the guest itself, of its RAM
    ram: int  # that the host has given: huge pages of which the guest uses a part, too
    image: int  # of the NVDIMM; with what it shares
    emulator: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--counts', default='1,2,4,6', help='of guests (default: 1,2,4,6)')


def _counts(text: str) -> list[int]:
    with contextlib.suppress(ValueError):
        found = sorted({int(word) for word in text.split(',')})
        if found and found[0] > 0:
            return found
    raise exception.UsageInvalid(reason=f'--counts {text}: give numbers as 1,2,4')


def _base(side: str, guest: quickstart_guest.Guest, directory: Path) -> str:
    """What all guests of a side stand on."""
    if side == 'qcow2':
        return str(guest.image)
    page_map = info_block.PageMap.PMEM if side == 'pcow-page-map' else info_block.PageMap.RAM
    raw, base = directory / 'base.raw', directory / f'base-{page_map.value}.pcow'
    if not base.exists():
        disks.write_namespace(guest.image, 'qcow2', raw, page_map=page_map)
        image.convert(str(raw), 'raw', str(base))
        image.seal(str(base))
        raw.unlink()
    return str(base)


def _disk(side: str, base: str, own: Path) -> tuple[list[str], str]:
    """Arguments of QEMU, and words for the kernel."""
    if side == 'qcow2':
        path = str(own / 'top.qcow2')
        options = ('-q', '-f', 'qcow2', '-F', 'qcow2', '-b', base, path)
        tool.run(tool.find('qemu_img'), 'create', *options)
        return [
            *('-drive', f'if=none,id=root,file={path},format=qcow2'),
            *('-device', 'virtio-blk-pci,drive=root'),
        ], 'pcow.disk=/dev/vda'
    top = own.parent / f'{own.name}.pcow'
    image.create_overlay(str(top), base)
    words = '' if side == 'pcow-swiotlb' else boot.memory_options(_MEMORY * units.MIB)
    return [
        # the room for more that pcowctl domain-xml keeps
        *('-machine', 'nvdimm=on', '-m', f'{_MEMORY}M,slots=16,maxmem=70G'),
        *disks.nvdimm('root', top, image.info(base).virtual_size),
    ], words


def _start(
    run: state.Run, side: str, guest: quickstart_guest.Guest, base: str, own: Path
) -> console.Guest:
    own.mkdir()
    arguments, words = _disk(side, base, own)
    return console.Guest(
        [
            tool.find('emulator', build_first=True),
            *('-name', f'guest={run.domain_name}-{own.name}', '-nodefaults', '-no-user-config'),
            *('-display', 'none', '-machine', 'q35,memory-backend=ram', '-accel', 'tcg'),
            *('-cpu', 'max', '-m', f'{_MEMORY}M'),
            *('-object', f'memory-backend-ram,id=ram,size={_MEMORY}M'),
            *('-kernel', str(guest.kernel), '-initrd', str(guest.initrd)),
            *('-device', 'virtio-balloon-pci,free-page-reporting=on'),
            '-append',
            f'console=ttyS0 quiet panic=-1 rw pcow.init=shell pcow.modules={",".join(_MODULES)} '
            f'{words}',
            *arguments,
        ],
        own,
    )


def _look(guest: console.Guest, own: Path) -> Memory:
    total, free = (
        int(word)
        for word in guest.run(
            "sed -nE 's/^Mem(Total|Free): *([0-9]+) kB/\\2/p' /proc/meminfo", _COMMAND_SECONDS
        ).split()
    )
    return Memory(used=(total - free) * units.KIB, **_smaps(guest.pid, own))


def _smaps(pid: int, own: Path) -> dict[str, int]:
    def kind(word: str, size: int) -> str:
        if word.endswith('.pcow') and word.startswith(str(own.parent)):
            return 'image'
        return 'ram' if size == _MEMORY * units.MIB else 'emulator'

    return {'ram': 0, 'image': 0, 'emulator': 0} | smaps.pss(pid, kind)


def _measure_side(
    run: state.Run, side: str, guest: quickstart_guest.Guest, directory: Path, counts: list[int]
) -> list[dict[str, Any]]:
    rows, base = [], _base(side, guest, directory)
    with contextlib.ExitStack() as stack:
        running: list[tuple[console.Guest, Path]] = []
        for count in counts:
            while len(running) < count:
                own = directory / f'{side}-{len(running)}'
                one = stack.enter_context(_start(run, side, guest, base, own))
                one.wait_ready(_BOOT_SECONDS)
                web.start(one)
                running.append((one, own))
            time.sleep(_SETTLE_SECONDS)
            memory = [_look(one, own) for one, own in running]
            rows.append(
                {
                    'side': side,
                    'guests': count,
                    **{
                        field.name: statistics.mean(getattr(one, field.name) for one in memory)
                        for field in dataclasses.fields(Memory)
                    },
                }
            )
            print(f'{SIDES[side]}: {count} guests', flush=True)
    return rows


def run(options: argparse.Namespace) -> dict[str, Any]:
    counts = _counts(options.counts)
    with scratch.directory() as (own, directory):
        guest, _cache = quickstart_guest.prepare(own, None, None, None, web.PACKAGES, _MODULES)
        rows = [row for side in SIDES for row in _measure_side(own, side, guest, directory, counts)]
    return {'rows': rows, 'memory': _MEMORY * units.MIB, 'machine': machine.describe()}


def _mib(value: float) -> str:
    return f'{value / units.MIB:.1f}'


def tables(result: dict[str, Any]) -> list[table.Table]:
    qcow2 = {row['guests']: row for row in result['rows'] if row['side'] == 'qcow2'}
    rows: list[tuple[str, ...]] = [
        (
            SIDES[row['side']],
            str(row['guests']),
            *(_mib(row[field.name]) for field in dataclasses.fields(Memory)),
            *(table.ratio_text(row[name] / qcow2[row['guests']][name]) for name in ('used', 'ram')),
        )
        for row in result['rows']
    ]
    columns = (
        *('root', 'guests', 'used in the guest', 'RAM', 'image', 'QEMU (TCG)'),
        *('used, by qcow2', f'RAM, by qcow2 (target: {TARGET})'),
    )
    return [
        table.Table(
            f'MiB of the host a guest of {result["memory"] // units.MIB} MiB takes',
            columns,
            rows,
            'Used in the guest: MemTotal without MemFree. RAM, image and QEMU: what the process '
            'maps, what several map shared out among them; the page cache of qcow2 files comes on '
            'top. The host gives RAM in huge pages, and gets back those that are free as a whole.',
        )
    ]


def plots(result: dict[str, Any]) -> dict[str, plot.Bars]:
    counts = sorted({row['guests'] for row in result['rows']})
    values = {(row['side'], row['guests']): row['used'] / units.MIB for row in result['rows']}
    return {
        'density': plot.Bars(
            'Memory that a guest of 256 MiB uses',
            'MiB',
            tuple(f'{count} guests' for count in counts),
            {side: tuple(values[side, count] for count in counts) for side in SIDES},
        )
    }
