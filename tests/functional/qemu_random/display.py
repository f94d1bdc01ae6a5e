# SPDX-License-Identifier: Apache-2.0
"""virtio-gpu loads pictures from images, also long after it was told where, and stores answers."""

from __future__ import annotations

import dataclasses

from tests.functional.qemu_random import world
from tests.functional.qtest_devices import virtio_gpu

GPU = 12  # slot


@dataclasses.dataclass
class Picture:
    resource: int
    kind: int
    width: int
    height: int
    backing: list[world.Piece]  # which the device keeps mapped
    data: bytearray  # that it has loaded

    @property
    def pixels(self) -> bytes:
        """What is seen: red, green, blue."""
        seen = bytearray(3 * self.width * self.height)
        for color, at in enumerate(virtio_gpu.FORMATS[self.kind]):
            seen[color::3] = self.data[at::4]
        return bytes(seen)


def copy_of(picture: Picture | None) -> Picture | None:
    return picture and dataclasses.replace(picture, data=bytearray(picture.data))


@dataclasses.dataclass
class Screen:
    """Of a VM whose state was saved."""

    picture: Picture | None
    sent: int  # commands


class DisplayWork(world.World):
    def setUp(self) -> None:
        super().setUp()
        self.with_gpu = self.built('virtio-gpu-pci')

    def device_arguments(self) -> list[str]:
        more = super().device_arguments()
        return [*more, '-device', f'virtio-gpu-pci,id=gpu,addr={GPU:#x}'] if self.with_gpu else more

    def set_up(self) -> None:
        super().set_up()
        self.picture: Picture | None = None
        if not self.with_gpu:
            return
        self.gpu = virtio_gpu.Gpu(self.vm, GPU)
        answer = (self.gpu.scratch + 0x4000, virtio_gpu.DISPLAY_INFO_BYTES)
        begin = self.gpu.display_info(0, [answer])
        self.displays = self.vm.read(*answer)[len(begin) :]

    def do_draw(self) -> None:
        if not self.with_gpu:
            return
        picture = self.picture
        if picture is None or self.random.random() < 0.3:
            picture = self.new_picture()
        x, y = self.random.randrange(picture.width), self.random.randrange(picture.height)
        width = self.random.randint(1, picture.width - x)
        height = self.random.randint(1, picture.height - y)
        if self.random.random() < 0.5:
            x, width = 0, picture.width
        self.note(f'draw {x} {y} {width} {height}')
        self.draw(picture, (x, y, width, height))

    def new_picture(self) -> Picture:
        # The rows of QEMU's file of a screen are multiples of four bytes
        width, height = 4 * self.random.randint(4, 30), self.random.randint(16, 120)
        size, kind = 4 * width * height, self.random.choice(list(virtio_gpu.FORMATS))
        backing = self.pieces(self.cut(size, 6))
        picture = Picture(self.gpu.sent + 1, kind, width, height, backing, bytearray(size))
        self.note(f'picture {kind} {width} {height}: {backing}')
        self.done['pictures'] += 1
        self.gpu.create(picture.resource, picture.kind, width, height)
        self.gpu.attach(picture.resource, self.buffers(picture.backing))
        self.draw(picture, (0, 0, width, height))
        self.gpu.show(picture.resource, width, height)
        if self.picture:
            self.gpu.destroy(self.picture.resource)
        self.picture = picture
        return picture

    def draw(self, picture: Picture, rectangle: virtio_gpu.Rectangle) -> None:
        """What the backing holds now."""
        x, y, width, height = rectangle
        source = self.bytes_in(picture.backing)
        self.gpu.transfer(picture.resource, rectangle, 4 * (y * picture.width + x))
        for row in range(y, y + height):
            at = 4 * (row * picture.width + x)
            picture.data[at : at + 4 * width] = source[at : at + 4 * width]
        if picture is self.picture:
            self.gpu.flush(picture.resource, rectangle)
            self.look(self.log[-1])

    def look(self, about: str) -> None:
        """Compare what is seen."""
        if self.picture is None:
            return
        picture, file = self.picture, self.directory / 'screen.ppm'
        self.vm.qmp('screendump', filename=str(file), device='gpu')
        expected = b'P6\n%d %d\n255\n' % (picture.width, picture.height) + picture.pixels
        found = file.read_bytes()
        if found != expected:
            pairs = enumerate(zip(found, expected, strict=False))
            first = next((at for at, (a, b) in pairs if a != b), 0)
            self.wrong(
                f'the screen after {about}: {found[first : first + 16].hex()} at {first} of '
                f'{len(found)}, not {expected[first : first + 16].hex()} of {len(expected)}'
            )

    def redraw(self, about: str) -> None:
        """All of the picture, whose backing holds something else than before."""
        if self.picture:
            self.note(f'redraw after {about}')
            self.draw(self.picture, (0, 0, self.picture.width, self.picture.height))

    def do_answer(self) -> None:
        if not self.with_gpu:
            return
        target = self.pieces(self.cut(virtio_gpu.DISPLAY_INFO_BYTES, 4))
        if self.would_wait([piece.image for piece in target]):
            return
        self.note(f'answer to {target}')
        begin = self.gpu.display_info(self.random.getrandbits(64), self.buffers(target))
        self.go_on()
        self.stored_in(target, begin + self.displays, not self.full, self.log[-1])

    def screen(self) -> Screen:
        return Screen(copy_of(self.picture), self.gpu.sent if self.with_gpu else 0)

    def screen_is(self, screen: Screen, about: str) -> None:
        """The VM went back to it, or has moved; the device has mapped the backing again."""
        if not self.with_gpu:
            return
        self.gpu.loaded(self.vm, screen.sent)
        self.picture = copy_of(screen.picture)
        self.look(about)
        self.redraw(about)
