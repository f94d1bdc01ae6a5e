# SPDX-License-Identifier: Apache-2.0
"""virtio-net on a tap with vhost in the kernel, beside an image: the kernel asks before it accesses
memory, or QEMU serves it.

The tap is one of this machine. Its vhost is a stand-in (vhost_stub.c), as few build machines have
/dev/vhost-net. ``tools/vm-test kvm`` runs a real one.
"""

from collections.abc import Iterator
import contextlib
import fcntl
import os
from pathlib import Path
import socket
import struct
import time
from unittest import mock

from tests.functional import images
from tests.functional import qemu
from tests.functional import test_qemu_backend as backend
from tests.functional import virtio

SLOT = 5
MAC = '52:54:00:70:63:77'
ETHER_TYPE = 0x88B5  # for experiments
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
# VHOST_SET_MEM_TABLE: guest memory is the kernel's from here on; VHOST_NET_SET_BACKEND
SET_MEMORY, SET_BACKEND = '0x3', '0x30'
BUFFER = 2048
HEADER = 12  # of virtio-net, before a packet
NET = ('-device', f'virtio-net-pci,netdev=net0,addr={SLOT},mac={MAC},disable-legacy=on,romfile=')


class VhostTestCase(backend.QemuTestCase):
    def setUp(self) -> None:
        super().setUp()
        if not Path('/dev/net/tun').exists():
            self.skipTest('there is no /dev/net/tun')
        self.requests = self.directory / 'requests'
        self.environment = qemu.preload(self.directory, 'vhost_stub.c') | {
            'VHOST_REQUESTS': str(self.requests)
        }
        self.tap = f'pcow{os.getpid()}'
        self.overlay()

    @contextlib.contextmanager
    def start(self, *arguments: str) -> Iterator[qemu.Qemu]:
        tap = f'tap,id=net0,ifname={self.tap},script=no,downscript=no,vhost=on'
        vm = qemu.Qemu(self.directory, '-netdev', tap, *NET, *arguments)
        with contextlib.ExitStack() as stack:
            with mock.patch.dict(os.environ, self.environment):
                stack.enter_context(vm)
            yield vm

    def plug(self, vm: qemu.Qemu, identity: str, image: Path) -> int:
        """:returns: where the guest sees it"""
        vm.qmp(
            'object-add',
            **{
                'qom-type': 'memory-backend-file',
                'id': identity,
                'mem-path': str(image),
                'share': True,
                'size': backend.SIZE,
            },
        )
        vm.qmp('device_add', driver='nvdimm', memdev=identity, id=f'nv-{identity}')
        return vm.address(f'nv-{identity}')

    def requested(self) -> list[str]:
        return self.requests.read_text().split()

    def receive(self, vm: qemu.Qemu, net: virtio.Device, address: int, payload: bytes) -> None:
        """A packet that this machine sends comes to be in guest memory, and nothing behind it
        changes.
        """
        packet = (
            bytes.fromhex(MAC.replace(':', ''))
            + bytes(6)
            + struct.pack('>H', ETHER_TYPE)
            + payload.ljust(100, b'.')
        )
        behind = vm.read(address + BUFFER, BUFFER)
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sender:
            fcntl.ioctl(sender, SIOCSIFFLAGS, struct.pack('16sH22x', self.tap.encode(), IFF_UP))
            sender.bind((self.tap, 0))
            end, found = time.monotonic() + images.TIMEOUT, b''
            # this machine's kernel says something of its own there, and what was sent before may
            # still be on its way
            while found != packet and time.monotonic() < end:
                if net.served():
                    net.post([], [(address, BUFFER)])
                    net.notify()
                sender.send(packet)
                time.sleep(0.02)
                found = vm.read(address + HEADER, len(packet))
        self.assertEqual(packet, found)
        self.assertEqual(behind, vm.read(address + BUFFER, BUFFER))


