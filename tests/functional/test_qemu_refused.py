# SPDX-License-Identifier: Apache-2.0
"""Devices that access guest memory without QEMU are refused beside a pcow image, in words.

None of them is here: what stands in for one is just enough for QEMU to come to the question.
"""

import os
import socket
import struct
import threading

from tests.functional import qemu
from tests.functional import test_qemu_backend as backend

# docs/interop/vhost-user.rst of QEMU: numbers of requests, bits
GET_FEATURES, GET_PROTOCOL_FEATURES = 1, 15
VERSION_AND_REPLY = 5
PROTOCOL_FEATURES, VERSION_1 = 1 << 30, 1 << 32


class RefusedTest(backend.QemuTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.image = self.directory / 'vm.pcow'
        backend.tool('pcow-img', 'create', '-q', self.image, backend.SIZE)

    def assert_refused(self, what: str, *device: str, fds: tuple[int, ...] = ()) -> None:
        """The message names the kind of device, and the image."""
        message = qemu.refused(
            '-object',
            f'memory-backend-file,id=mem0,mem-path={self.image},share=on',
            *device,
            fds=fds,
        )
        self.assertIn(what, message)
        self.assertIn(f"'{self.image}'", message)

    def test_vhost_user(self) -> None:
        """A server that says nothing is connected to."""
        path = self.directory / 'vhost.sock'
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.addCleanup(server.close)
        server.bind(str(path))
        server.listen()
        self.assert_refused(
            'vhost-user',
            '-chardev',
            f'socket,id=c,path={path}',
            '-device',
            'vhost-user-blk-pci,chardev=c',
        )

    def serve_features(self, server: socket.socket) -> None:
        """All that a device wants to know before a guest uses it."""
        connection, _address = server.accept()
        with connection, connection.makefile('rb') as requests:
            while header := requests.read(12):
                request, _flags, length = struct.unpack('<III', header)
                requests.read(length)
                answers = {GET_FEATURES: PROTOCOL_FEATURES | VERSION_1, GET_PROTOCOL_FEATURES: 0}
                if request in answers:
                    connection.sendall(
                        struct.pack('<IIIQ', request, VERSION_AND_REPLY, 8, answers[request])
                    )

    def test_an_image_beside_vhost_user(self) -> None:
        """The other order; the device need not be in use."""
        path = self.directory / 'vhost.sock'
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.addCleanup(server.close)
        server.bind(str(path))
        server.listen()
        thread = threading.Thread(target=self.serve_features, args=(server,), daemon=True)
        thread.start()
        # vhost-user wants memory that has a file descriptor
        ram = (
            '-object',
            'memory-backend-memfd,id=ram,size=128M,share=on',
            '-machine',
            'memory-backend=ram',
        )
        device = ('-chardev', f'socket,id=c,path={path}', '-device', 'vhost-user-rng-pci,chardev=c')
        with qemu.Qemu(self.directory, *ram, *device) as vm:
            arguments = {
                'qom-type': 'memory-backend-file',
                'id': 'mem0',
                'mem-path': str(self.image),
                'share': True,
                'size': backend.SIZE,
            }
            message = vm.qmp_error('object-add', **arguments)
            self.assertIn('vhost device', message)
            self.assertIn(f"'{self.image}'", message)
            vm.quit()
        thread.join(qemu.START_SECONDS)
        self.assertFalse(thread.is_alive())
        # nothing of it has stayed
        backend.tool('pcow-img', 'check', self.image)

    def test_vhost_in_the_kernel(self) -> None:
        """vsock has no fallback in QEMU."""
        fd = os.open('/dev/null', os.O_RDWR)
        self.addCleanup(os.close, fd)
        self.assert_refused(
            'vhost=off', '-device', f'vhost-vsock-pci,guest-cid=3,vhostfd={fd}', fds=(fd,)
        )

    def test_vfio(self) -> None:
        device = self.directory / '0000:00:01.0'
        device.mkdir()
        self.assert_refused('vfio', '-device', f'vfio-pci,sysfsdev={device}')
