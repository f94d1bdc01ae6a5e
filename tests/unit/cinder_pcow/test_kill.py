# SPDX-License-Identifier: Apache-2.0
"""cinder-volume is killed in the middle of each operation and started again: no volume is lost,
none is leaked.

The operation runs in a process of its own, which is killed after a part of the time that it takes
undisturbed; programs that it has started go on, as those of a real service do. Then a new driver
starts, what Cinder and its user do next is done, and in the end the pools must be as before.
PCOW_TEST_KILLS is the number of kills of each operation.
"""

from collections.abc import Callable
import functools
import os
from pathlib import Path
import signal
import time
import traceback
from typing import Any

from eventlet import hubs

from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.pools import device
from tests.unit.cinder_pcow import base
from tests.unit.cinder_pcow import test_images

KILLS = int(os.environ.get('PCOW_TEST_KILLS', '3'))
GIB = units.GIB


class KillCase(base.PcowTestCase):
    """What tests of kills have in common."""

    def setUp(self) -> None:
        super().setUp()
        self.parent = self.volume()
        self.write(self.parent, 0, 1)
        self.before = self.snapshot(self.parent)
        self.write(self.parent, 0, 2)
        self.at_rest = (self.files(), self.files('two'))

    def run_killed(self, operation: Callable[[], object], delay: float | None) -> float:
        """Run it in another process; None: to its end. Return how long it took, or until it was
        killed.
        """
        begun = time.monotonic()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                # the parent's must not be told of the child's descriptors
                hubs.use_hub()
                os.setsid()
                operation()
                status = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(status)
        if delay is not None:
            time.sleep(delay)
            os.kill(pid, signal.SIGKILL)
        _pid, status = os.waitpid(pid, 0)
        if delay is None:
            self.assertEqual(0, status)
        took = time.monotonic() - begun
        self.wait_for_orphans(pid)
        return took

    def wait_for_orphans(self, session: int) -> None:
        """pcow-img and qemu-img end by themselves; nbdkit and nbdfuse serve until they are told to
        end, and are not waited for.
        """
        for _ in range(200):
            left = []
            for entry in Path('/proc').glob('[0-9]*/stat'):
                try:
                    name, _paren, rest = entry.read_text().partition('(')[2].rpartition(')')
                    state, _parent, _group, of = rest.split()[:4]
                except OSError:
                    continue
                if int(of) == session and state != 'Z' and not name.startswith('nbd'):
                    left.append(name)
            if not left:
                return
            time.sleep(0.05)
        self.fail(f'left running: {left}')

    def each_kill(
        self,
        prepare: Callable[[], Any],
        operation: Callable[[Any], object],
        afterwards: Callable[[Any], object],
    ) -> None:
        """``prepare`` gives what ``operation`` works on; ``afterwards`` checks it and brings the
        pools back.
        """
        subject = prepare()
        took = self.run_killed(lambda: operation(subject), None)
        afterwards(subject)
        for number in range(KILLS):
            subject = prepare()
            moment = took * (number + 0.5) / KILLS
            self.run_killed(functools.partial(operation, subject), moment)
            self.driver = self.make_driver()
            afterwards(subject)
            self.assertEqual(self.at_rest, (self.files(), self.files('two')), f'kill {number}')
            self.check_content(self.parent, {0: 2})
            self.assertEqual(
                [self.before.name], [one.name for one in self.info(self.parent).snapshots]
            )
            self.check_pools()

    def exists(self, volume: Any, pool: str = 'one') -> bool:
        return os.path.exists(self.path(volume, pool))

    def cloned(self) -> tuple[Any, Any]:
        """A volume that was written to since it was cloned, and the clone."""
        volume, clone = self.volume(), self.record()
        self.write(volume, 0, 6)
        self.driver.create_cloned_volume(clone, volume)
        self.write(volume, 0, 7)
        return volume, clone

    def retry_and_delete(self, volume: Any, again: Callable[[Any], object], content: int) -> None:
        """Cinder marks what was being created as an error; the user deletes it and asks again."""
        if self.exists(volume):
            self.assertEqual(volume.size * GIB, device.window(self.path(volume)).size)
            self.check_content(volume, {0: content})
        self.driver.delete_volume(volume)
        again(volume)
        self.check_content(volume, {0: content})
        self.driver.delete_volume(volume)


