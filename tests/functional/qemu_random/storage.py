# SPDX-License-Identifier: Apache-2.0
"""Disks of every kind, of which some are slow, one has a bad sector, and one can hold no more."""

from __future__ import annotations

import abc
from collections.abc import Callable
import contextlib
import os
from typing import Protocol

from tests.functional import disks
from tests.functional import images
from tests.functional import model
from tests.functional import virtio
from tests.functional.qemu_random import world
from tests.functional.qtest_devices import pci
from tests.functional.qtest_devices import usb_storage

DISK_SIZE = images.MIB
BAD_SECTOR = 1000  # of the first disk
FULL = 1  # the disk that lies on a file system without space
FULL_SECTOR = 1024  # its first one that has no place there
BLOCK, SCSI, NVME, XHCI = 6, 7, 9, 13  # slots
AHCI = 31 << 3 | 2
NUMBERS = {'blk': 0, 'scsi': 1, 'nvme': 2, 'ahci': 3, 'usb': 4}  # of the disks
ALIGNMENT = {'ahci': -2, 'nvme': -4}  # of a buffer
SLOW = 'x-iops-total=2'  # of the machine's time, see world.Vm


class Disk(Protocol):
    def transfer(self, kind: int, sector: int, buffers: pci.Buffers, /) -> int:
        """:returns: 0 if it went well"""


def below(child: str, node: str) -> str:
    """Options of a block node as those of another one's child."""
    return ','.join(f'{child}.{option}' for option in node.split(','))


