# SPDX-License-Identifier: Apache-2.0
"""Taking, reverting to and deleting a checkpoint: who is told what."""

from unittest import mock

from pcow_driver.common import exception
from pcow_driver.vm import checkpoint
from pcow_driver.vm import model
from tests.unit.pcow_driver.vm import recorded

WARM = recorded.snapshot(1, 'warm', **{'vm-state-size': 500})


class TakeTest(recorded.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.recorded.replies['pcow-checkpoint-create'] = {
            'pause': 4200000,
            'durable': 5900000,
            'state-size': 336000,
        }

    def test_all_of_it_by_qemu(self) -> None:
        self.assertEqual(
            model.Taken(pause=4200000, durable=5900000, state_size=336000),
            checkpoint.take(self.found, 'warm'),
        )
        self.assertEqual([('pcow-checkpoint-create', {'name': 'warm'})], self.recorded.calls)
        self.assertEqual([], self.logged())

    def test_limit_for_slow_disks(self) -> None:
        checkpoint.take(self.found, 'warm', max_wait=250)
        limited = ('pcow-checkpoint-create', {'name': 'warm', 'max-wait': 250})
        self.assertEqual([limited], self.recorded.calls)

    def test_names(self) -> None:
        for name in ('', 'a\nb', '-x', '.checkpoint-1', '.deleting-1', '.loading-1'):
            self.assertRaises(exception.InvalidName, checkpoint.take, self.found, name)
        self.assertEqual([], self.recorded.calls)

    def test_off(self) -> None:
        self.recorded.active = False
        error = self.assertRaises(exception.DomainInvalid, checkpoint.take, self.found, 'warm')
        self.assertIn('does not run', str(error))

    def test_refused(self) -> None:
        self.recorded.replies['pcow-checkpoint-create'] = 'the name exists'
        self.recorded.replies['query-pcow'] = [{'filename': str(self.ram)}]
        error = self.assertRaises(exception.QmpFailed, checkpoint.take, self.found, 'warm')
        self.assertEqual('pcow-checkpoint-create: the name exists', str(error))

    def test_refused_as_the_hook_has_not_run(self) -> None:
        self.recorded.replies['pcow-checkpoint-create'] = 'the RAM of the VM is no pcow image'
        self.recorded.replies['query-pcow'] = [{'filename': str(self.nvdimm)}]
        error = self.assertRaises(exception.DomainInvalid, checkpoint.take, self.found, 'warm')
        self.assertIn('hook', str(error))
        self.recorded.has_ram = False  # -machine memory-backend= by hand, for instance
        self.assertRaises(exception.QmpFailed, checkpoint.take, self.found, 'warm')

    def test_answer_of_another_version(self) -> None:
        self.recorded.replies['pcow-checkpoint-create'] = {'pause': 1}
        self.assertRaises(exception.ToolOutputInvalid, checkpoint.take, self.found, 'warm')


class RevertTest(recorded.TestCase):
    COMMAND = ('pcow-checkpoint-revert', {'name': 'warm'})

    def setUp(self) -> None:
        super().setUp()
        self.recorded.replies['pcow-checkpoint-revert'] = {'time': 12300000}
        self.write([WARM], [])

    def test_in_place(self) -> None:
        self.assertEqual(
            model.Reverted(time=12300000, started=False), checkpoint.revert(self.found, 'warm')
        )
        self.assertEqual([self.COMMAND], self.recorded.calls)

    def test_off(self) -> None:
        self.recorded.active = False
        self.assertTrue(checkpoint.revert(self.found, 'warm').started)
        self.assertEqual([('create', 1), self.COMMAND, 'resume'], self.recorded.calls)

    def test_off_and_qemu_refuses(self) -> None:
        """It is off again: its guest would begin to boot otherwise."""
        self.recorded.active = False
        self.recorded.replies['pcow-checkpoint-revert'] = 'cannot'
        self.recorded.replies['query-pcow'] = [{'filename': str(self.ram)}]
        self.assertRaises(exception.QmpFailed, checkpoint.revert, self.found, 'warm')
        self.assertEqual('destroy', self.recorded.calls[-1])
        self.assertNotIn('resume', self.recorded.calls)

    def test_off_and_another_qemu_was_killed(self) -> None:
        """It had begun to revert: the next one finishes that, and the checkpoint has its name."""
        self.recorded.active = False
        self.write(
            [recorded.snapshot(1, '.loading-checkpoint-1.2-3', **{'vm-state-size': 500})], []
        )
        checkpoint.revert(self.found, 'warm')
        self.assertEqual([('create', 1), self.COMMAND, 'resume'], self.recorded.calls)

    def test_the_one_that_it_stands_on(self) -> None:
        """QEMU says which that is, when it has finished what another one left."""
        self.recorded.active = False
        self.recorded.replies['query-pcow-checkpoints'] = [
            {
                'name': name,
                'date-sec': 1,
                'date-nsec': 0,
                'current': name == 'warm',
                'state-size': 1,
                'data-size': 2,
                'shared-size': 3,
                'delete-frees': 4,
            }
            for name in ('cold', 'warm')
        ]
        # a recorded domain stays off
        with mock.patch.object(self.found, 'active', side_effect=[False, True]):
            self.assertEqual('warm', checkpoint.start_at(self.found, None, run=False))
        self.assertEqual(
            [('create', 1), ('query-pcow-checkpoints', {}), self.COMMAND], self.recorded.calls
        )
        self.recorded.replies['query-pcow-checkpoints'] = []
        with mock.patch.object(self.found, 'active', side_effect=[False, True]):
            error = self.assertRaises(
                exception.DomainInvalid, checkpoint.start_at, self.found, None
            )
        self.assertIn('stands on no checkpoint', str(error))
        self.assertEqual('destroy', self.recorded.calls[-1])

    def test_off_and_no_such_checkpoint(self) -> None:
        self.recorded.active = False
        error = self.assertRaises(
            exception.CheckpointNotFound, checkpoint.revert, self.found, 'cold'
        )
        self.assertIn('pcowctl vm tree web1', str(error))
        self.recorded.has_ram = False
        no_image = self.assertRaises(exception.DomainInvalid, checkpoint.revert, self.found, 'warm')
        self.assertIn('--ram', str(no_image))
        self.assertEqual([], self.recorded.calls)


class DeleteTest(recorded.TestCase):
    def test_by_qemu(self) -> None:
        self.recorded.replies['pcow-checkpoint-delete'] = {'freed': 12288}
        self.assertEqual(12288, checkpoint.delete(self.found, 'warm'))
        self.assertEqual([('pcow-checkpoint-delete', {'name': 'warm'})], self.recorded.calls)
        self.assertEqual([], self.logged())

    def test_off(self) -> None:
        """That of the RAM goes first; a snapshot of the name and another date stays."""
        self.recorded.active = False
        self.write([WARM], [recorded.snapshot(1, 'warm')])
        self.assertEqual(8192, checkpoint.delete(self.found, 'warm'))
        commands = [f'snapshot --output=json -d warm {path}' for path in (self.ram, self.nvdimm)]
        self.assertEqual(commands, self.logged())
        self.write([WARM], [recorded.snapshot(2, 'warm')])
        self.assertEqual(4096, checkpoint.delete(self.found, 'warm'))
        self.assertEqual([*commands, commands[0]], self.logged())

    def test_off_and_images_stand_on_it(self) -> None:
        """Nothing of it is deleted."""
        self.recorded.active = False
        self.write([WARM], [recorded.snapshot(1, 'warm', pinned=True)])
        (self.directory / 'fails').touch()
        self.assertRaises(exception.ToolFailed, checkpoint.delete, self.found, 'warm')
        self.assertEqual([f'snapshot --unpin warm {self.nvdimm}'], self.logged())


class PartTest(recorded.TestCase):
    """A command for one image does not take a checkpoint apart."""

    def test_snapshot_commands(self) -> None:
        self.write([WARM, recorded.snapshot(2, 'mine')], [recorded.snapshot(1, 'warm')])
        for active in (True, False):
            self.recorded.active = active
            for call in (
                lambda: self.found.snapshot_delete('warm'),
                lambda: self.found.snapshot_revert('warm', reset=True),
                lambda: self.found.snapshot_rename('warm', 'cold'),
            ):
                error = self.assertRaises(exception.DomainInvalid, call)
                self.assertIn('a checkpoint of the whole VM', str(error))
        self.assertEqual([], self.recorded.calls)
        self.assertEqual([], self.logged())
        self.found.snapshot_delete('mine')
        self.found.snapshot_revert('warm', image_only=True)
        self.assertEqual(2, len(self.logged()))
