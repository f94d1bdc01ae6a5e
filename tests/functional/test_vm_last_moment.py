# SPDX-License-Identifier: Apache-2.0
"""The last moment of a VM whose pool is full to the last block: what its checkpoint needs is kept
for that, and nobody else gets it.
"""

import contextlib
import os
from pathlib import Path
import signal
import subprocess
import time
from typing import Any

from tests.functional import checkpoint_case
from tests.functional import images
from tests.functional import test_vm_at_signal
from tests.functional import virtio
from tests.functional import vm_state

PREFIX = test_vm_at_signal.PREFIX
SECONDS = 60
NO_SPACE = 'No space left'
UNUSED = vm_state.RAM + 32 * images.MIB  # RAM that nobody looks at
VOLATILE = ('-global', 'nvdimm.pcow-volatile=on')  # whatever the pool is on


class LastMomentTestCase(checkpoint_case.CheckpointTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.pool = self.directory / 'pool'
        self.pool.mkdir()

    def mount(self, make: str = '') -> None:
        """:param make: of a file system on a disk; '': a tmpfs"""
        if make:
            disk = self.directory / 'disk'
            with disk.open('wb') as file:
                file.truncate(160 * images.MIB)
            subprocess.run([*make.split(), disk], check=True)
            words: tuple[str | Path, ...] = ('-o', 'loop', disk)
        else:
            words = ('-t', 'tmpfs', '-o', 'size=96m', 'pcow-test')
        subprocess.run(['mount', *map(str, words), self.pool], check=True)
        self.addCleanup(subprocess.run, ['umount', '-l', str(self.pool)], check=True)
        self.image, self.ram = self.pool / 'vm.pcow', self.pool / 'ram.pcow'
        vm_state.run('pcow-img', 'create', '-q', self.image, checkpoint_case.SIZE)
        vm_state.run('pcow-img', 'create', '-q', self.ram, checkpoint_case.RAM_SIZE)

    @property
    def filler(self) -> Path:
        return self.pool / 'filler'

    def _fill(self) -> None:
        with self.filler.open('ab', buffering=0) as file:
            for size in (1 << 20, 4096, 512):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)):
                        pass
            end = file.seek(0, os.SEEK_END)
            with contextlib.suppress(OSError):
                while True:
                    os.posix_fallocate(file.fileno(), end, 1024)
                    end += 1024
            os.fsync(file.fileno())

    def fill(self, vm: vm_state.Vm) -> None:
        """To the last block, with what QEMU had prepared and gives back then."""
        offset, full = 0, 0
        places = (UNUSED, vm.address('nv0') + 16 * images.MIB)
        while full < 3:
            self._fill()
            for place in places:
                vm.write(place + offset, b'full')
            fits = any(vm.read(place + offset, 4) == b'full' for place in places)
            full = 0 if fits else full + 1
            offset += 65536

    def empty(self) -> None:
        self.filler.unlink()

    def infos(self, vm: vm_state.Vm) -> dict[str, dict[str, Any]]:
        return {info['id']: info for info in vm.qmp('query-pcow')}

    def lacks_room(self, vm: vm_state.Vm) -> bool:
        return not all(
            info['spare'] == info['spare-wanted'] > 0 for info in self.infos(vm).values()
        )

    def wait_for_room(self, vm: vm_state.Vm) -> None:
        """All images have what they want."""
        end = time.monotonic() + SECONDS
        while self.lacks_room(vm):
            self.assertLess(time.monotonic(), end, self.infos(vm))
            time.sleep(0.02)

    def arm(self, vm: vm_state.Vm) -> None:
        vm.qmp('pcow-checkpoint-at-signal', prefix=PREFIX)
        self.wait_for_room(vm)

    def end(self, vm: vm_state.Vm) -> str:
        """What QEMU says."""
        vm.process.send_signal(signal.SIGTERM)
        self.assertEqual(0, vm.process.wait(SECONDS))
        return str(vm.process.stderr and vm.process.stderr.read())

    def names(self) -> list[str]:
        found = vm_state.image_names(self.ram)
        self.assertEqual(found, vm_state.image_names(self.image))
        return found

    def assert_goes_on(self, name: str, text: bytes) -> None:
        with self.start('-S', *VOLATILE) as vm:
            self.write(vm, b'x' * len(text))
            self.assertEqual('', vm.load(name))
            self.assert_reads(vm, text)
            vm.quit()
        self.assert_files_clean()