class StorageWork(world.World, abc.ABC):
    def setUp(self) -> None:
        super().setUp()
        self.under_way = False  # a request of a slow disk
        self.with_usb = self.built('qemu-xhci', 'usb-storage')
        self.disks = [model.Content(self.random.randbytes(DISK_SIZE)) for _ in NUMBERS]
        self.paths = [self.directory / f'disk{number}.raw' for number in NUMBERS.values()]
        self.disks[FULL].store(512 * FULL_SECTOR, bytes(DISK_SIZE - 512 * FULL_SECTOR))
        self.paths[FULL] = self.mount('full', 'tmpfs', 1) / 'disk.raw'
        for path, disk in zip(self.paths, self.disks, strict=True):
            path.write_bytes(disk.data)
        os.truncate(self.paths[FULL], 512 * FULL_SECTOR)
        os.truncate(self.paths[FULL], DISK_SIZE)
        with contextlib.suppress(OSError), (self.paths[FULL].parent / 'rest').open('wb', 0) as file:
            while True:
                file.write(bytes(4096))

    def device_arguments(self) -> list[str]:
        choose = self.random.choice
        self.with_nvme = choose((True, False))  # which cannot be saved
        self.slow = {number for number in NUMBERS.values() if self.random.random() < 0.3}
        io, thread = choose(('threads', 'io_uring', 'native')), choose(('', ',iothread=io0'))
        self.note(f'{io}{thread}, nvme {self.with_nvme}, slow {self.slow}')
        more = [*super().device_arguments(), '-object', 'iothread,id=io0']
        for number, path in enumerate(self.paths):
            cache = 'on' if io == 'native' else 'off'
            node = f'driver=file,filename={path},aio={io},cache.direct={cache}'
            if number == 0:
                bad = f'inject-error.0.event=none,inject-error.0.sector={BAD_SECTOR}'
                node = f'driver=blkdebug,{bad},' + below('image', node)
            if number in self.slow:
                more += ['-object', f'throttle-group,id=slow{number},{SLOW}']
                node = f'driver=throttle,throttle-group=slow{number},' + below('file', node)
            more += ['-blockdev', f'{node},node-name=d{number}']
        more += [
            '-device',
            f'virtio-blk-pci,drive=d0,addr={BLOCK}{thread}',
            '-device',
            f'virtio-scsi-pci,id=scsi,addr={SCSI}{thread}',
            '-device',
            f'scsi-hd,drive=d{FULL},bus=scsi.0,werror=report',
            '-device',
            'ide-hd,drive=d3,bus=ide.0',
        ]
        if self.with_usb:
            more += [
                '-device',
                f'qemu-xhci,id=xhci,addr={XHCI:#x}',
                '-device',
                'usb-storage,drive=d4,bus=xhci.0',
            ]
        if self.with_nvme:
            more += ['-device', f'nvme,drive=d2,serial=x,addr={NVME}']
        return more

    def set_up(self) -> None:
        super().set_up()
        self.block = virtio.Block(self.vm, BLOCK)
        self.scsi = virtio.Scsi(self.vm, SCSI)
        # It says that it was reset
        self.scsi.transfer(virtio.BLOCK_IN, 0, [(self.scsi.scratch + 0x1000, 512)])
        self.devices: dict[str, Disk] = {
            'blk': self.block,
            'scsi': self.scsi,
            'ahci': disks.Ahci(self.vm, AHCI, 0),
        }
        if self.with_usb:
            self.devices['usb'] = self.usb = usb_storage.UsbStorage(self.vm, XHCI << 3, 2)
        if self.with_nvme:
            self.devices['nvme'] = disks.Nvme(self.vm, NVME << 3, 1)

    def compare_all(self, about: str) -> None:
        super().compare_all(about)
        for number, (disk, path) in enumerate(zip(self.disks, self.paths, strict=True)):
            lost = disk.adopt(0, path.read_bytes())
            self.wrong(lost and f'disk {number} after {about}: {lost}')

    def do_transfer(self) -> None:
        kind = self.random.choice(list(self.devices))
        image = self.random.choice(self.images)
        offset, length = self.some(512, 32768)
        offset &= ALIGNMENT.get(kind, -1)
        number = NUMBERS[kind]
        sector = self.random.randrange(DISK_SIZE // 512 - length // 512)
        buffers = [(self.address(image, offset), length)]
        if kind != 'nvme' and length > 512:
            cut = self.random.randrange(512, length, 512)
            buffers = [(buffers[0][0], cut), (buffers[0][0] + cut, length - cut)]
        direction = self.random.choice((virtio.BLOCK_IN, virtio.BLOCK_OUT))
        if kind == 'usb' and direction == virtio.BLOCK_IN and self.would_wait([image]):
            return
        bad = number == 0 and sector <= BAD_SECTOR < sector + length // 512
        self.note(
            f'{kind} {direction} sector {sector} {world.Piece(image, offset, length)} bad {bad}'
        )
        self.done[f'{kind} {direction}'] += 1
        status = self.devices[kind].transfer(direction, sector, buffers)
        disk = self.disks[number]
        if direction == virtio.BLOCK_IN:
            if kind == 'usb':  # the others fail the request
                self.go_on()
            if status and not (self.full or bad):
                self.wrong(f'{self.log[-1]} failed with {status}')
            data = bytes(disk.data[512 * sector : 512 * sector + length])
            well = not status and not (self.full and kind == 'usb')
            self.stored(image, offset, data, well, self.log[-1])
            return
        data = bytes(image.content.data[offset : offset + length])
        if number == FULL and sector + length // 512 > FULL_SECTOR:
            self.done['stores to a full disk'] += 1
            if not status and any(data):
                self.wrong(f'{self.log[-1]} has found space')
            bad = True
        if status and not bad:  # also in a full pool: it loads
            self.wrong(f'{self.log[-1]} failed with {status}')
        if status:
            disk.doubt(512 * sector, data)
        else:
            disk.store(512 * sector, data)
        with self.paths[number].open('rb') as file:
            file.seek(512 * sector)
            lost = disk.adopt(512 * sector, file.read(length))
            self.wrong(lost and f'{self.log[-1]}: {lost}')

    def do_overlapping(self) -> None:
        """A snapshot beside a request has each byte as it was before that, or after."""
        image = self.random.choice(self.images)
        offset, length = self.some(512, 65536)
        sector = self.random.randrange(BAD_SECTOR - length // 512)
        kind = self.random.choice(('blk', 'blk', 'usb' if self.with_usb else 'blk'))
        if kind == 'usb' and self.would_wait([image]):
            return
        data = bytes(self.disks[NUMBERS[kind]].data[512 * sector : 512 * sector + length])
        about = f'{kind} under way, sector {sector} {world.Piece(image, offset, length)}'
        self.note(about)
        buffers = [(self.address(image, offset), length)]
        self.under_way = NUMBERS[kind] in self.slow
        if self.under_way:  # it has the next one wait
            self.devices[kind].transfer(virtio.BLOCK_IN, 0, [(self.block.scratch + 0x1000, 512)])
        if kind == 'usb':
            self.usb.begin(virtio.BLOCK_IN, sector, buffers)
        else:
            self.block.post_input(sector, buffers)
            self.block.notify()
        image.content.doubt(offset, data)
        if self.random.random() < 0.5:
            end = self.begin_create(image)
            status = self.end_request(kind)
            end()
        else:
            self.beside_a_request(image)
            status = self.end_request(kind)
        self.under_way = False
        if kind == 'usb':
            self.go_on()
        if status and not self.full:
            self.wrong(f'{about} failed with {status}')
        self.stored(image, offset, data, not status and not (self.full and kind == 'usb'), about)

    def end_request(self, kind: str) -> int:
        if kind == 'usb':
            return self.usb.end()
        self.done['held'] += not self.block.served()
        self.block.wait()
        return self.block.status()

    @abc.abstractmethod
    def beside_a_request(self, image: world.Image) -> None:
        """What may be done to an image while a device stores to it."""

    @abc.abstractmethod
    def begin_create(self, image: world.Image) -> Callable[[], None]:
        """Ask for a snapshot, which waits for the request.

        :returns: what looks at it when that has ended
        """
