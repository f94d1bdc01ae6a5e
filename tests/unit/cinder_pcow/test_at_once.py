# SPDX-License-Identifier: Apache-2.0
"""Two operations on one volume at one moment, each in a process of its own, as two services or a
service and a tool.
"""

from collections.abc import Callable
import os
from typing import Any

from eventlet import hubs

from tests.unit.cinder_pcow import test_kill


class AtOnceTest(test_kill.KillCase):
    def both(self, *operations: Callable[[], object]) -> list[bool]:
        """Run them beside each other; which of them succeeded."""
        children = []
        for operation in operations:
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    # the parent's must not be told of the child's descriptors
                    hubs.use_hub()
                    operation()
                    status = 0
                finally:
                    os._exit(status)
            children.append(pid)
        return [os.waitpid(pid, 0)[1] == 0 for pid in children]

    def gone(self, *volumes: Any) -> None:
        """Delete them; then all is as before."""
        for volume in volumes:
            self.driver.delete_volume(volume)
        self.assertEqual(self.at_rest, (self.files(), self.files('two')))
        self.check_content(self.parent, {0: 2})
        self.check_pools()

    def test_two_clones(self) -> None:
        clones = [self.record(), self.record()]
        self.assertEqual(
            [True, True],
            self.both(
                *(
                    lambda clone=clone: self.driver.create_cloned_volume(clone, self.parent)
                    for clone in clones
                )
            ),
        )
        for clone in clones:
            self.check_content(clone, {0: 2})
        self.gone(*clones)

    def test_snapshot_and_clone(self) -> None:
        snapshot, clone = self.snapshot_record(self.parent), self.record()
        done = self.both(
            lambda: self.driver.create_snapshot(snapshot),
            lambda: self.driver.create_cloned_volume(clone, self.parent),
        )
        self.driver.delete_snapshot(snapshot)
        if done[1]:
            self.check_content(clone, {0: 2})
        self.assertIn(True, done)
        self.gone(clone)

    def test_clone_and_delete(self) -> None:
        volume, clone = self.record(), self.record()
        self.driver.create_cloned_volume(volume, self.parent)
        cloned, deleted = self.both(
            lambda: self.driver.create_cloned_volume(clone, volume),
            lambda: self.driver.delete_volume(volume),
        )
        self.assertTrue(deleted)
        self.assertEqual(cloned, self.exists(clone))
        if cloned:
            self.check_content(clone, {0: 2})
        self.gone(clone)

    def test_extend_and_clone(self) -> None:
        volume, clone = self.record(), self.record(size=2)
        self.driver.create_cloned_volume(volume, self.parent)
        done = self.both(
            lambda: self.driver.extend_volume(volume, 2),
            lambda: self.driver.create_cloned_volume(clone, volume),
        )
        self.assertIn(True, done)
        for one in (volume, clone) if done[1] else (volume,):
            self.check_content(one, {0: 2})
        self.gone(volume, clone)

    def test_one_deleted_twice(self) -> None:
        volume = self.volume()
        self.assertEqual([True, True], self.both(*[lambda: self.driver.delete_volume(volume)] * 2))
        self.gone()
