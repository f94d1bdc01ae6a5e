# SPDX-License-Identifier: Apache-2.0
"""A memory backend on a pcow image after it was opened: properties set later, a QEMU that leaves
its directory, its end.
"""

import contextlib
import os
from pathlib import Path
import signal
import subprocess
import time
from unittest import mock

from tests.functional import images
from tests.functional import qemu
from tests.functional import qmp
from tests.functional import test_live_migration
from tests.functional import test_qemu_backend as backend
from tests.functional import vm_state

_DUMPED = 256 * images.MIB


class PropertyTest(backend.QemuTestCase):
    def test_prealloc_is_ignored_later_as_well(self) -> None:
        """It would copy the whole base, and wait for ever in a full pool."""
        self.overlay()
        with qemu.Qemu(self.directory, *backend.backend(self.image)) as vm:
            vm.qmp('qom-set', path='/objects/mem0', property='prealloc', value=True)
            self.assertIs(False, vm.qmp('qom-get', path='/objects/mem0', property='prealloc'))
            (info,) = vm.qmp('query-pcow')
            self.assertLess(info['data-size'], images.MIB)
            vm.quit()

    def test_nodes_without_a_policy(self) -> None:
        backend.tool('pcow-img', 'create', '-q', self.image, backend.SIZE)
        for options in (',host-nodes=0', ',host-nodes=0,policy=bind', ',policy=bind'):
            with qemu.Qemu(self.directory, *backend.backend(self.image, options)) as vm:
                vm.quit()
                assert vm.process.stderr is not None
                self.assertIn(
                    'host-nodes and policy are ignored', vm.process.stderr.read(), options
                )


class EndTest(backend.QemuTestCase):
    def test_dump_that_goes_on(self) -> None:
        """Its thread loads from the image until the process is gone."""
        backend.tool('pcow-img', 'create', '-q', self.image, _DUMPED)
        backend.tool('pcow-io', '-c', f'write -q -P 0x5a 0 {_DUMPED}', self.image)
        for _ in range(3):
            with qemu.Qemu(
                self.directory,
                '-object',
                f'memory-backend-file,id=mem0,mem-path={self.image},share=on',
                '-machine',
                'memory-backend=mem0',
                '-m',
                f'{_DUMPED // images.MIB}M',
            ) as vm:
                vm.qmp(
                    'dump-guest-memory',
                    paging=False,
                    protocol=f'file:{self.directory}/core',
                    detach=True,
                )
                while vm.qmp('query-dump')['completed'] < _DUMPED // 4:
                    pass
                vm.quit()
                self.assertEqual(0, vm.process.returncode)
            backend.tool('pcow-img', 'check', self.image)


class NoCpuTest(backend.QemuTestCase):
    def test_revert(self) -> None:
        """There is no code that was translated from the image."""
        backend.tool('pcow-img', 'create', '-q', self.image, backend.SIZE)
        socket = self.directory / 'qmp.sock'
        process = subprocess.Popen(
            [
                images.program('qemu-system-x86_64'),
                '-machine',
                'none',
                '-accel',
                'tcg',
                '-S',
                '-nodefaults',
                '-no-user-config',
                '-display',
                'none',
                '-qmp',
                f'unix:{socket},server=on,wait=off',
                *backend.backend(self.image)[:2],
            ],
            stdin=subprocess.DEVNULL,
        )
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        with contextlib.closing(qmp.Qmp(qmp.connect(socket, process))) as monitor:
            monitor.run('pcow-snapshot-create', id='mem0', name='s')
            monitor.run('pcow-snapshot-revert', id='mem0', name='s')
            monitor.run('quit')
        self.assertEqual(0, process.wait(qmp.START_SECONDS))


class DirectoryTest(test_live_migration.MigrationTestCase):
    """QEMU leaves its directory with -daemonize."""

    def setUp(self) -> None:
        super().setUp()
        self.pid_file = self.directory / 'pid'
        self.addCleanup(self.kill_daemon)

    def kill_daemon(self) -> None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int(self.pid_file.read_text()), signal.SIGKILL)

    def daemon(self) -> vm_state.Vm:
        relative = Path(os.path.relpath(self.image))
        return vm_state.Vm(
            self.here, *backend.backend(relative), '-daemonize', '-pidfile', str(self.pid_file)
        )

    def test_relative_path(self) -> None:
        """Whatever looks for the image by its name goes on: the look at the pool, and a
        migration.
        """
        target = self.prepare_there()
        with self.daemon() as source, self.receive(target) as destination:
            (info,) = source.qmp('query-pcow')
            self.assertEqual([str(self.image.resolve()), str(self.base.resolve())], info['chain'])
            self.assertEqual(str(self.image.resolve()), info['filename'])
            source.qmp('qom-set', path='/objects/mem0', property='pcow-low', value=100)
            self.assertTrue(source.wait_event('PCOW_POOL_LOW')['low'])
            source.write(source.address('nv0'), b'here')
            self.migrate(source)
            self.assertEqual('completed', self.wait(source)['status'])
            self.assertEqual('running', destination.wait_status('running'))
            self.assertEqual(b'here', destination.read(destination.address('nv0'), 4))
            source.quit()
            destination.quit()

    def test_renamed_image(self) -> None:
        """The look at the pool goes on."""
        with self.run_vm(self.image) as vm:
            self.image.rename(self.here / 'elsewhere.pcow')
            vm.qmp('qom-set', path='/objects/mem0', property='pcow-low', value=100)
            self.assertTrue(vm.wait_event('PCOW_POOL_LOW')['low'])
            vm.quit()

    def test_pool_that_cannot_be_looked_at(self) -> None:
        """It is said once."""
        stale = qemu.preload(self.directory, 'stale_pool.c')
        vm = self.run_vm(self.image)
        with contextlib.ExitStack() as stack:
            with mock.patch.dict(os.environ, stale):
                stack.enter_context(vm)
            time.sleep(3)
            vm.quit()
            assert vm.process.stderr is not None
            self.assertEqual(
                1, vm.process.stderr.read().count('free space of its pool cannot be looked at')
            )
