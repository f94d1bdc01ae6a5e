# SPDX-License-Identifier: Apache-2.0
"""What survives: the flush of virtio-pmem, what the backend promises, and which promise it refuses
to make.

A power failure is a copy of the disk's bytes at that moment: the pool is a file system on a loop
device.
"""

import json
import os
from pathlib import Path
import shutil
import subprocess

from tests.functional import images
from tests.functional import linux_guest
from tests.functional import qemu
from tests.functional import test_qemu_backend as backend
from tests.functional import test_qemu_errors as errors
from tests.functional import virtio

SLOT = 7
DISK_SIZE = 192 * images.MIB
VIRTIO_PMEM = ('-device', f'virtio-pmem-pci,memdev=mem0,id=nv0,addr={SLOT}')


def image_of(path: Path) -> tuple[str, ...]:
    return ('-object', f'memory-backend-file,id=mem0,mem-path={path},share=on')


class DiskTestCase(backend.QemuTestCase):
    """A pool of class page-cache: ext4 on a disk that is a file in DRAM."""

    def setUp(self) -> None:
        super().setUp()
        self.disk = self.directory / 'disk'
        self.pool = self.mount(self.disk, 'pool', make=True)
        self.image = self.pool / 'vm.pcow'

    def mount(self, disk: Path, name: str, make: bool = False) -> Path:
        if make:
            with disk.open('wb') as file:
                file.truncate(DISK_SIZE)
            subprocess.run(['mkfs.ext4', '-q', '-E', 'lazy_itable_init=0', disk], check=True)
        place = self.directory / name
        place.mkdir()
        subprocess.run(['mount', '-o', 'loop', disk, place], check=True)
        self.addCleanup(subprocess.run, ['umount', '-l', place], check=True)
        return place

    def after_power_failure(self, name: str) -> Path:
        """The pool as the disk has it now, the journal recovered."""
        copy = self.directory / f'{name}.disk'
        shutil.copyfile(self.disk, copy)
        return self.mount(copy, name)


