# SPDX-License-Identifier: Apache-2.0
"""The images of a machine, what they must hold, and how that is compared."""

from __future__ import annotations

import base64
import collections
from collections.abc import Sequence
import dataclasses
import itertools
import os
from pathlib import Path
import random
import subprocess
import time
from typing import Self

from tests.functional import images
from tests.functional import model
from tests.functional import qemu
from tests.functional import test_qemu_backend as backend
from tests.functional import vm_state

SIZE = 8 * images.MIB  # of an image, or of what is compared of RAM
BEGIN = 24 * images.MIB  # of that in RAM: the queues of devices are below
POOL_MIB = {'tmpfs': 256, 'ext4': 256, 'xfs': 320}  # the last makes none that is smaller
SNAPSHOTS = 3  # of one image at the same time
# what makes a file system of a kind, and how it is mounted
MAKE = {
    'tmpfs': (),
    'ext4': ('mkfs.ext4', '-q', '-m', '0', '-E', 'lazy_itable_init=0'),
    'xfs': ('mkfs.xfs', '-q', '-f'),
}
OPTIONS = {'tmpfs': ('size={mib}m',), 'ext4': (), 'xfs': ()}
TICK_NS = 10_000_000  # that pass for the machine between two looks


# of an NVDIMM: the class page-cache is no persistent memory, and this guest does not need any
VOLATILE = 'pcow-volatile'


class Vm(vm_state.Vm):
    """One without a CPU, whose time passes while the test waits: that of slow disks."""

    def __enter__(self) -> Self:
        super().__enter__()
        # What a guest tells of itself when it has moved would come into other frames' buffers
        self.qmp('migrate-set-parameters', announce_rounds=0)
        return self

    def pause(self) -> None:
        super().pause()
        self.ask(f'clock_step {TICK_NS}')


class Image:
    """An NVDIMM, or the machine's RAM."""

    def __init__(self, number: int, is_ram: bool, policy: str, on_base: bool, data: bytes) -> None:
        self.number, self.is_ram, self.policy, self.on_base = number, is_ram, policy, on_base
        self.path = Path()
        self.content = model.Content(data)
        self.id, self.device = f'mem{number}', f'nv{number}'
        self.begin = BEGIN if is_ram else 0
        self.snapshots: dict[str, model.Content] = {}

    def arguments(self, engine: str) -> tuple[str, ...]:
        memory = (
            f'memory-backend-file,id={self.id},mem-path={self.path},share=on,'
            f'pcow-full={self.policy},pcow-engine={engine}'
        )
        if self.is_ram:
            memory += f',size={self.begin + SIZE}'
            return '-object', memory, '-machine', f'memory-backend={self.id}'
        return (
            '-object',
            memory,
            '-device',
            f'nvdimm,{VOLATILE}=on,memdev={self.id},id={self.device}',
        )


@dataclasses.dataclass(frozen=True)
class Piece:
    """Of a buffer that lies in several places."""

    image: Image
    offset: int
    length: int

    def __repr__(self) -> str:
        return f'{self.image.id} {self.offset:#x} {self.length:#x}'

    def meets(self, other: Piece) -> bool:
        return (
            self.image is other.image
            and self.offset < other.offset + other.length
            and other.offset < self.offset + self.length
        )


