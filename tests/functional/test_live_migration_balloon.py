# SPDX-License-Identifier: Apache-2.0
"""Live migration of a VM whose guest tells which memory is free: an iothread waits for such hints all the time."""

from __future__ import annotations

import time

from tests.functional import images
from tests.functional import qemu
from tests.functional import test_live_migration
from tests.functional import virtio

SLOT = 6
BALLOON = ('-object', 'iothread,id=io0', '-device', f'virtio-balloon-pci,free-page-hint=on,iothread=io0,addr={SLOT}')


class HintTest(test_live_migration.MigrationTestCase):
    def begin(self, source: qemu.Qemu) -> virtio.Balloon:
        """A migration that does not end by itself, in which the guest has begun to give hints."""
        balloon = virtio.Balloon(source, SLOT)
        source.qmp('migrate-set-capabilities', capabilities=[{'capability': 'pause-before-switchover', 'state': True}])
        self.migrate(source, max_bandwidth=8 * images.MIB, downtime_limit=1)
        end = time.monotonic() + test_live_migration.SECONDS
        while balloon.command() < 2:
            self.assertLess(time.monotonic(), end, 'nobody asks for hints')
            time.sleep(0.02)
        balloon.begin()
        return balloon

    def test_hints(self) -> None:
        """Of RAM and of an image, which keeps what it has all the same; rounds go on meanwhile."""
        target, model = self.prepare_there(), test_live_migration.Model(1)
        with self.run_vm(self.image, *BALLOON) as source, self.receive(target, *BALLOON) as destination:
            model.store(source, 2000)
            balloon = self.begin(source)
            balloon.hint(64 * images.MIB, images.MIB)
            balloon.hint(source.address('nv0'), images.MIB)
            names: set[str] = set()
            end = time.monotonic() + test_live_migration.SECONDS
            while len(names) < 2:
                self.assertLess(time.monotonic(), end, f'there were no rounds: {names}')
                model.store(source, 50)
                names.update(source.names())
            source.qmp('migrate-set-parameters', **{'max-bandwidth': 1 << 40, 'downtime-limit': 1000})
            while source.qmp('query-migrate')['status'] == 'active':
                model.store(source, 5)
            source.qmp('migrate-continue', state='pre-switchover')
            self.assertEqual('completed', self.wait(source)['status'])
            self.assertEqual('running', destination.wait_status('running'))
            self.assert_holds(destination, model)
            source.quit()
            destination.quit()
        self.assert_clean(self.image, target)

    def test_stopped_meanwhile(self) -> None:
        """What waits for all iothreads must not wait for the guest to go on; hints do."""
        target = self.prepare_there()
        with self.run_vm(self.image, *BALLOON) as source, self.receive(target, *BALLOON):
            test_live_migration.Model(2).store(source, 2000)
            balloon = self.begin(source)
            source.qmp('stop')
            source.qmp('migrate_cancel')
            self.assertEqual('cancelled', self.wait(source)['status'])
            source.qmp('pcow-snapshot-create', id='mem0', name='stopped')
            balloon.post([], [(64 * images.MIB, images.MIB)])
            balloon.notify()
            source.qmp('cont')
            balloon.wait()
            source.quit()
        self.assert_clean(self.image)
