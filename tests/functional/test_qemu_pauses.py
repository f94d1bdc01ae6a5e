# SPDX-License-Identifier: Apache-2.0
"""How long a snapshot of an image stops the guest: not for a disk that has nothing to do with it,
nor for one that is slow.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
import shutil
import tempfile
import time
from unittest import mock

from tests.functional import images
from tests.functional import qemu
from tests.functional import test_qemu_backend as backend
from tests.functional import virtio
from tests.functional import vm_state

SLOT = 6
LIMIT = 0.1  # seconds that a snapshot waits for requests, unless told otherwise
SLOW_READ = 1.5  # slow_disk.c
NS = 10**9
DIRTY = 48 * images.MIB  # 0.7 s of a sync: slow_disk.c
# seconds; much less than what must not be waited for, much more than a busy machine needs
MUCH = 0.25


class PauseTest(backend.QemuTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.environment = qemu.preload(self.directory, 'slow_disk.c')
        self.disk = self.directory / 'disk.slow'
        self.disk.write_bytes(b'd' * images.MIB)

    def start(self, *arguments: str) -> vm_state.Vm:
        vm = vm_state.Vm(self.directory, *arguments)
        with mock.patch.dict(os.environ, self.environment), contextlib.ExitStack() as stack:
            stack.enter_context(vm)
            stack.pop_all()
        self.addCleanup(vm.__exit__, None, None, None)
        return vm

    def start_with_disk(
        self, *, iothread: bool = False, more: tuple[str, ...] = ()
    ) -> tuple[vm_state.Vm, virtio.Block, int]:
        backend.tool('pcow-img', 'create', '-q', self.image, backend.SIZE)
        thread = ('-object', 'iothread,id=io0') if iothread else ()
        vm = self.start(
            *backend.backend(self.image),
            *thread,
            *more,
            '-blockdev',
            f'file,node-name=disk,filename={self.disk}',
            '-device',
            f'virtio-blk-pci,drive=disk,addr={SLOT}' + (',iothread=io0' if iothread else ''),
        )
        return vm, virtio.Block(vm, SLOT), vm.address('nv0')

    def create(self, vm: qemu.Qemu, name: str, **more: int) -> tuple[float, float]:
        """Seconds until the answer, and those for which the guest was held."""
        begun = time.monotonic()
        pause = vm.qmp('pcow-snapshot-create', id='mem0', name=name, **more)['pause']
        return time.monotonic() - begun, pause / NS

    def test_disk_that_has_nothing_to_do_with_an_image(self) -> None:
        """A request of a guest to RAM, and one of a job."""
        for iothread in (False, True):
            with self.subTest(iothread=iothread):
                vm, block, _address = self.start_with_disk(
                    iothread=iothread,
                    more=(
                        '-blockdev',
                        'driver=null-co,node-name=source,size=1048576,latency-ns=2000000000',
                        '-blockdev',
                        'driver=null-co,node-name=target,size=1048576',
                    ),
                )
                vm.qmp(
                    'blockdev-backup', job_id='job', device='source', target='target', sync='full'
                )
                block.post_input(0, [(vm_state.RAM, 4096)])
                block.notify()
                time.sleep(0.1)
                took, pause = self.create(vm, 'beside')
                self.assertFalse(block.served())
                self.assertLess(took, MUCH)
                self.assertLess(pause, MUCH)
                vm.qmp('pcow-snapshot-rename', id='mem0', name='beside', new_name='other')
                vm.qmp('pcow-snapshot-delete', id='mem0', name='other')
                self.assertFalse(block.served())
                block.wait()
                self.assertEqual(b'dd', vm.read(vm_state.RAM, 2))
                vm.__exit__(None, None, None)
                self.image.unlink()

    def test_disk_that_reads_into_an_image(self) -> None:
        """The snapshot is refused, and the guest has run on; or it waits as long as it may, and the
        guest runs meanwhile.
        """
        for iothread in (False, True):
            with self.subTest(iothread=iothread):
                vm, block, address = self.start_with_disk(iothread=iothread)
                block.post_input(0, [(address, 4096)])
                block.notify()
                time.sleep(0.1)
                begun = time.monotonic()
                message = vm.qmp_error('pcow-snapshot-create', id='mem0', name='refused')
                took = time.monotonic() - begun
                self.assertIn('the VM has run on, and nothing was changed', message)
                self.assertGreaterEqual(took, LIMIT)
                self.assertLess(took, LIMIT + MUCH)
                self.assertEqual([], vm.names())
                self.assertFalse(block.served())
                _took, pause = self.create(vm, 'waited', max_wait=20000)
                self.assertLess(pause, MUCH)
                block.wait()
                self.assertEqual(0, block.status())
                vm.write(address, b'later')
                vm.quit()
                self.assertEqual(b'd' * 4096, self.snapshot('waited')[:4096])
                self.image.unlink()

    def snapshot(self, name: str) -> bytes:
        raw = self.directory / 'raw'
        backend.tool('pcow-img', 'convert', '-O', 'raw', '-l', name, self.image, raw)
        return raw.read_bytes()

    def test_requests_that_begin_meanwhile(self) -> None:
        """They wait for the snapshot, or for its refusal, and go on."""
        vm, block, address = self.start_with_disk(
            more=(
                '-blockdev',
                'driver=null-co,read-zeroes=on,node-name=fast,size=1048576',
                '-device',
                f'virtio-blk-pci,drive=fast,addr={SLOT + 1}',
            )
        )
        fast = virtio.Block(vm, SLOT + 1)
        for limit in (300, 20000):
            with self.subTest(limit=limit):
                block.post_input(0, [(address, 4096)])
                block.notify()
                time.sleep(0.05)
                vm.begin_qmp('pcow-snapshot-create', id='mem0', name='s', **{'max-wait': limit})
                time.sleep(0.05)
                vm.write(address + 8192, b'x' * 512)
                fast.post_input(0, [(address + 8192, 512)])
                fast.notify()
                time.sleep(0.05)
                self.assertFalse(fast.served())
                reply = vm.end_qmp('pcow-snapshot-create')
                fast.wait()
                self.assertEqual(0, fast.status())
                self.assertEqual(bytes(512), vm.read(address + 8192, 512))
                self.assertEqual(limit == 300, 'error' in reply, str(reply))
                block.wait()
                self.assertEqual(0, block.status())
        vm.quit()

    def test_dirty_image_on_a_slow_disk(self) -> None:
        """Class page-cache: what is dirty is written while the guest runs."""
        directory = Path(tempfile.mkdtemp(prefix='pcow-test-', dir='/var/tmp'))
        self.addCleanup(shutil.rmtree, directory)
        self.image = directory / 'vm.pcow'
        backend.tool('pcow-img', 'create', '-q', self.image, backend.SIZE)
        vm = self.start(
            '-object',
            f'memory-backend-file,id=mem0,mem-path={self.image},share=on',
            '-device',
            'nvdimm,memdev=mem0,id=nv0,pcow-volatile=on',
        )
        (info,) = vm.qmp('query-pcow')
        if info['persistence'] != 'page-cache':
            self.skipTest(f'{directory} is of class {info["persistence"]}')
        vm.ask(f'memset {vm.address("nv0"):#x} {DIRTY:#x} 0x5a')
        took, pause = self.create(vm, 'dirty')
        self.assertGreater(took, 2 * pause, 'nothing was dirty')
        self.assertLess(pause, MUCH)
        vm.quit()
        self.assertEqual(b'\x5a' * DIRTY, self.snapshot('dirty')[:DIRTY])
