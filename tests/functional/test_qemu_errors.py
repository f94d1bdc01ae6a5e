# SPDX-License-Identifier: Apache-2.0
"""Memory that cannot be accessed: a base cut short behind QEMU's back, a full pool whose policy is
to fail.
"""

import json
import os
from pathlib import Path
import shutil
import signal
import subprocess
import tempfile
from typing import ClassVar

from tests.functional import images
from tests.functional import linux_guest
from tests.functional import qemu
from tests.functional import test_qemu_backend as backend
from tests.functional import virtio

GUEST = Path(__file__).parent / 'guest'
PAGE = 4096
SLOT = 6


def cut(base: Path, pages: int = 1) -> None:
    """Take the last pages of an image that is full away, as a storage system that loses a file's
    end would.
    """
    for extent in json.loads(backend.tool('pcow-img', 'map', '--output=json', base)):
        if extent['start'] + extent['length'] == backend.SIZE:
            os.truncate(base, extent['offset'] + extent['length'] - pages * PAGE)
            return
    raise AssertionError(f'{base} has no last pages')


def check_after_kill(image: Path) -> None:
    """No damage; slabs that had been prepared may be left, which the next writer takes."""
    done = subprocess.run(
        [images.program('pcow-img'), 'check', image], capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 3):
        raise AssertionError(done.stdout + done.stderr)


class DeviceTest(backend.QemuTestCase):
    """Accesses by QEMU itself."""

    def setUp(self) -> None:
        super().setUp()
        self.overlay()
        self.base = self.directory / 'base.pcow'

    def last_page(self, vm: qemu.Qemu) -> int:
        return vm.address('nv0') + backend.SIZE - PAGE

    def test_read_by_a_device(self) -> None:
        with qemu.Qemu(self.directory, *backend.backend(self.image)) as vm:
            cut(self.base)
            self.assertEqual(b'\x5a' * 8, vm.read(vm.address('nv0'), 8))
            vm.read(self.last_page(vm), 8)
            failed = vm.wait_event('PCOW_ERROR')
            self.assertEqual(('mem0', backend.SIZE - PAGE), (failed['id'], failed['offset']))
            # what can be read still is, what can be written is
            vm.write(vm.address('nv0'), b'goes on')
            self.assertEqual(b'goes on', vm.read(vm.address('nv0'), 7))
            self.assertEqual('running', vm.qmp('query-status')['status'])
            vm.quit()
        self.assertEqual(0, vm.process.returncode)

    def test_write_that_must_copy(self) -> None:
        with qemu.Qemu(self.directory, *backend.backend(self.image)) as vm:
            cut(self.base)
            vm.write(self.last_page(vm), b'lost')
            vm.wait_event('PCOW_ERROR')
            self.assertEqual('running', vm.qmp('query-status')['status'])
            vm.quit()
        self.assertEqual(0, vm.process.returncode)

    def test_requests_of_a_disk(self) -> None:
        disk = self.directory / 'disk.raw'
        disk.write_bytes(b'\x77' * images.MIB)
        device = (
            '-blockdev',
            f'file,node-name=disk,filename={disk}',
            '-device',
            f'virtio-blk-pci,drive=disk,addr={SLOT}',
        )
        with qemu.Qemu(self.directory, *backend.backend(self.image), *device) as vm:
            block = virtio.Block(vm, SLOT)
            cut(self.base)
            self.assertNotEqual(
                0, block.transfer(virtio.BLOCK_OUT, 0, [(self.last_page(vm), PAGE)])
            )
            self.assertNotEqual(0, block.transfer(virtio.BLOCK_IN, 0, [(self.last_page(vm), PAGE)]))
            self.assertEqual(0, block.transfer(virtio.BLOCK_IN, 0, [(vm.address('nv0'), PAGE)]))
            self.assertEqual(b'\x77' * PAGE, vm.read(vm.address('nv0'), PAGE))
            self.assertEqual(b'\x77' * images.MIB, disk.read_bytes())
            vm.quit()
        self.assertEqual(0, vm.process.returncode)

    def test_memory_that_qemu_uses_by_a_pointer(self) -> None:
        """The queue of a device in memory that goes bad: there is no way to report that, so the VM
        is stopped.
        """
        disk = self.directory / 'disk.raw'
        disk.write_bytes(bytes(images.MIB))
        # its ring of requests, empty so far, is on the page that will be lost
        self.image.unlink()
        backend.tool('pcow-img', 'unseal', self.base)
        backend.tool('pcow-io', '-c', f'write -q -P 0 {backend.SIZE - PAGE} 4', self.base)
        backend.tool('pcow-img', 'seal', self.base)
        backend.tool('pcow-img', 'create', '-q', '-b', self.base, self.image)
        device = (
            '-blockdev',
            f'file,node-name=disk,filename={disk}',
            '-device',
            f'virtio-blk-pci,drive=disk,addr={SLOT}',
        )
        with qemu.Qemu(self.directory, *backend.backend(self.image), *device) as vm:
            area = vm.address('nv0') + backend.SIZE - 3 * PAGE
            block = virtio.Block(vm, SLOT, area, writable=False)
            cut(self.base)
            block.notify()
            vm.wait_event('PCOW_ERROR')
            self.assertEqual('io-error', vm.wait_status('io-error'))
            self.assertEqual(b'\x5a' * 8, vm.read(vm.address('nv0'), 8))
            vm.quit()
        self.assertEqual(0, vm.process.returncode)