class World(backend.QemuTestCase):
    """Devices add to ``device_arguments``, ``set_up`` and ``compare_all``."""

    vm: Vm
    kind = 'tmpfs'  # file system of the pool

    def setUp(self) -> None:
        super().setUp()
        self.seed = int(os.environ.get('PCOW_TEST_SEED', random.SystemRandom().randrange(1 << 32)))
        self.random = random.Random(self.seed)
        self.log: list[str] = []
        self.done: collections.Counter[str] = collections.Counter()
        self.pool = self.mount('pool', self.kind, POOL_MIB[self.kind])
        self.base = self.random.randbytes(SIZE // 2) + bytes(SIZE // 2)
        for begin in (0, BEGIN):
            raw = self.directory / 'base.raw'
            raw.write_bytes(bytes(begin) + self.base)
            backend.tool(
                'pcow-img',
                'convert',
                '-q',
                '-f',
                'raw',
                '-o',
                'sealed=on',
                raw,
                self.pool / f'base{begin}.pcow',
            )
        self.absent: set[str] = set()  # devices
        self.made = 0
        self.full = False
        self.addresses: dict[str, int] = {}
        self.images = [self.create(number) for number in range(2)]

    def mount(self, name: str, kind: str, mib: int) -> Path:
        """A file system of its own, which goes with the test."""
        place, what, loop = self.directory / name, 'pcow-test', ()
        place.mkdir()
        if MAKE[kind]:
            what = str(self.directory / f'{name}.{kind}')
            with open(what, 'wb') as file:
                file.truncate(mib * images.MIB)
            subprocess.run([*MAKE[kind], what], check=True)
            loop = ('loop',)
        options = ','.join((*loop, *OPTIONS[kind])).format(mib=mib)
        subprocess.run(['mount', '-t', kind, '-o', options, what, place], check=True)
        self.addCleanup(lambda: subprocess.run(['umount', '-l', place], check=True))
        return place

    def create(self, number: int) -> Image:
        """The first one is RAM now and then."""
        is_ram = number == 0 and self.random.random() < 0.5
        on_base = self.random.random() < 0.7
        policy = self.random.choice(('wait', 'fail'))
        image = Image(number, is_ram, policy, on_base, self.base if on_base else bytes(SIZE))
        self.make_file(image)
        return image

    def make_file(self, image: Image) -> None:
        """Another one, which nobody has written to."""
        self.made += 1
        image.path = self.pool / f'vm{self.made}.pcow'
        base = self.pool / f'base{image.begin}.pcow'
        if image.on_base:
            backend.tool('pcow-img', 'create', '-q', '-b', base, image.path)
        else:
            backend.tool('pcow-img', 'create', '-q', image.path, image.begin + SIZE)

    @property
    def has_ram(self) -> bool:
        """Is RAM, with all queues, on an image?"""
        return self.images[0].is_ram

    def built(self, *devices: str) -> bool:
        """Has the QEMU these devices? Work that needs them is left out else."""
        self.absent |= set(devices) - qemu.devices()
        return qemu.devices() >= set(devices)

    def device_arguments(self) -> list[str]:
        """Of a machine that begins."""
        return []

    def set_up(self) -> None:
        """As a guest does that starts."""

    def note(self, text: str) -> None:
        self.log.append(text)

    def wrong(self, text: str) -> None:
        if text:
            self.fail(f'PCOW_TEST_SEED={self.seed}: {text}\n' + '\n'.join(self.log[-60:]))

    def address(self, image: Image, offset: int = 0) -> int:
        if image.is_ram:
            return BEGIN + offset
        if image.device not in self.addresses:
            self.addresses[image.device] = self.vm.address(image.device)
        return self.addresses[image.device] + offset

    def load(self, image: Image, offset: int, length: int) -> bytes:
        line = f'b64read {self.address(image, offset):#x} {length:#x}'
        return base64.b64decode(self.vm.ask(line))

    def compare(self, image: Image, offset: int, length: int, about: str) -> None:
        self.wrong(
            (lost := image.content.adopt(offset, self.load(image, offset, length)))
            and f'{image.id} after {about}: {lost}'
        )

    def compare_all(self, about: str) -> None:
        for image in self.images:
            self.compare(image, 0, SIZE, about)
            for name, content in image.snapshots.items():
                copy = self.directory / 'copy.raw'
                vm_state.run(
                    'pcow-img', 'convert', '-q', '-U', '-O', 'raw', '-l', name, image.path, copy
                )
                lost = content.adopt(0, copy.read_bytes()[image.begin :])
                self.wrong(lost and f'{image.id} {name} after {about}: {lost}')

    def some(self, granule: int = 1, most: int = 65536) -> tuple[int, int]:
        """A place that is near the same few slabs most of the time."""
        length = min(self.random.choice((1, 8, 512, 4096, 20000, most)), most)
        length = max(granule, length // granule * granule)
        near = (0, 0, SIZE // 2 - 32768, images.SLAB - 8192, self.random.randrange(SIZE))
        offset = min(self.random.choice(near) + self.random.randrange(100000), SIZE - length)
        return offset, length

    def pieces(self, lengths: Sequence[int], taken: Sequence[Piece] = ()) -> list[Piece]:
        """Of these lengths, anywhere but in one another and in what is taken."""
        found: list[Piece] = []
        while len(found) < len(lengths):
            length = lengths[len(found)]
            offset, _length = self.some(length, length)
            piece = Piece(self.random.choice(self.images), offset, length)
            if not any(piece.meets(other) for other in (*taken, *found)):
                found.append(piece)
        return found

    def cut(self, total: int, most: int) -> list[int]:
        """At most so many lengths that are so much together."""
        cuts = {self.random.randrange(total) for _ in range(self.random.randrange(most))}
        return [end - begin for begin, end in itertools.pairwise(sorted({0, total, *cuts}))]

    def buffers(self, pieces: Sequence[Piece]) -> list[tuple[int, int]]:
        return [(self.address(piece.image, piece.offset), piece.length) for piece in pieces]

    def bytes_in(self, pieces: Sequence[Piece]) -> bytes:
        """What the model has there."""
        return b''.join(
            piece.image.content.data[piece.offset : piece.offset + piece.length] for piece in pieces
        )

    def stored(self, image: Image, offset: int, data: bytes, well: bool, about: str) -> None:
        """A store that must have been made, or may have been."""
        if well:
            image.content.store(offset, data)
        else:
            image.content.doubt(offset, data)
        self.compare(image, offset, len(data), about)

    def stored_in(self, pieces: Sequence[Piece], data: bytes, well: bool, about: str) -> None:
        """The same of a buffer in several places."""
        at = 0
        for piece in pieces:
            self.stored(piece.image, piece.offset, data[at : at + piece.length], well, about)
            at += piece.length

    def would_wait(self, images_: Sequence[Image]) -> bool:
        """Would a device's store by a pointer wait for space, and QEMU with it?"""
        return self.full and any(image.policy == 'wait' for image in images_)

    def go_on(self) -> None:
        """A store by a pointer that found no space has stopped the VM."""
        if self.full:
            self.vm.qmp('query-status')
            time.sleep(0.02)
            self.vm.qmp('cont')
