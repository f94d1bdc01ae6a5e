# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
import os
from pathlib import Path
import subprocess

import fixtures

from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.pools import capacity
from pcow_driver.pools import provisioned
from pcow_driver.pools import registry
from pcow_driver.pools import settings as settings_module
from pcow_driver.pools import watermark
from tests.unit.pcow_driver import base


class SettingsTest(base.TestCase):
    def test_limits(self) -> None:
        held = provisioned.Account(
            total=1000,
            free=600,
            reserved=100,
            overcommit=2,
            held=150,
            growth=850,
            building=0,
            building_fixed=0,
        )
        self.assertEqual((250, 1000, 1300), (held.fixed, held.provisioned, held.limit))
        self.assertEqual(
            (False, True, False, True),
            (held.lacks(300), held.lacks(301), held.lacks(0, 150), held.lacks(0, 151)),
        )
        self.assertEqual(100 + 250 + (1000 - 400) // 2, held.reserved_beside(400))
        self.assertIsNone(dataclasses.replace(held, overcommit=0).limit)
        self.assertFalse(dataclasses.replace(held, overcommit=0).lacks(1 << 60))

    def test_impossible_values(self) -> None:
        for values in (
            {'overcommit': -1.0},
            {'reserve': 100},
            {'reserve': -1},
            {'low': 5, 'critical': 6},
            {'low': 101},
        ):
            self.assertRaises(exception.UsageInvalid, settings_module.Settings(**values).check)

    def test_kept_in_the_registry(self) -> None:
        pools = registry.PoolRegistry()
        pools.create('fast', str(self.directory / 'p'))
        self.assertEqual(settings_module.Settings(), pools.get('fast').settings)
        pools.set('fast', overcommit=3.0, draining=True)
        pools.set('fast', low=50)
        self.assertEqual(
            settings_module.Settings(overcommit=3.0, low=50, draining=True),
            registry.PoolRegistry().get('fast').settings,
        )
        self.assertRaises(exception.UsageInvalid, pools.set, 'fast', low=2)
        self.assertEqual(50, pools.get('fast').settings.low)
        self.assertRaises(exception.PoolNotFound, pools.set, 'slow', low=2)

    def test_damaged_registry(self) -> None:
        pools = registry.PoolRegistry()
        pools.create('fast', str(self.directory / 'p'))
        with open(pools.path, encoding='utf-8') as f:
            state = json.load(f)
        damaged: tuple[object, ...] = ({'low': 'x'}, {'nonsense': 1}, [], {'reserve': 1000})
        for settings in damaged:
            state['pools']['fast']['settings'] = settings
            with open(pools.path, 'w', encoding='utf-8') as f:
                json.dump(state, f)
            self.assertRaises(exception.StateInvalid, pools.list)


class RoomTest(base.TestCase):
    def test_draining(self) -> None:
        pools = registry.PoolRegistry()
        pools.create('fast', str(self.directory / 'p'))
        self.assertRaises(exception.PoolDraining, pools.set('fast', draining=True).check_room, 1)
        pools.set('fast', draining=False).check_room(units.TIB)


class StateTest(base.TestCase):
    def _usage(self, total: int, free: int) -> capacity.PoolUsage:
        state, reason = capacity.judge(
            watermark.Capacity(total=total, free=free), settings_module.Settings(low=20, critical=5)
        )
        account = provisioned.Account(
            total=total,
            free=free,
            reserved=0,
            overcommit=0,
            held=0,
            growth=0,
            building=0,
            building_fixed=0,
        )
        return capacity.PoolUsage(
            name='p"\\',
            total=total,
            free=free,
            reserved=0,
            images=(),
            unreadable=(),
            account=account,
            state=state,
            reason=reason,
        )

    def test_thresholds(self) -> None:
        for free, state in ((1000, 0), (200, 0), (199, 1), (50, 1), (49, 2), (0, 2)):
            self.assertEqual(state, self._usage(1000, free).state)

    def test_prometheus(self) -> None:
        text = capacity.prometheus([self._usage(1000, 10)])
        self.assertIn(
            '# TYPE pcow_pool_free_bytes gauge\npcow_pool_free_bytes{pool="p\\"\\\\"} 10\n', text
        )
        self.assertIn('pcow_pool_state{pool="p\\"\\\\"} 2\n', text)
        self.assertEqual(text, text.strip() + '\n')

    def test_names_that_are_not_utf8(self) -> None:
        """One file of such a name does not take the figures of all pools away."""
        image = capacity.ImageUsage(os.fsdecode(b'v\xff'), False, 1, 1, 1, 0, 0)
        usage = dataclasses.replace(self._usage(1000, 10), images=(image,))
        self.assertIn('image="v\\\\xff"', capacity.prometheus([usage]).encode().decode())

    def test_pool_that_cannot_be_looked_at(self) -> None:
        """An alert on the state fires: the pool does not vanish from the figures."""
        text = capacity.prometheus([], unknown=['gone'])
        self.assertIn('3 it cannot be looked at', text)
        self.assertIn('\npcow_pool_state{pool="gone"} 3\n', text)
        self.assertIn('\npcow_pools_unknown 0\n', text)
        self.assertIn('\npcow_pools_unknown 1\n', capacity.prometheus([], list_is_unknown=True))

    def test_image_that_is_deleted_meanwhile(self) -> None:
        found = registry.PoolRegistry().create('fast', str(self.directory / 'p'))
        found.create_image('vm', size=2 * units.MIB)
        listed = found.listed()
        os.unlink(found.existing_path('vm'))
        self.useFixture(
            fixtures.MonkeyPatch('pcow_driver.pools.pool.Pool.listed', lambda _pool: listed)
        )
        self.assertEqual(((), ()), (capacity.usage(found).images, capacity.usage(found).unreadable))

    def test_read_only(self) -> None:
        """As ext4 is after an error: guests cannot write, whatever is free."""
        found = registry.PoolRegistry().create('fast', str(self.directory / 'p'))
        for options in (('-t', 'tmpfs', 'none'), ('-o', 'remount,ro')):
            subprocess.run(['mount', *options, found.path], check=True)
            self.addCleanup(subprocess.run, ['umount', '-q', found.path], check=False)
        usage = capacity.usage(found)
        self.assertEqual(capacity.State.CRITICAL, usage.state)
        self.assertIn('read-only', usage.reason)
        self.assertIs(capacity.State.CRITICAL, capacity.judge(found.capacity(), found.settings)[0])

    def test_log(self) -> None:
        """Whoever makes an image in a pool that runs low has it in his log: Nova's and Cinder's
        services do.
        """
        programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        self.configure(pcow_img=str(programs / 'pcow-img'))
        pools = registry.PoolRegistry()
        pools.create('fast', str(self.directory / 'p'))
        log = self.useFixture(fixtures.FakeLogger())
        pools.set('fast', low=0, critical=0).create_image('one', size=2 << 20)
        self.assertNotIn('free', log.output)
        pools.set('fast', low=100, critical=0).create_image('two', size=2 << 20)
        self.assertRegex(
            log.output, r'Pool fast has .* free \(.* %\), less than 100 %: free space or extend it'
        )