class SignalTest(backend.QemuTestCase):
    def test_foreign_signals(self) -> None:
        """A signal that another process sends is not taken for a trap, whatever its number."""
        for number in (signal.SIGSEGV, signal.SIGBUS):
            image = self.directory / f'{number.name}.pcow'
            backend.tool('pcow-img', 'create', '-q', image, backend.SIZE)
            with qemu.Qemu(self.directory, *backend.backend(image)) as vm:
                vm.write(vm.address('nv0'), b'kept')
                os.kill(vm.process.pid, number)
                self.assertEqual(-number, vm.process.wait(qemu.START_SECONDS))
            check_after_kill(image)
            self.assertIn('kept', backend.tool('pcow-io', '-r', '-c', 'read -v 0 16', image))

    def test_storm_of_harmless_signals(self) -> None:
        """Those that the main loop takes, while it stores to the image; other threads of QEMU have
        them blocked.
        """
        self.overlay()
        with qemu.Qemu(self.directory, *backend.backend(self.image)) as vm:
            address = vm.address('nv0')
            storm = subprocess.Popen(
                [
                    'sh',
                    '-c',
                    f'while kill -IO {vm.process.pid} && kill -ALRM {vm.process.pid}; do :; done',
                ],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            try:
                for offset in range(0, backend.SIZE, images.SLAB // 2 + PAGE):
                    vm.write(address + offset, offset.to_bytes(8, 'little'))
                for offset in range(0, backend.SIZE, images.SLAB // 2 + PAGE):
                    self.assertEqual(
                        offset.to_bytes(8, 'little') + b'\x5a', vm.read(address + offset, 9)
                    )
            finally:
                storm.kill()
                storm.wait()
            vm.quit()
        backend.tool('pcow-img', 'check', self.image)


class GuestTest(backend.QemuTestCase):
    """What a guest sees: a machine check, and nobody else sees anything."""

    kernel: ClassVar[linux_guest.Kernel]
    deaf_kernel: ClassVar[linux_guest.Kernel]  # that does not take machine checks

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        directory = Path(tempfile.mkdtemp(prefix='pcow-test-'))
        cls.addClassCleanup(shutil.rmtree, directory)
        program = directory / 'store-pages'
        subprocess.run(['cc', '-static', '-O2', '-o', program, GUEST / 'store-pages.c'], check=True)
        cls.kernel = linux_guest.Kernel('linux-image-amd64', **{'store-pages': program})
        cls.addClassCleanup(cls.kernel.close)
        cls.deaf_kernel = linux_guest.Kernel()
        cls.addClassCleanup(cls.deaf_kernel.close)

    def read_page(self, guest: linux_guest.LinuxGuest, page: int) -> tuple[str, int]:
        return guest.try_run(
            f'dd if=/dev/pmem0 of=/tmp/out bs={PAGE} skip={page} count=1 iflag=direct'
        )

    def test_read_of_a_lost_page(self) -> None:
        self.overlay()
        base = self.directory / 'base.pcow'
        with linux_guest.LinuxGuest(
            self.kernel, self.directory, *backend.backend(self.image), cpus=2
        ) as guest:
            pages = backend.SIZE // PAGE
            self.assertEqual(0, self.read_page(guest, pages - 1)[1])
            cut(base)
            text, status = self.read_page(guest, pages - 1)
            self.assertNotEqual(0, status, text)
            failed = guest.monitor.wait_event('PCOW_ERROR')
            self.assertEqual(backend.SIZE - PAGE, failed['offset'] // PAGE * PAGE)
            self.assertEqual('running', guest.monitor.run('query-status')['status'])
            self.assertRegex(guest.run('dmesg'), '(?i)machine check|hardware error|mce')
            # it lives, and so does what was not cut off
            self.assertEqual(0, self.read_page(guest, 0)[1])
            guest.run('echo alive')
            self.assertIn('base.pcow', guest.log.read_text())
            guest.quit()
        self.assertEqual(0, guest.process.returncode)

    def test_cpu_that_the_guest_does_not_use(self) -> None:
        """It is told of no machine check: it takes none, and would be reset, the others with it."""
        self.overlay()
        with linux_guest.LinuxGuest(
            self.kernel, self.directory, *backend.backend(self.image), cpus=2, more='maxcpus=1'
        ) as guest:
            cut(self.directory / 'base.pcow')
            text, status = self.read_page(guest, backend.SIZE // PAGE - 1)
            self.assertNotEqual(0, status, text)
            self.assertEqual('0', guest.run('cat /sys/devices/system/cpu/online').strip())
            self.assertEqual(0, self.read_page(guest, 0)[1])
            guest.quit()
        self.assertEqual(0, guest.process.returncode)

    def test_guest_that_takes_no_machine_checks(self) -> None:
        self.overlay()
        base = self.directory / 'base.pcow'
        whole = base.read_bytes()
        with linux_guest.LinuxGuest(
            self.deaf_kernel, self.directory, *backend.backend(self.image)
        ) as guest:
            cut(base)
            guest.send(
                f'dd if=/dev/pmem0 of=/tmp/out bs={PAGE} skip={backend.SIZE // PAGE - 1} count=1 '
                f'iflag=direct'
            )
            guest.monitor.wait_event('PCOW_ERROR')
            guest.monitor.wait_event('STOP')
            self.assertEqual('io-error', guest.monitor.run('query-status')['status'])
            # going on without a cure stops it again
            guest.monitor.run('cont')
            guest.monitor.wait_event('STOP')
            with base.open('r+b') as file:
                file.write(whole)
            guest.monitor.run('cont')
            self.assertEqual(0, guest.result()[1])
            self.assertEqual('5a5a5a5a', guest.run('od -An -tx4 -N4 /tmp/out').strip())
            guest.quit()
        self.assertEqual(0, guest.process.returncode)

    def test_store_to_a_lost_page(self) -> None:
        """One that could be stored to before, so that nothing is done for it first."""
        tree = self.directory / 'tree'
        tree.mkdir()
        (tree / 'data').write_bytes(b'\x5a' * 32 * images.MIB)
        linux_guest.make_file_system(self.directory, tree, self.image)
        with linux_guest.LinuxGuest(
            self.kernel, self.directory, *backend.backend(self.image)
        ) as guest:
            guest.run('mount -t ext4 -o dax=always /dev/pmem0 /mnt')
            self.assertIn('stored all', guest.run('dmesg -n 1; store-pages /mnt/data; sync'))
            layout = backend.tool('pcow-img', 'map', '-U', '--output=json', self.image)
            last = max(json.loads(layout), key=lambda extent: int(extent.get('offset', 0)))
            lost = last['start'] + last['length'] - PAGE
            os.truncate(self.image, last['offset'] + last['length'] - PAGE)
            text = guest.run('store-pages /mnt/data')
            self.assertRegex(text, r'failed at \d+\nstopped\nfirst page: 0x77')
            failed = guest.monitor.wait_event('PCOW_ERROR')
            self.assertEqual(lost, failed['offset'] // PAGE * PAGE)
            self.assertEqual('running', guest.monitor.run('query-status')['status'])
            guest.run('echo alive')
            guest.quit()
        self.assertEqual(0, guest.process.returncode)

    def test_full_pool_with_policy_fail(self) -> None:
        pool = self.directory / 'pool'
        pool.mkdir()
        subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=64m', 'pcow-test', pool], check=True)
        self.addCleanup(subprocess.run, ['umount', '-l', pool], check=True)
        image = pool / 'vm.pcow'
        tree = self.directory / 'tree'
        tree.mkdir()
        (tree / 'data').write_bytes(b'\x5a' * 32 * images.MIB)
        linux_guest.make_file_system(self.directory, tree, pool / 'base.pcow')
        backend.tool('pcow-img', 'create', '-q', '-b', pool / 'base.pcow', image)
        with linux_guest.LinuxGuest(
            self.kernel, self.directory, *backend.backend(image, ',pcow-full=fail')
        ) as guest:
            self.assertEqual('fail', guest.query()['full-policy'])
            guest.run('mount -t ext4 -o dax=always /dev/pmem0 /mnt')
            # The guest's kernel does not survive a store of its own that fails: what it will write
            # has its pages by now.
            guest.run('touch /mnt/data; sync')
            # often, as a machine check that comes in the handler of the guest's timer is the end of
            # it
            text = guest.run('dmesg -n 1; store-pages /mnt/data 200')
            self.assertRegex(text, r'failed at \d+\nstopped\nfirst page: 0x77')
            full = guest.monitor.wait_event('PCOW_POOL_FULL')
            self.assertEqual(('mem0', 'fail'), (full['id'], full['policy']))
            guest.monitor.run('stop')
            guest.monitor.run('cont')
            self.assertIn('alive', guest.run('sync; echo alive'))
            subprocess.run(['mount', '-o', 'remount,size=128m', pool], check=True)
            guest.run('dd if=/mnt/data of=/tmp/copy bs=1M count=1')
            guest.quit()
        self.assertEqual(0, guest.process.returncode)
        backend.tool('pcow-img', 'check', image)
