# SPDX-License-Identifier: Apache-2.0
"""The end of a live migration at its destination: two images, which are the VM's together, or not
at all.
"""

from __future__ import annotations

from pathlib import Path
import signal
from typing import Any

from tests.functional import images
from tests.functional import migration_wire
from tests.functional import qemu
from tests.functional import test_live_migration
from tests.functional import test_qemu_backend
from tests.functional import vm_state

MARK = '.arriving'
NAMES = ('first.pcow', 'second.pcow')
LATE_DEVICE = ('-device', 'i6300esb')  # its state comes after all images


class ArrivalTestCase(test_live_migration.MigrationTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.image.unlink()
        self.copy_base(self.there)
        self.sources, self.targets = (
            [self.create_on_base(host / name) for name in NAMES] for host in (self.here, self.there)
        )

    def create_on_base(self, path: Path) -> Path:
        return self.create(str(path.relative_to(self.directory)), None, '-b', self.base.name)

    def run_two(self, paths: list[Path], *more: str) -> vm_state.Vm:
        devices = [
            argument
            for index, path in enumerate(paths)
            for argument in (
                '-object',
                f'memory-backend-file,id=mem{index},mem-path={path},share=on',
                '-device',
                f'nvdimm,id=nv{index},memdev=mem{index}',
            )
        ]
        return vm_state.Vm(paths[0].parent, *devices, *more)

    def receive_two(self, *more: str, uri: str | None = None) -> vm_state.Vm:
        return self.run_two(
            self.targets, '-incoming', uri or f'unix:{self.directory}/migration', *more
        )

    def models(self) -> list[test_live_migration.Model]:
        return [test_live_migration.Model(index + 1, f'nv{index}') for index in range(2)]

    def store(self, vm: vm_state.Vm, models: list[test_live_migration.Model]) -> None:
        for model in models:
            model.store(vm, 300)

    def assert_here(self, vm: vm_state.Vm, models: list[test_live_migration.Model]) -> None:
        """The VM runs in this QEMU, has all that was stored, and goes on."""
        self.assertEqual('running', vm.wait_status('running'))
        for _ in range(2):
            for model in models:
                self.assert_holds(vm, model)
            self.store(vm, models)

    def assert_marked(self) -> None:
        for path in self.targets:
            self.assertEqual([MARK], self.names(path), path)
            self.assertIn(
                'has not arrived: the VM is where it was',
                qemu.refused(*test_qemu_backend.backend(path)),
            )

    def assert_unmarked(self) -> None:
        self.assertEqual([[], []], [self.names(path) for path in self.targets])

    def make_anew(self) -> None:
        """What the messages tell to do."""
        for path in self.targets:
            path.unlink()
            self.create_on_base(path)


class TogetherTest(ArrivalTestCase):
    def migrate_well(
        self, source: vm_state.Vm, models: list[test_live_migration.Model], *more: str
    ) -> None:
        with self.receive_two(*more) as destination:
            self.migrate(source)
            self.assertEqual('completed', self.wait(source)['status'])
            self.assert_unmarked()
            self.assert_here(destination, models)
            destination.quit()
        source.quit()
        self.assert_clean(*self.sources, *self.targets)

    def fails(self, source: vm_state.Vm, expected: str) -> None:
        with self.receive_two() as destination:
            self.migrate(source)
            self.assertEqual('failed', self.wait(source)['status'])
            self.assertNotEqual(0, destination.process.wait(test_live_migration.SECONDS))
            assert destination.process.stderr is not None
            self.assertIn(expected, destination.process.stderr.read())

    def test_device_fails_after_the_images(self) -> None:
        """Complete as they are, they are not the VM's; the next migration refuses them, until they
        are made anew.
        """
        models = self.models()
        with self.run_two(self.sources, *LATE_DEVICE) as source:
            self.store(source, models)
            self.fails(source, 'i6300esb')
            self.assert_marked()
            self.assert_here(source, models)
            self.fails(source, 'holds data')
            self.assert_marked()
            self.make_anew()
            self.migrate_well(source, models, *LATE_DEVICE)

    def test_one_image_fails_after_the_other(self) -> None:
        """Its mark could not be taken off, as an image stands on it: the other one keeps
        its own.
        """
        models = self.models()
        for path in self.targets:
            self.img('snapshot', '-c', MARK, path)
        fork = self.create('there/fork.pcow', None, '-b', NAMES[1], '-o', f'base_snapshot={MARK}')
        with self.run_two(self.sources) as source:
            self.store(source, models)
            self.fails(source, str(fork.name))
            fork.unlink()
            self.assert_marked()
            self.assert_here(source, models)
            self.make_anew()
            self.migrate_well(source, models)

    def shared_disk(self) -> tuple[str, ...]:
        path = self.directory / 'disk0.qcow2'
        vm_state.run('qemu-img', 'create', '-q', '-f', 'qcow2', path, '1M')
        return vm_state.carrier_arguments(path)

    def bitmap(self, vm: vm_state.Vm) -> dict[str, Any]:
        (node,) = [
            node for node in vm.qmp('query-named-block-nodes') if node['node-name'] == 'disk0'
        ]
        (bitmap,) = node['dirty-bitmaps']
        return dict(bitmap)

    def ends_at_the_end(self, *more: str, end: migration_wire.End, expected: str) -> None:
        """The destination has the whole VM, and the images are marked; what happens then keeps it
        from running there.

        Nor has it changed the disk that both have.
        """
        models, disk = self.models(), self.shared_disk()
        wire = migration_wire.Wire(self.directory / 'wire', self.directory / 'migration')
        with (
            wire,
            self.run_two(self.sources, *disk) as source,
            self.receive_two(*disk, *more) as destination,
        ):
            self.store(source, models)
            source.qmp('block-dirty-bitmap-add', node='disk0', name='backup', persistent=True)
            source.write_disk(1)
            bitmap = self.bitmap(source)
            self.migrate(source, to='wire')
            self.assertTrue(wire.at_the_end.wait(test_live_migration.SECONDS))
            self.assertEqual('inmigrate', destination.status())
            self.assertEqual([[MARK], [MARK]], [self.names(path) for path in self.targets])
            self.assertIn(
                'has not arrived',
                destination.qmp_error('pcow-snapshot-delete', id='mem0', name=MARK),
            )
            fork = None
            if end is migration_wire.End.PASSED:
                fork = self.create(
                    'there/fork.pcow', None, '-b', NAMES[1], '-o', f'base_snapshot={MARK}'
                )
            wire.go_on(end, destination.process)
            self.assertEqual('failed', self.wait(source)['status'])
            if end is migration_wire.End.GIVEN_UP:
                wire.wait()
                destination.process.send_signal(signal.SIGCONT)
            self.assertEqual(1, destination.process.wait(test_live_migration.SECONDS))
            assert destination.process.stderr is not None
            self.assertIn(
                f'the VM does not start here, but goes on where it was: {expected}',
                destination.process.stderr.read(),
            )
            if fork is not None:
                fork.unlink()
            self.assert_marked()
            self.assert_here(source, models)
            self.assertEqual(bitmap, self.bitmap(source))
            source.quit()
        self.assert_clean(*self.sources)

    def test_connection_breaks_at_the_end(self) -> None:
        """The source takes that for a failure: nowhere else may the VM run."""
        for more in ((), ('-S',)):
            self.ends_at_the_end(
                *more, end=migration_wire.End.CUT, expected='the connection broke when all was here'
            )
            self.make_anew()

    def test_source_that_gives_up_at_the_end(self) -> None:
        """All has come, but nobody waits for the answer."""
        for more in ((), ('-S',)):
            self.ends_at_the_end(
                *more,
                end=migration_wire.End.GIVEN_UP,
                expected='the connection broke when all was here',
            )
            self.make_anew()

    def test_mark_that_stays_at_the_end(self) -> None:
        """The first image had lost its own by then, and gets it back."""
        for more in ((), ('-S',)):
            self.ends_at_the_end(
                *more,
                end=migration_wire.End.PASSED,
                expected=f"{self.targets[1]}: 1 image stands on snapshot '{MARK}'",
            )
            self.make_anew()

    def test_destination_that_stays(self) -> None:
        """With exit-on-error off: it has images of which nothing is the VM's."""
        models = self.models()
        with self.run_two(self.sources, *LATE_DEVICE) as source:
            self.store(source, models)
            with self.receive_two(uri='defer') as destination:
                destination.qmp(
                    'migrate-incoming', uri=f'unix:{self.directory}/migration', exit_on_error=False
                )
                self.migrate(source)
                self.assertEqual('failed', self.wait(source)['status'])
                self.assertEqual('failed', self.wait(destination)['status'])
                destination.qmp('cont')
                self.assertEqual('inmigrate', destination.status())
                self.assertIn(
                    'has not arrived',
                    destination.qmp_error('pcow-snapshot-create', id='mem0', name='mine'),
                )
                destination.quit()
            self.assert_marked()
            self.assert_here(source, models)

    def test_not_started_there(self) -> None:
        """As libvirt does it: the VM runs at a command only, but the source may be gone before."""
        models = self.models()
        with self.run_two(self.sources) as source:
            self.store(source, models)
            with self.receive_two('-S', uri='defer') as destination:
                destination.qmp('migrate-incoming', uri=f'unix:{self.directory}/migration')
                self.migrate(source)
                self.assertEqual('completed', self.wait(source)['status'])
                self.assert_unmarked()
                source.quit()
                self.assertEqual('paused', destination.wait_status('paused'))
                destination.qmp('cont')
                self.assert_here(destination, models)
                destination.quit()
        self.assert_clean(*self.targets)

    def test_without_a_return_path(self) -> None:
        """The source does not wait for the destination to have it all: the marks are off when the
        VM runs there.
        """
        models = self.models()
        with self.run_two(self.sources) as source, self.receive_two() as destination:
            self.store(source, models)
            source.qmp('migrate', uri=f'unix:{self.directory}/migration')
            self.assertEqual('completed', self.wait(source)['status'])
            self.assert_here(destination, models)
            self.assert_unmarked()
            destination.quit()


class CommandsTest(ArrivalTestCase):
    def refuse(self, vm: vm_state.Vm, commands: dict[str, dict[str, Any]], message: str) -> None:
        for command, arguments in commands.items():
            self.assertIn(
                message, vm.qmp_error(f'pcow-snapshot-{command}', id='mem0', **arguments), command
            )

    def refuse_all(self, vm: vm_state.Vm) -> None:
        self.refuse(
            vm,
            {
                'create': {'name': 'mine'},
                'revert': {'name': MARK},
                'delete': {'name': MARK},
                'rename': {'name': MARK, 'new-name': 'mine'},
            },
            'the VM is being migrated to here, and has not arrived',
        )
        # Of disks that wait to be taken over QEMU itself says so, and may look at them first
        for job, name in ((vm.save, 'new'), (vm.load, 'of before'), (vm.delete, 'of before')):
            self.assertRegex(job(name), 'has not arrived|writable but does not support snapshots')

    def carrier(self, host: Path) -> tuple[str, ...]:
        """A disk with the state of a VM that had no images."""
        path = host / 'disk0.qcow2'
        vm_state.run('qemu-img', 'create', '-q', '-f', 'qcow2', path, '1M')
        arguments = vm_state.carrier_arguments(path)
        with vm_state.Vm(host, *arguments) as vm:
            self.assertEqual('', vm.save('of before'))
            vm.quit()
        return arguments

    def test_while_it_arrives(self) -> None:
        """Before, meanwhile and, of the names that a migration gives, always."""
        models = self.models()
        with self.run_two(self.sources, *self.carrier(self.here)) as source:
            self.store(source, models)
            with self.receive_two(*self.carrier(self.there)) as destination:
                self.refuse_all(destination)
                self.migrate(source, max_bandwidth=128 * images.KIB)
                while not (names := self.names(self.targets[0])):
                    self.assertIn(source.qmp('query-migrate')['status'], ('setup', 'active'))
                self.assertEqual([MARK], names)
                self.refuse_all(destination)
                self.assertEqual('active', source.qmp('query-migrate')['status'])
                self.refuse_all(destination)
                source.qmp('migrate-set-parameters', **{'max-bandwidth': 1 << 40})
                self.assertEqual('completed', self.wait(source)['status'])
                self.assert_here(destination, models)
                self.assert_unmarked()
                for name in (MARK, '.migrating-3'):
                    self.refuse(
                        destination,
                        {
                            'revert': {'name': name},
                            'delete': {'name': name},
                            'rename': {'name': name, 'new-name': 'mine'},
                        },
                        'belongs to a live migration',
                    )
                destination.qmp('pcow-snapshot-create', id='mem0', name='mine')
                destination.qmp('pcow-snapshot-delete', id='mem0', name='mine')
                destination.quit()
            source.quit()
        self.assert_clean(*self.sources, *self.targets)
