# SPDX-License-Identifier: Apache-2.0
"""The devices of the guest: one file system with the same files, as the base of a pcow image, as a
raw file, and as the backing file of qcow2 images."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
import uuid

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.images import info_block
from pcow_driver.templates import template

_MEASURE = Path(__file__).parent / 'measure'
_RESERVE = 48 * units.MIB  # ext4's own structures and its journal
_CHUNK = units.MIB
_COW_FILES = ('cow', 'cow-mapped', 'cow-threads')
_SNAPSHOT_FILES = ('snapshot', 'snapshot-threads')
_SNAPSHOT = 'filled'


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much is measured."""

    rounds: int
    operations: int  # of 4 KiB in each job; requests of each Redis test
    steady: int  # bytes of the file for steady state
    # bytes of each file for copy-on-write; there are five for each round
    cow: int

    @property
    def own_files(self) -> list[str]:
        """The guest writes all of them before the snapshot."""
        return [
            'steady',
            *(f'{name}-{number}' for number in range(self.rounds) for name in _SNAPSHOT_FILES),
        ]

    @property
    def size(self) -> int:
        """Bytes of the file system."""
        room = self.operations * units.PAGE_SIZE * 2 + 64 * units.MIB
        files = self.rounds * (len(_COW_FILES) + len(_SNAPSHOT_FILES))
        return units.round_up(self.steady + files * self.cow + room + _RESERVE, units.SLAB_SIZE)


FULL = Scale(rounds=3, operations=2048, steady=64 * units.MIB, cow=64 * units.MIB)
QUICK = Scale(rounds=1, operations=64, steady=16 * units.MIB, cow=16 * units.MIB)


@dataclasses.dataclass(frozen=True)
class Device:
    name: str
    title: str
    arguments: tuple[str, ...]  # of QEMU
    node: str  # in the guest
    mount_options: str
    file: str  # what it stores to


def _write_file(path: Path, size: int) -> None:
    with path.open('xb') as file:
        for _offset in range(0, size, _CHUNK):
            file.write(os.urandom(min(size, _CHUNK)))


def make_file_system(directory: Path, scale: Scale) -> Path:
    """An ext4 file system with the files to be measured and the script that measures, as a raw
    file.
    """
    tree, path = directory / 'tree', directory / 'fs.raw'
    tree.mkdir()
    _write_file(tree / 'steady', scale.steady)
    for number in range(scale.rounds):
        for name in (*_COW_FILES, *_SNAPSHOT_FILES):
            _write_file(tree / f'{name}-{number}', scale.cow)
    script = tree / 'measure'
    script.write_bytes(_MEASURE.read_bytes())
    script.chmod(0o755)
    tool.run(
        '/sbin/mkfs.ext4',
        '-q',
        '-b',
        '4096',
        '-m',
        '0',
        '-d',
        str(tree),
        '-E',
        'lazy_itable_init=0,lazy_journal_init=0,nodiscard,root_owner=0:0',
        str(path),
        f'{scale.size // units.MIB}M',
    )
    for entry in tree.iterdir():
        entry.unlink()
    tree.rmdir()
    return path


def write_namespace(
    source: Path,
    source_format: str,
    target: Path,
    extra: int = 0,
    page_map: info_block.PageMap = info_block.PageMap.RAM,
) -> int:
    """What the guest sees of an NVDIMM with this file system, as a raw file; return its size.

    :param extra: bytes that it shall be larger than it must
    """
    info = template.inspect_source(str(source), source_format)
    size = info_block.namespace_size(info.virtual_size, page_map) + extra
    template.write_namespace(str(target), info, size, page_map)
    return size


def nvdimm(name: str, path: Path, size: int, *, share: bool = True) -> tuple[str, ...]:
    return (
        '-object',
        f'memory-backend-file,id={name},mem-path={path},'
        f'size={size},share={"on" if share else "off"}',
        # the pool may be page cache; what is measured is thrown away
        '-device',
        f'nvdimm,memdev={name},id=dimm-{name},uuid={uuid.uuid4()},pcow-volatile=on',
    )


def make_devices(directory: Path, scale: Scale) -> list[Device]:
    """All devices that are compared, in the order of the guest's names for them. pmem0
    is its root.
    """
    source = make_file_system(directory, scale)
    raw, base, top = directory / 'disk.raw', directory / 'base.pcow', directory / 'top.pcow'
    size = write_namespace(source, 'raw', raw)
    image.convert(str(raw), 'raw', str(base))
    image.seal(str(base))
    image.create_overlay(str(top), str(base))
    qemu_img = tool.find('qemu_img')
    backing = directory / 'base.qcow2'
    tool.run(qemu_img, 'convert', '-f', 'raw', '-O', 'qcow2', str(source), str(backing))
    source.unlink()
    for name, options in (
        ('default', 'cluster_size=64k'),
        ('tuned', 'cluster_size=128k,extended_l2=on'),
    ):
        tool.run(
            qemu_img,
            'create',
            '-q',
            '-f',
            'qcow2',
            '-o',
            options,
            '-b',
            str(backing),
            '-F',
            'qcow2',
            str(directory / f'{name}.qcow2'),
        )
    return [
        Device(
            'pcow',
            'pcow on an NVDIMM',
            nvdimm('pcow', top, size),
            '/dev/pmem1',
            'dax=always',
            top.name,
        ),
        Device('raw', 'raw NVDIMM', nvdimm('raw', raw, size), '/dev/pmem2', 'dax=always', raw.name),
        Device(
            'qcow2',
            'qcow2, defaults',
            (
                '-drive',
                f'if=none,id=default,file={directory}/default.qcow2,format=qcow2',
                '-device',
                'virtio-blk-pci,drive=default',
            ),
            '/dev/vda',
            'noatime',
            'default.qcow2',
        ),
        Device(
            'qcow2-tuned',
            'qcow2, subclusters and I/O thread',
            (
                '-object',
                'iothread,id=io',
                '-drive',
                f'if=none,id=tuned,file={directory}/tuned.qcow2,format=qcow2,aio=io_uring,l2-cache-size=16M',
                '-device',
                'virtio-blk-pci,drive=tuned,iothread=io',
            ),
            '/dev/vdb',
            'noatime',
            'tuned.qcow2',
        ),
    ]


def take_snapshots(directory: Path, devices: list[Device]) -> None:
    """One inside each image, while no guest uses it.  A raw file has none."""
    for device in devices:
        path = directory / device.file
        if path.suffix == '.pcow':
            image.snapshot_create(str(path), _SNAPSHOT)
        elif path.suffix == '.qcow2':
            tool.run(tool.find('qemu_img'), 'snapshot', '-c', _SNAPSHOT, str(path))


def prove(directory: Path, devices: list[Device]) -> None:
    """Every device took the stores that were made to it: the guest's names meant what was assumed.

    :raises PcowError: one did not
    """
    for device in devices:
        marker = marker_of(device).encode()
        if not any(marker in chunk for chunk in _chunks(directory / device.file)):
            raise exception.PcowError(
                reason=f'the guest did not write to {device.name} what it was to: its devices are '
                f'mixed up'
            )


def marker_of(device: Device) -> str:
    """What the guest writes to the beginning of a file of a device."""
    return f'this is the pcow benchmark on {device.name}.'


def _chunks(path: Path) -> list[bytes]:
    """The beginning of every page."""
    with path.open('rb') as file:
        return [
            os.pread(file.fileno(), 64, offset)
            for offset in range(0, path.stat().st_size, units.PAGE_SIZE)
        ]
