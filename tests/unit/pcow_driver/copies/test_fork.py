# SPDX-License-Identifier: Apache-2.0
"""Forks and exports of a domain: which snapshots are made for them, and which go again.

Recorded, as in test_domain; tests/functional/test_qemu_forks.py does it with QEMU,
test_pcowctl_copies.py with pcow-img.
"""

from pcow_driver.common import exception
from pcow_driver.copies import fork
from pcow_driver.virt import domain
from tests.unit.pcow_driver import base
from tests.unit.pcow_driver.virt import test_domain


class CopiesTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        test_domain.record_libvirt(self)
        self.image = self.directory / 'vm.pcow'
        self.image.write_text('')
        self.log = self.directory / 'log'
        self.set_exit_code(0)

    def set_exit_code(self, code: int) -> None:
        self.configure(
            pcow_img=self.script('pcow-img', f'#!/bin/sh\necho "$@" >> {self.log}\nexit {code}\n')
        )

    def make(self, *, active: bool) -> tuple[test_domain.RecordedDomain, domain.Domain]:
        recorded = test_domain.RecordedDomain([str(self.image)], active)
        return recorded, domain.Domain(recorded, 'vm')

    def commands(self, recorded: test_domain.RecordedDomain) -> list[tuple[str, str]]:
        return [
            (call['execute'].removeprefix('pcow-snapshot-'), call['arguments']['name'])
            for call in recorded.calls
        ]

    def words(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []

    def test_fork_of_a_running_guest(self) -> None:
        recorded, found = self.make(active=True)
        self.assertEqual(str(self.directory / 'new.pcow'), fork.fork_live(found, 'new'))
        self.assertEqual([('create', 'fork-new')], self.commands(recorded))
        self.assertIn('base_snapshot=fork-new', self.words())
        self.assertIn(str(self.image), self.words())

    def test_a_fork_that_fails_leaves_no_snapshot(self) -> None:
        recorded, found = self.make(active=True)
        self.set_exit_code(1)
        self.assertRaises(exception.ToolFailed, fork.fork_live, found, 'new')
        self.assertEqual([('create', 'fork-new'), ('delete', 'fork-new')], self.commands(recorded))

    def test_a_taken_name_makes_no_snapshot(self) -> None:
        recorded, found = self.make(active=True)
        self.assertRaises(exception.ImageExists, fork.fork_live, found, 'vm')
        self.assertRaises(exception.InvalidName, fork.fork_live, found, 'a/b')
        self.assertRaises(exception.ImageExists, fork.export_domain, found, str(self.image), 'raw')
        self.assertEqual([], recorded.calls)

    def test_export_of_a_running_guest(self) -> None:
        for code in (0, 1):
            recorded, found = self.make(active=True)
            self.set_exit_code(code)
            target = str(self.directory / 'new.raw')
            if code:
                self.assertRaises(exception.ToolFailed, fork.export_domain, found, target, 'raw')
            else:
                fork.export_domain(found, target, 'raw')
            (create, name), (delete, same) = self.commands(recorded)
            self.assertEqual(('create', 'delete', name), (create, delete, same))
            self.assertIn(name, self.words())

    def test_export_without_a_snapshot_of_its_own(self) -> None:
        for active, snapshot in ((True, 's1'), (False, 's1'), (False, None)):
            recorded, found = self.make(active=active)
            fork.export_domain(found, str(self.directory / 'new.pcow'), 'pcow', snapshot=snapshot)
            self.assertEqual([], recorded.calls)
        self.assertEqual(2, self.words().count('s1'))
        self.assertEqual(3, self.words().count('sealed=on'))