class FallbackTest(VhostTestCase):
    """With a kernel that cannot ask."""

    def test_qemu_serves_it_itself(self) -> None:
        """Into memory that must be copied first, absent or not, before and after a snapshot; also
        after the guest stood still.
        """
        with self.start(*backend.backend(self.image)) as vm:
            net, address = virtio.Device(vm, SLOT), vm.address('nv0')
            self.receive(vm, net, address + 5 * images.MIB, b'a page of the base')
            vm.qmp('pcow-snapshot-create', id='mem0', name='before')
            self.receive(vm, net, address + 5 * images.MIB, b'a frozen page')
            vm.qmp('stop')
            vm.qmp('cont')
            self.receive(vm, net, address + 9 * images.MIB, b'after it was stopped')
            vm.quit()
            assert vm.process.stderr is not None
            said = vm.process.stderr.read()
        self.assertIn(f"vhost cannot be used together with the pcow image '{self.image}'", said)
        self.assertIn('falling back on userspace virtio', said)
        self.assertFalse({SET_MEMORY, SET_BACKEND} & set(self.requested()))
        backend.tool('pcow-img', 'check', self.image)

    def test_an_image_comes_later(self) -> None:
        """Without an image vhost is at work; with it QEMU serves the device, and what the guest has
        posted is not lost.
        """
        with self.start() as vm:
            net = virtio.Device(vm, SLOT)
            self.assertLessEqual({SET_MEMORY, SET_BACKEND}, set(self.requested()))
            net.post([], [(virtio.QUEUE_AREA + (8 << 20), BUFFER)])
            address = self.plug(vm, 'mem0', self.image)
            self.receive(vm, net, virtio.QUEUE_AREA + (8 << 20), b'into RAM')
            self.receive(vm, net, address + 5 * images.MIB, b'a page of the base')
            self.assertEqual('running', vm.wait_status('running'))
            self.assertIsNone(vm.take_event('STOP'))
            vm.quit()
            assert vm.process.stderr is not None
            self.assertIn('falling back on userspace virtio', vm.process.stderr.read())
        backend.tool('pcow-img', 'check', self.image)


class AsksTest(VhostTestCase):
    """With a kernel that asks."""

    def setUp(self) -> None:
        super().setUp()
        self.environment['VHOST_ASKS'] = '1'

    def test_all_is_taken_back_for_a_snapshot(self) -> None:
        with self.start(*backend.backend(self.image)) as vm:
            virtio.Device(vm, SLOT)
            told = self.requested()
            self.assertIn(SET_BACKEND, told)
            # where the ring is comes before the kernel looks for it
            self.assertLess(told.index('update'), told.index(SET_BACKEND))
            vm.qmp('pcow-snapshot-create', id='mem0', name='before')
            self.assertEqual(['invalidate'], self.requested()[len(told) :])
            vm.quit()
            assert vm.process.stderr is not None
            self.assertEqual('', vm.process.stderr.read())

    def test_an_image_is_added_to_another(self) -> None:
        """That is nothing new for a kernel that asks already."""
        second = self.directory / 'second.pcow'
        backend.tool('pcow-img', 'create', '-q', second, backend.SIZE)
        with self.start(*backend.backend(self.image)) as vm:
            virtio.Device(vm, SLOT)
            self.plug(vm, 'mem1', second)

    def test_an_image_comes_later(self) -> None:
        """The kernel begins anew, and asks; before the guest sees the image, and without a word of
        it.
        """
        with self.start() as vm:
            virtio.Device(vm, SLOT)
            told = self.requested()
            self.assertIn(SET_BACKEND, told)
            self.assertNotIn('update', told)
            self.plug(vm, 'mem0', self.image)
            told = self.requested()[len(told) :]
            self.assertLess(told.index('update'), told.index(SET_BACKEND, told.index('update')))
            self.assertIsNone(vm.take_event('STOP'))
            told = self.requested()
            vm.qmp('pcow-snapshot-create', id='mem0', name='before')
            self.assertEqual(['invalidate'], self.requested()[len(told) :])
            vm.quit()
            assert vm.process.stderr is not None
            self.assertEqual('', vm.process.stderr.read())

    def test_queues_are_reset(self) -> None:
        """While vhost is at work, and when it is not any more."""
        with self.start(*backend.backend(self.image)) as vm:
            net = virtio.Device(vm, SLOT)
            net.reset_queue()
            net.reset()
            net.reset_queue()
            self.assertTrue(vm.qmp('query-status')['running'])
            told = len(self.requested())
            virtio.Device(vm, SLOT)
            self.assertIn(SET_BACKEND, self.requested()[told:])
