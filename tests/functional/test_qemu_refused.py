# SPDX-License-Identifier: Apache-2.0
"""Devices that access guest memory without QEMU are refused beside a pcow image, in words.

None of them is here: what stands in for one is just enough for QEMU to come to the question.
"""

import os
import socket

from tests.functional import qemu
from tests.functional import test_qemu_backend as backend


class RefusedTest(backend.QemuTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.image = self.directory / 'vm.pcow'
        backend.tool('pcow-img', 'create', '-q', self.image, backend.SIZE)

    def assert_refused(self, what: str, *device: str, fds: tuple[int, ...] = ()) -> None:
        """The message names the kind of device, and the image."""
        message = qemu.refused('-object', f'memory-backend-file,id=mem0,mem-path={self.image},share=on', *device, fds=fds)
        self.assertIn(what, message)
        self.assertIn(f"'{self.image}'", message)

    def test_vhost_user(self) -> None:
        """A server that says nothing is connected to."""
        path = self.directory / 'vhost.sock'
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.addCleanup(server.close)
        server.bind(str(path))
        server.listen()
        self.assert_refused('vhost-user', '-chardev', f'socket,id=c,path={path}', '-device', 'vhost-user-blk-pci,chardev=c')

    def test_vhost_in_the_kernel(self) -> None:
        """vsock has no fallback in QEMU."""
        fd = os.open('/dev/null', os.O_RDWR)
        self.addCleanup(os.close, fd)
        self.assert_refused('vhost=off', '-device', f'vhost-vsock-pci,guest-cid=3,vhostfd={fd}', fds=(fd,))

    def test_vfio(self) -> None:
        device = self.directory / '0000:00:01.0'
        device.mkdir()
        self.assert_refused('vfio', '-device', f'vfio-pci,sysfsdev={device}')