class LastMomentTest(LastMomentTestCase):
    def test_full_pool(self) -> None:
        self.keeps_last_moment('')

    def test_full_ext4(self) -> None:
        self.keeps_last_moment('mkfs.ext4 -q -b 4096')

    def test_full_ext4_of_small_blocks(self) -> None:
        self.keeps_last_moment('mkfs.ext4 -q -b 1024')

    def keeps_last_moment(self, make: str) -> None:
        self.mount(make)
        with self.start(*VOLATILE) as vm:
            self.write(vm, b'first')
            self.arm(vm)
            self.assertEqual('', vm.save('before'))
            self.write(vm, b'kept!')
            self.wait_for_room(vm)
            self.fill(vm)
            said = self.end(vm)
        before, name = self.names()
        self.assertEqual('before', before)
        self.assertIn(f"the last moment of the VM is checkpoint '{name}'", said)
        self.empty()
        self.assert_goes_on(name, b'kept!')

    def test_without_what_is_kept(self) -> None:
        """As it would be."""
        self.mount()
        with self.start() as vm:
            self.write(vm, b'first')
            self.assertEqual('', vm.save('before'))
            vm.qmp('stop')
            self.fill(vm)
            self.assertIn(NO_SPACE, vm.save(f'{PREFIX}x'))
            vm.quit()
        self.assertEqual(['before'], self.names())
        self.empty()
        self.assert_goes_on('before', b'first')

    def test_who_gets_it(self) -> None:
        """Not a guest, nor a checkpoint that is not the last; and it is there again later."""
        self.mount()
        with self.start() as vm:
            self.write(vm, b'first')
            self.arm(vm)
            self.assertEqual('', vm.save('before'))
            self.wait_for_room(vm)
            self.fill(vm)
            vm.write(vm_state.RAM, b'lost')
            self.assertEqual(b'first', vm.read(vm_state.RAM, 5))
            for name in ('mine', f'{PREFIX}1'):
                self.assertIn(NO_SPACE, vm.save(name))
            vm.qmp('stop')
            self.assertIn(NO_SPACE, vm.save('mine'))
            self.assertEqual('', vm.save(f'{PREFIX}2'))
            self.assertLess(self.infos(vm)['ram0']['spare'], self.infos(vm)['ram0']['spare-wanted'])
            self.assertEqual({'before', f'{PREFIX}2'}, set(vm.checkpoints()))
            vm.qmp('cont')
            self.empty()
            self.wait_for_room(vm)
            self.write(vm, b'later')
            self.fill(vm)
            self.end(vm)
        names = self.names()
        self.assertEqual(['before', f'{PREFIX}2'], names[:2])
        self.empty()
        self.assert_goes_on(names[2], b'later')

    def test_device_whose_ring_is_frozen(self) -> None:
        """It stores by a pointer, in the main loop, which would wait for space with all others."""
        self.mount()
        disk = self.directory / 'disk.raw'
        disk.write_bytes(bytes(images.MIB))
        device = (
            '-blockdev',
            f'file,node-name=disk,filename={disk},read-only=on',
            '-device',
            'virtio-blk-pci,drive=disk,addr=6,ioeventfd=off',
        )
        with self.start(*device) as vm:
            self.write(vm, b'kept!')
            block = virtio.Block(vm, 6)
            vm.write(block.scratch, bytes(16))
            area = block.scratch
            block.post([(area, 16)], [(area + 4096, 512), (area + 64, 1)])
            self.arm(vm)
            self.assertEqual('', vm.save('frozen'))
            self.wait_for_room(vm)
            self.fill(vm)
            block.notify()
            block.wait()
            self.assertLess(self.infos(vm)['ram0']['spare'], self.infos(vm)['ram0']['spare-wanted'])
            self.end(vm)
        (name,) = (name for name in self.names() if name != 'frozen')
        self.empty()
        with self.start('-S', *device) as vm:
            self.assertEqual('', vm.load(name))
            self.assert_reads(vm, b'kept!')
            self.assertEqual(b'\1\0', vm.read(block.places[2] + 2, 2))
            vm.quit()
        self.assert_files_clean()

    def test_it_is_given_back(self) -> None:
        self.mount()
        other = self.pool / 'other.pcow'
        vm_state.run('pcow-img', 'create', '-q', other, '4M')
        with self.start() as vm:
            sizes = {name: info['actual-size'] for name, info in self.infos(vm).items()}
            self.arm(vm)
            for name, info in self.infos(vm).items():
                self.assertGreaterEqual(info['actual-size'], sizes[name] + info['spare'])
            vm.qmp(
                'object-add',
                **{'qom-type': 'memory-backend-file', 'id': 'mem1', 'share': True},
                **{'mem-path': str(other), 'size': 4 * images.MIB},
            )
            vm.qmp('device_add', driver='nvdimm', memdev='mem1', id='nv1')
            self.wait_for_room(vm)
            self.assertGreater(self.infos(vm)['mem1']['spare'], 0)
            vm.qmp('pcow-checkpoint-at-signal')
            end = time.monotonic() + SECONDS
            while any(info['spare'] for info in self.infos(vm).values()):
                self.assertLess(time.monotonic(), end)
                time.sleep(0.02)
            for name, info in self.infos(vm).items():
                self.assertEqual(0, info['spare-wanted'])
                if name in sizes:
                    self.assertLess(info['actual-size'], sizes[name] + 2 * images.MIB)
            self.arm(vm)
            vm.quit()
        for path in (self.image, self.ram, other):
            vm_state.run('pcow-img', 'check', path)

    def test_a_pool_that_has_no_room_for_it(self) -> None:
        self.mount()
        with self.start() as vm:
            self.fill(vm)
            vm.qmp('pcow-checkpoint-at-signal', prefix=PREFIX)
            time.sleep(7)
            self.assertEqual(0, self.infos(vm)['ram0']['spare'])
            self.empty()
            self.wait_for_room(vm)
            time.sleep(1.5)
            vm.qmp('pcow-checkpoint-at-signal')
            vm.quit()
            said = str(vm.process.stderr and vm.process.stderr.read())
        for path in (self.image, self.ram):
            for text in ('its pool has no room that could be kept', 'there is room for the last'):
                self.assertEqual(1, said.count(f"'{path}': {text}"), said)