class KillTest(KillCase):
    def test_create(self) -> None:
        self.each_kill(
            self.record,
            lambda volume: self.driver.create_volume(volume),
            lambda volume: self.retry_and_delete(volume, self.driver.create_volume, 0),
        )

    def test_clone(self) -> None:
        def clone(volume: Any) -> None:
            self.driver.create_cloned_volume(volume, self.parent)

        self.each_kill(
            lambda: self.record(size=2),
            clone,
            lambda volume: self.retry_and_delete(volume, clone, 2),
        )

    def test_create_from_snapshot(self) -> None:
        def create(volume: Any) -> None:
            self.driver.create_volume_from_snapshot(volume, self.before)

        self.each_kill(
            lambda: self.record(size=2),
            create,
            lambda volume: self.retry_and_delete(volume, create, 1),
        )

    def test_create_from_image(self) -> None:
        service = test_images.ImageService(os.path.join(self.directory, 'glance'))
        path = Path(self.directory, 'disk')
        path.write_bytes(b'\x33' * (4 << 20))
        meta = service.add(path, 'raw')

        def create(volume: Any) -> None:
            self.driver.clone_image(self.context, volume, None, meta, service)

        def afterwards(volume: Any) -> None:
            self.retry_and_delete(volume, create, 0x33)
            (template,) = (name for name in self.files() if name.startswith('image-'))
            self.pools['one'].delete_template(template.removesuffix('.pcow'))

        self.each_kill(self.record, create, afterwards)

    def test_extend(self) -> None:
        def afterwards(volume: Any) -> None:
            self.driver.extend_volume(volume, 3)
            self.assertEqual(3 * GIB, device.window(self.path(volume)).size)
            self.driver.delete_volume(volume)

        self.each_kill(self.volume, lambda volume: self.driver.extend_volume(volume, 3), afterwards)

    def test_snapshot(self) -> None:
        self.each_kill(
            lambda: self.snapshot_record(self.parent),
            lambda snapshot: self.driver.create_snapshot(snapshot),
            lambda snapshot: self.driver.delete_snapshot(snapshot),
        )

    def test_delete_snapshot(self) -> None:
        self.each_kill(
            lambda: self.snapshot(self.parent),
            lambda snapshot: self.driver.delete_snapshot(snapshot),
            lambda snapshot: self.driver.delete_snapshot(snapshot),
        )

    def test_delete_snapshot_under_a_volume(self) -> None:
        def prepare() -> Any:
            snapshot, child = self.snapshot(self.parent), self.record()
            self.driver.create_volume_from_snapshot(child, snapshot)
            return snapshot, child

        def afterwards(subject: Any) -> None:
            snapshot, child = subject
            self.driver.delete_snapshot(snapshot)
            self.check_content(child, {0: 2})
            self.driver.delete_volume(child)

        self.each_kill(prepare, lambda subject: self.driver.delete_snapshot(subject[0]), afterwards)

    def test_delete(self) -> None:
        self.each_kill(
            self.volume,
            lambda volume: self.driver.delete_volume(volume),
            lambda volume: self.driver.delete_volume(volume),
        )

    def test_delete_under_a_volume_and_then_that(self) -> None:
        def prepare() -> Any:
            middle, child = self.record(), self.record()
            self.driver.create_cloned_volume(middle, self.parent)
            self.write(middle, 0, 3)
            self.driver.create_cloned_volume(child, middle)
            return middle, child

        def afterwards(subject: Any) -> None:
            middle, child = subject
            self.driver.delete_volume(middle)
            self.check_content(child, {0: 3})
            self.driver.delete_volume(child)

        def both(subject: Any) -> None:
            self.driver.delete_volume(subject[0])
            self.driver.delete_volume(subject[1])

        def after_both(subject: Any) -> None:
            self.driver.delete_volume(subject[0])
            self.driver.delete_volume(subject[1])

        self.each_kill(prepare, lambda subject: self.driver.delete_volume(subject[0]), afterwards)
        self.each_kill(prepare, both, after_both)

    def test_revert(self) -> None:
        def prepare() -> Any:
            volume = self.volume()
            self.write(volume, 0, 4)
            snapshot = self.snapshot(volume)
            self.write(volume, 0, 5)
            return volume, snapshot

        def afterwards(subject: Any) -> None:
            volume, snapshot = subject
            self.assertIn(snapshot.name, [one.name for one in self.info(volume).snapshots])
            self.driver.revert_to_snapshot(self.context, volume, snapshot)
            self.check_content(volume, {0: 4})
            self.driver.delete_snapshot(snapshot)
            self.driver.delete_volume(volume)

        self.each_kill(
            prepare,
            lambda subject: self.driver.revert_to_snapshot(self.context, *subject),
            afterwards,
        )

    def test_migrate(self) -> None:
        stats = {item['pool_name']: item for item in self.driver.get_volume_stats(True)['pools']}
        target = {'host': f'{base.HOST}#two', 'capabilities': stats['two']}

        def prepare() -> Any:
            volume = self.volume()
            self.write(volume, 0, 6)
            return volume

        def afterwards(volume: Any) -> None:
            self.driver.update_provider_info([volume], [])  # as the manager does when it starts
            self.assertEqual(1, self.exists(volume) + self.exists(volume, 'two'))
            self.driver.migrate_volume(self.context, volume, target)
            self.check_content(volume, {0: 6}, pool='two')
            self.driver.delete_volume(volume)

        self.each_kill(
            prepare,
            lambda volume: self.driver.migrate_volume(self.context, volume, target),
            afterwards,
        )

    def test_migrate_beside_a_clone(self) -> None:
        """What the clone needs stays under the name of the volume in the old pool, which the
        database names until the end.
        """
        stats = {item['pool_name']: item for item in self.driver.get_volume_stats(True)['pools']}
        target = {'host': f'{base.HOST}#two', 'capabilities': stats['two']}

        def afterwards(subject: Any) -> None:
            volume, clone = subject
            self.driver.update_provider_info([volume, clone], [])
            self.driver.migrate_volume(self.context, volume, target)
            self.driver.update_provider_info([volume, clone], [])
            self.driver.migrate_volume(self.context, volume, target)
            self.check_content(volume, {0: 7}, pool='two')
            self.check_content(clone, {0: 6})
            self.driver.delete_volume(volume)
            self.driver.delete_volume(clone)

        self.each_kill(
            self.cloned,
            lambda subject: self.driver.migrate_volume(self.context, subject[0], target),
            afterwards,
        )

    def test_manage(self) -> None:
        reference = {'source-name': 'web1'}
        self.libvirt('/no/such.pcow')

        def prepare() -> Any:
            self.io(device.create(self.pools['one'], 'web1', GIB), f'write -q -P 7 {2 << 20} 65536')
            return self.record()

        def afterwards(volume: Any) -> None:
            if not self.exists(volume):
                self.driver.manage_existing(volume, reference)
            self.check_content(volume, {0: 7})
            self.driver.delete_volume(volume)

        # no database
        self.each_kill(
            prepare, lambda volume: self.driver.existing.manage(volume, reference), afterwards
        )

    def test_upload_and_file(self) -> None:
        service = test_images.ImageService(os.path.join(self.directory, 'glance'))
        meta = {'id': 'upload', 'disk_format': 'qcow2', 'container_format': 'bare'}

        def attach(volume: Any) -> None:
            connection = self.driver.initialize_connection(
                volume, {'host': base.HOST.partition('@')[0]}
            )
            Path(connection['data']['device_path']).read_bytes()[:1]

        def afterwards(volume: Any) -> None:
            self.driver.terminate_connection(volume, None, force=True)
            self.driver.delete_volume(volume)

        self.assertIsNotNone(self.parent.volume_type)  # the child has no database
        self.assertEqual({}, self.parent.glance_metadata)
        self.each_kill(
            lambda: self.parent,
            lambda volume: self.driver.copy_volume_to_image(self.context, volume, service, meta),
            lambda volume: None,
        )
        self.each_kill(self.volume, attach, afterwards)
        image.check(self.path(self.parent))
