# SPDX-License-Identifier: Apache-2.0
"""VMs whose guest tells which memory is free; during a live migration an iothread waits for such
hints all the time.
"""

from __future__ import annotations

import time

from tests.functional import images
from tests.functional import qemu
from tests.functional import test_live_migration
from tests.functional import test_qemu_backend as backend
from tests.functional import virtio

SLOT = 6
BALLOON = (
    '-object',
    'iothread,id=io0',
    '-device',
    f'virtio-balloon-pci,free-page-hint=on,iothread=io0,addr={SLOT}',
)


class HintTest(test_live_migration.MigrationTestCase):
    def begin(self, source: qemu.Qemu) -> virtio.Balloon:
        """A migration that does not end by itself, in which the guest has begun to give hints."""
        balloon = virtio.Balloon(source, SLOT)
        source.qmp(
            'migrate-set-capabilities',
            capabilities=[{'capability': 'pause-before-switchover', 'state': True}],
        )
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
        with (
            self.run_vm(self.image, *BALLOON) as source,
            self.receive(target, *BALLOON) as destination,
        ):
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
            source.qmp(
                'migrate-set-parameters', **{'max-bandwidth': 1 << 40, 'downtime-limit': 1000}
            )
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


class NothingTest(images.ImageTestCase):
    """Memory that the guest does not use is a buffer that nobody stores to: it is not copied from
    the base.
    """

    def test_hints_and_reports(self) -> None:
        base, top = self.path('base.pcow'), self.path('top.pcow')
        self.run_program('pcow-img', 'create', '-q', base, backend.SIZE)
        self.run_program('pcow-io', '-c', f'write -q -P 0x5a 0 {backend.SIZE}', base)
        self.run_program('pcow-img', 'seal', base)
        self.run_program('pcow-img', 'create', '-q', '-b', base, top)
        options = (
            '-object',
            'iothread,id=io0',
            '-device',
            f'virtio-balloon-pci,free-page-hint=on,free-page-reporting=on,iothread=io0,addr={SLOT}',
        )
        with qemu.Qemu(self.path('.'), *backend.backend(top), *options) as vm:
            memory = vm.address('nv0')
            hints = virtio.Balloon(vm, SLOT)
            hints.hint(memory + 8 * images.MIB, 16 * images.MIB)
            vm.qmp('pcow-snapshot-create', id='mem0', name='one')
            hints.hint(memory + 8 * images.MIB, 16 * images.MIB)
            hints.reset()
            virtio.FreePages(vm, SLOT).report(memory + 32 * images.MIB, 16 * images.MIB)
            (found,) = vm.qmp('query-pcow')
            self.assertEqual(
                (0, 0), (found['stats']['pages-copied'], found['stats']['pages-zeroed']), found
            )
            # what is stored to is copied as ever
            vm.write(memory + 8 * images.MIB, b'x')
            (found,) = vm.qmp('query-pcow')
            self.assertGreater(found['stats']['pages-copied'], 0)
            vm.quit()