class VirtioPmemTest(DiskTestCase):
    def holds(self, pool: Path, offset: int, expected: bytes) -> bool:
        done = subprocess.run(
            [
                images.program('pcow-io'),
                '-r',
                '-c',
                f'read -P {expected[0]:#x} {offset} {len(expected)}',
                pool / 'vm.pcow',
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode == 0 and 'verification failed' not in (done.stdout + done.stderr)

    def test_flush_reaches_the_disk(self) -> None:
        base = self.pool / 'base.pcow'
        backend.tool('pcow-img', 'create', '-q', base, backend.SIZE)
        backend.tool('pcow-io', '-c', f'write -q -P 0x5a 0 {8 * images.MIB}', base)
        backend.tool('pcow-img', 'seal', base)
        backend.tool('pcow-img', 'create', '-q', '-b', base, self.image)
        os.sync()
        stores = {
            0: b'\x11' * 4096,
            5 * images.MIB + 100: b'\x22' * 5000,
            20 * images.MIB: b'\x33' * 65536,
        }
        with qemu.Qemu(self.directory, *image_of(self.image), *VIRTIO_PMEM) as vm:
            pmem = virtio.Pmem(vm, SLOT)
            address, size = pmem.place()
            self.assertEqual((vm.address('nv0'), backend.SIZE), (address, size))
            for offset, data in stores.items():
                vm.write(address + offset, data)
            # the control: without a flush it is not there, or the copy would prove nothing
            before = self.after_power_failure('before')
            self.assertFalse(
                all(self.holds(before, offset, data) for offset, data in stores.items())
            )
            (info,) = vm.qmp('query-pcow')
            self.assertEqual('signal', info['engine'])  # of this class of pools, without KVM
            flushes = info['stats']['flushes']
            self.assertEqual(0, pmem.flush())
            (info,) = vm.qmp('query-pcow')
            self.assertEqual(flushes + 1, info['stats']['flushes'])
            self.assertEqual(
                {
                    'front-end': 'virtio-pmem',
                    'promise': 'durable',
                    'guest-flush': ['process-crash', 'host-crash', 'power-loss'],
                    'host-flush': ['process-crash', 'host-crash', 'power-loss'],
                },
                info['durability'],
            )
            after = self.after_power_failure('after')
            for offset, data in stores.items():
                self.assertTrue(self.holds(after, offset, data), offset)
            # on top of a snapshot, and again in the same pages
            vm.qmp('pcow-snapshot-create', id='mem0', name='s')
            vm.write(address, b'\x44' * 4096)
            self.assertEqual(0, pmem.flush())
            vm.write(address + 4096, b'\x55' * 4096)
            self.assertEqual(0, pmem.flush())
            after = self.after_power_failure('again')
            self.assertTrue(self.holds(after, 0, b'\x44' * 4096))
            self.assertTrue(self.holds(after, 4096, b'\x55' * 4096))
            vm.process.kill()
            vm.process.wait()
        for pool in (after, self.pool):
            errors.check_after_kill(pool / 'vm.pcow')
            self.assertTrue(self.holds(pool, 0, b'\x44' * 4096))

    def test_the_qmp_command_does_the_same(self) -> None:
        backend.tool('pcow-img', 'create', '-q', self.image, backend.SIZE)
        os.sync()
        with qemu.Qemu(self.directory, *image_of(self.image), *VIRTIO_PMEM) as vm:
            vm.write(vm.address('nv0') + 12345, b'\x66' * 300)
            vm.qmp('pcow-flush', id='mem0')
            after = self.after_power_failure('after')
            vm.quit()
        self.assertTrue(self.holds(after, 12345, b'\x66' * 300))

    def test_volatile_pool_says_so(self) -> None:
        image = self.directory / 'dram.pcow'
        backend.tool('pcow-img', 'create', '-q', image, backend.SIZE)
        with qemu.Qemu(self.directory, *image_of(image), *VIRTIO_PMEM) as vm:
            pmem = virtio.Pmem(vm, SLOT)
            vm.write(vm.address('nv0'), b'stays')
            self.assertEqual(0, pmem.flush())
            (info,) = vm.qmp('query-pcow')
            self.assertEqual(
                {
                    'front-end': 'virtio-pmem',
                    'promise': 'volatile',
                    'guest-flush': ['process-crash'],
                    'host-flush': ['process-crash'],
                },
                info['durability'],
            )
            vm.process.kill()
            vm.process.wait()
        self.assertIn('stays', backend.tool('pcow-io', '-r', '-c', 'read -v 0 16', image))


class GuestTest(DiskTestCase):
    """A Linux guest with a DAX file system on virtio-pmem: fsync is a promise."""

    def read_file(self, pool: Path, offset: int, name: str) -> bytes:
        raw, place = self.directory / 'raw', self.directory / 'inside'
        backend.tool('pcow-img', 'convert', '-O', 'raw', pool / 'vm.pcow', raw)
        place.mkdir()
        subprocess.run(['mount', '-o', f'loop,ro,offset={offset}', raw, place], check=True)
        try:
            return (place / name).read_bytes()
        finally:
            subprocess.run(['umount', place], check=True)

    def test_fsync_reaches_the_disk_of_the_host(self) -> None:
        kernel = linux_guest.Kernel()
        self.addCleanup(kernel.close)
        tree = self.directory / 'tree'
        tree.mkdir()
        (tree / 'file').write_bytes(b'old' * 10000)
        offset = linux_guest.make_file_system(self.directory, tree, self.pool / 'base.pcow', '24M')
        backend.tool('pcow-img', 'create', '-q', '-b', self.pool / 'base.pcow', self.image)
        os.sync()
        with linux_guest.LinuxGuest(
            kernel, self.directory, *image_of(self.image), *VIRTIO_PMEM
        ) as guest:
            self.assertEqual('durable', guest.query()['durability']['promise'])
            guest.run('mount -t ext4 -o dax=always /dev/pmem0 /mnt')
            self.assertIn('dax=always', guest.run('grep /mnt /proc/mounts'))
            before = guest.query()['stats']['flushes']
            guest.run(
                'echo written by the guest > /tmp/text && dd if=/tmp/text of=/mnt/file conv=fsync'
            )
            self.assertGreater(guest.query()['stats']['flushes'], before)
            after = self.after_power_failure('after')
            guest.process.kill()
            guest.process.wait()
        self.assertEqual(b'written by the guest\n', self.read_file(after, offset, 'file'))


class PromiseTest(DiskTestCase):
    def setUp(self) -> None:
        super().setUp()
        backend.tool('pcow-img', 'create', '-q', self.image, backend.SIZE)

    def test_nvdimm_on_page_cache_is_refused(self) -> None:
        message = qemu.refused(*image_of(self.image), *backend.DEVICE)
        for word in ('nvdimm', 'vm.pcow', 'host', 'virtio-pmem', 'pcow-volatile=on', 'unarmed=on'):
            self.assertIn(word, message)

    def promise(self, *device: str) -> dict[str, object]:
        with qemu.Qemu(self.directory, *image_of(self.image), *device) as vm:
            (info,) = vm.qmp('query-pcow')
            self.assertEqual('page-cache', info['persistence'])
            vm.quit()
        return dict(info['durability'])

    def test_unless_the_user_asked_for_it(self) -> None:
        process = ['process-crash']
        everything = ['process-crash', 'host-crash', 'power-loss']
        self.assertEqual(
            {
                'front-end': 'nvdimm',
                'promise': 'volatile',
                'guest-flush': process,
                'host-flush': everything,
            },
            self.promise('-device', 'nvdimm,memdev=mem0,id=nv0,pcow-volatile=on'),
        )
        # as libvirt can be told to pass it on
        self.assertEqual(
            'volatile',
            self.promise('-global', 'nvdimm.pcow-volatile=on', *backend.DEVICE)['promise'],
        )
        self.assertEqual(
            'read-only', self.promise('-device', 'nvdimm,memdev=mem0,id=nv0,unarmed=on')['promise']
        )
        # plain memory promises nothing
        self.assertEqual(
            {
                'front-end': 'pc-dimm',
                'promise': 'volatile',
                'guest-flush': process,
                'host-flush': everything,
            },
            self.promise('-device', 'pc-dimm,memdev=mem0,id=nv0'),
        )

    def test_nvdimm_in_dram_is_not(self) -> None:
        image = self.directory / 'dram.pcow'
        backend.tool('pcow-img', 'create', '-q', image, backend.SIZE)
        with qemu.Qemu(self.directory, *image_of(image), *backend.DEVICE) as vm:
            (info,) = vm.qmp('query-pcow')
            self.assertEqual(
                ('volatile', 'volatile'), (info['persistence'], info['durability']['promise'])
            )
            self.assertEqual('wait', info['full-policy'])
            vm.quit()

    def test_pcow_img_says_it_too(self) -> None:
        text = backend.tool('pcow-img', 'info', self.image)
        self.assertIn('stored data survives: process-crash\n', text)
        # which of the two shows it to a guest, the file does not know
        self.assertIn('flushed data survives, nvdimm: process-crash\n', text)
        self.assertIn(
            'flushed data survives, virtio-pmem: process-crash, host-crash, power-loss\n', text
        )
        found = json.loads(backend.tool('pcow-img', 'info', '--output=json', self.image))[
            'format-specific'
        ]['data']
        self.assertEqual(
            (['process-crash', 'host-crash', 'power-loss'], ['process-crash']),
            (found['flushed-survives'], found['nvdimm-flushed-survives']),
        )
        image = self.directory / 'dram.pcow'
        backend.tool('pcow-img', 'create', '-q', image, backend.SIZE)
        found = json.loads(backend.tool('pcow-img', 'info', '--output=json', image))[
            'format-specific'
        ]['data']
        self.assertEqual(
            [['process-crash']] * 3,
            [
                found[key]
                for key in ('stored-survives', 'flushed-survives', 'nvdimm-flushed-survives')
            ],
        )
        self.assertIn(
            'flushed data survives: process-crash\n', backend.tool('pcow-img', 'info', image)
        )
