# SPDX-License-Identifier: Apache-2.0
"""Forks of a VM: names, and what is refused before anything is made.

What is made: tests/functional/test_virsh_vm_forks.py.
"""

import fcntl
import os
from pathlib import Path
import struct
from unittest import mock

import fixtures

from pcow_driver.common import exception
from pcow_driver.copies import fork as image_fork
from pcow_driver.virt import domain
from pcow_driver.vm import fork
from tests.unit.pcow_driver import base
from tests.unit.pcow_driver.vm import recorded

WARM = {
    'name': 'warm',
    'date-sec': recorded.SECOND,
    'date-nsec': 0,
    'current': True,
    'state-size': 1,
    'data-size': 1,
    'shared-size': 1,
    'delete-frees': 1,
}


class NamesTest(base.TestCase):
    def test_numbers(self) -> None:
        self.assertEqual(['a-1', 'a-2', 'a-3'], fork.child_names('a-{n}', 3))
        self.assertEqual(['one'], fork.child_names('one', 1))
        self.assertEqual(['1/1'], fork.child_names('{n}/{n}', 1))

    def test_refused(self) -> None:
        for pattern, count in (('a', 2), ('a{n}', 0), ('a{n}', -1)):
            self.assertRaises(exception.UsageInvalid, fork.child_names, pattern, count)


class RefusalTest(recorded.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.recorded.replies['query-pcow-checkpoints'] = [WARM]
        self.recorded.domains = ['web1', 'taken']

    def fork(self, name: str | None, *children: str) -> None:
        for _one in fork.fork(self.recorded, self.found, name, children):
            self.fail('it was forked')

    def test_refused(self) -> None:
        self.recorded.generation_id = True
        self.assertRaises(exception.CheckpointNotFound, self.fork, 'cold', 'web2')
        self.assertRaises(exception.InvalidName, self.fork, '', 'web2')
        error = self.assertRaises(exception.DomainExists, self.fork, 'warm', 'web2', 'taken')
        self.assertIn('taken', str(error))
        self.assertEqual([], self.logged())

    def test_generation_id(self) -> None:
        """Before a checkpoint is taken for it."""
        for name in ('warm', None):
            error = self.assertRaises(exception.DomainInvalid, self.fork, name, 'web2')
            self.assertIn('--insecure', str(error))
        self.assertNotIn('pcow-checkpoint-create', [call[0] for call in self.recorded.calls])

    def test_device_that_a_fork_cannot_have(self) -> None:
        """Before a checkpoint is taken for it, too."""
        self.recorded.generation_id, self.recorded.more = True, "<vsock model='virtio'/>"
        for name in ('warm', None):
            error = self.assertRaises(exception.DomainInvalid, self.fork, name, 'web2')
            self.assertIn('vsock', str(error))
        self.assertNotIn('pcow-checkpoint-create', [call[0] for call in self.recorded.calls])

    def test_damage_below(self) -> None:
        """Before a checkpoint is taken for it, as well."""
        self.recorded.generation_id = True
        error = exception.ImageDamaged(
            path='tpl', above='', when='', finding='', pool='p', name='tpl'
        )
        with mock.patch.object(image_fork, 'check_sound', side_effect=error):
            self.assertRaises(exception.ImageDamaged, self.fork, None, 'web2')
        self.assertNotIn('pcow-checkpoint-create', [call[0] for call in self.recorded.calls])

    def test_checkpoint_that_no_child_came_of(self) -> None:
        self.recorded.generation_id = True
        self.recorded.replies['pcow-checkpoint-create'] = {
            'pause': 1,
            'durable': 2,
            'state-size': 3,
        }
        self.recorded.replies['pcow-checkpoint-delete'] = {'freed': 0}
        (self.directory / 'fails').touch()
        self.assertRaises(exception.ToolFailed, self.fork, None, 'web2')
        self.assertEqual(
            [
                ('pcow-checkpoint-create', {'name': 'fork-web2'}),
                ('pcow-checkpoint-delete', {'name': 'fork-web2'}),
            ],
            [call for call in self.recorded.calls if call[0].startswith('pcow-checkpoint')],
        )

    def test_images_of_a_child_that_does_not_start(self) -> None:
        """They go, but for one that somebody has open; the error is that of the start."""
        self.recorded.generation_id = True
        made: list[Path] = []

        def make(_path: str, _snapshot: str, name: str, **_options: int) -> str:
            made.append(self.directory / f'{name}.pcow')
            made[-1].touch()
            return str(made[-1])

        self.useFixture(fixtures.MockPatchObject(image_fork, 'fork', make))
        self.useFixture(
            fixtures.MockPatchObject(domain.Domain, 'define', side_effect=exception.QmpFailed)
        )
        self.assertRaises(exception.QmpFailed, self.fork, 'warm', 'web2')
        self.assertEqual([False, False], [path.exists() for path in made])
        read_lock = struct.pack('hhqqi4x', fcntl.F_RDLCK, os.SEEK_SET, 12288, 1, 0)
        with made[0].open('wb+') as file:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, read_lock)
            self.assertRaises(exception.QmpFailed, self.fork, 'warm', 'web2')
        self.assertEqual([True, False], [path.exists() for path in made[:2]])
