# SPDX-License-Identifier: Apache-2.0
"""Two network cards on one hub: what one sends out of images, the other stores to images."""

from __future__ import annotations

import itertools

from tests.functional.qemu_random import world
from tests.functional.qtest_devices import e1000
from tests.functional.qtest_devices import virtio_net

NET, E1000 = 10, 11  # slots
SHORTEST = 64  # frame


class NetworkWork(world.World):
    def setUp(self) -> None:
        super().setUp()
        self.with_network = self.built('virtio-net-pci', 'e1000')

    def device_arguments(self) -> list[str]:
        more = super().device_arguments()
        if not self.with_network:
            return more
        for name, slot in (('virtio-net-pci', NET), ('e1000', E1000)):
            more += [
                '-netdev',
                f'hubport,id=n{slot},hubid=0',
                '-device',
                f'{name},addr={slot:#x},netdev=n{slot},romfile=',
            ]
        return more

    def set_up(self) -> None:
        super().set_up()
        if not self.with_network:
            return
        self.net = virtio_net.Net(self.vm, NET)
        self.e1000 = e1000.E1000(self.vm, E1000 << 3, 3)

    def do_send(self) -> None:
        if not self.with_network:
            return
        some = self.random.randrange(SHORTEST, e1000.LONGEST)
        length = self.random.choice((SHORTEST, 1514, some))
        source = self.pieces(self.cut(length, 6))
        if self.random.random() < 0.5:
            self.send_to_virtio(length, source)
        else:
            self.send_to_e1000(length, source)

    def send_to_virtio(self, length: int, source: list[world.Piece]) -> None:
        groups: list[list[world.Piece]] = []
        for share in self.cut(virtio_net.HEADER + length - SHORTEST, 4):
            # the first buffer has the header as a whole
            lengths = self.cut(share + (0 if groups else SHORTEST), 3 if groups else 1)
            groups.append(self.pieces(lengths, [*source, *itertools.chain(*groups)]))
        target = [*itertools.chain(*groups)]
        if self.would_wait([piece.image for piece in target]):
            return
        self.begin_send('e1000 to virtio-net', source, target)
        frame = virtio_net.header(len(groups)) + self.bytes_in(source)
        self.net.post_receive([self.buffers(group) for group in groups])
        self.e1000.send(self.buffers(source))
        self.net.received()
        self.go_on()
        self.stored_in(target, frame, not self.full, self.log[-1])

    def send_to_e1000(self, length: int, source: list[world.Piece]) -> None:
        lengths = [min(e1000.BUFFER, length - at) for at in range(0, length, e1000.BUFFER)]
        target = self.pieces(lengths, source)
        self.begin_send('virtio-net to e1000', source, target)
        self.e1000.post_receive(self.buffers(target))
        self.net.send(self.buffers(source))
        self.e1000.received()
        self.stored_in(target, self.bytes_in(source), not self.full, self.log[-1])

    def begin_send(self, kind: str, source: list[world.Piece], target: list[world.Piece]) -> None:
        self.done[kind] += 1
        self.note(f'{kind}: {source} -> {target}')
