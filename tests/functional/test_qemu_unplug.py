# SPDX-License-Identifier: Apache-2.0
"""A vCPU that is unplugged under KVM while a store of it waits for space in the pool."""

import contextlib
from pathlib import Path
import subprocess
import time

from tests.functional import images
from tests.functional import qemu
from tests.functional import test_qemu_backend as backend
from tests.functional import vm_state

FIRMWARE = Path(__file__).parent / 'guest' / 'two-cpus.S'
SIZE = 128 * images.MIB  # of the RAM of qemu.Qemu
PLACE = 0x50000  # where the second CPU stores to
CPU = (
    '-smp',
    '1,maxcpus=2,sockets=2',
    '-device',
    'qemu64-x86_64-cpu,id=cpu1,socket-id=1,core-id=0,thread-id=0',
)
SELECTOR, COMMAND, EJECT = 0xCD8, 0xCDC, 8  # docs/specs/acpi_cpu_hotplug.rst of QEMU
WAITS = 'a vCPU has a store to do that waits for space'


class UnplugTest(backend.PoolTest):
    def firmware(self) -> Path:
        part, whole = self.directory / 'firmware.o', self.directory / 'firmware'
        subprocess.run(['as', '--32', '-o', part, FIRMWARE], check=True)
        subprocess.run(
            ['ld', '-m', 'elf_i386', '-Ttext', '0', '--oformat', 'binary', '-o', whole, part],
            check=True,
        )
        return whole

    def fill_pool(self, vm: qemu.Qemu) -> None:
        with (self.pool / 'neighbour').open('wb', 0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        for at in range(images.MIB, 32 * images.MIB, 16384):
            vm.write(at, b'x')

    def wait_for_store(self, vm: qemu.Qemu) -> None:
        end = time.monotonic() + qemu.START_SECONDS
        while not vm.qmp('query-pcow')[0]['stats']['pool-full-waits']:
            self.assertLess(time.monotonic(), end)
            time.sleep(0.05)

    def test_store_that_waits(self) -> None:
        """Nobody waits for it any more: the state of the VM can be saved."""
        if not Path('/dev/kvm').exists():
            self.skipTest('the store is one that KVM leaves to QEMU, and there is no KVM')
        image, disk = self.pool / 'ram.pcow', self.directory / 'disk.qcow2'
        backend.tool('pcow-img', 'create', '-q', image, SIZE)
        vm_state.run('qemu-img', 'create', '-q', '-f', 'qcow2', disk, '16M')
        memory = (
            '-object',
            f'memory-backend-file,id=mem0,mem-path={image},share=on,size={SIZE}',
            '-machine',
            'memory-backend=mem0',
            '-bios',
            str(self.firmware()),
            '-S',
        )
        with vm_state.Vm(
            self.directory, *memory, *CPU, *vm_state.carrier_arguments(disk), accel='kvm'
        ) as vm:
            vm.write(PLACE, b'frozen')
            vm.qmp('pcow-snapshot-create', id='mem0', name='before')
            self.fill_pool(vm)
            vm.qmp('cont')
            self.wait_for_store(vm)
            vm.qmp('stop')
            self.assertIn(WAITS, vm.save('refused'))
            vm.qmp('cont')
            vm.ask(f'outl {SELECTOR:#x} 0')  # not the interface of old machines
            vm.qmp('device_del', id='cpu1')
            vm.ask_together(f'outl {SELECTOR:#x} 1', f'outb {COMMAND:#x} {EJECT}')
            self.assertEqual(1, len(vm.qmp('query-cpus-fast')))
            (self.pool / 'neighbour').unlink()
            self.grow()
            self.assertEqual('', vm.save('saved'))
            self.assertEqual(b'frozen', vm.read(PLACE, 6))
            vm.quit()
        backend.tool('pcow-img', 'check', image)
