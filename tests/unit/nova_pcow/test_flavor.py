# SPDX-License-Identifier: Apache-2.0

import types

from oslotest import base

from nova_pcow.common import flavor
from pcow_driver.common import units


def parse(root_gb: int = 0, **specs: str) -> flavor.PcowFlavor:
    """A flavor with the extra specs ``pcow:NAME``; those with capitals are given as they are."""
    extra_specs = {
        key.replace('__', ':') if '__' in key else f'pcow:{key}': value
        for key, value in specs.items()
    }
    return flavor.parse(types.SimpleNamespace(name='f', root_gb=root_gb, extra_specs=extra_specs))


class ParseTest(base.BaseTestCase):
    def test_ordinary(self) -> None:
        self.assertFalse(parse(root_gb=10).uses_pcow)
        self.assertFalse(parse(root='false').uses_pcow)

    def test_root_size(self) -> None:
        self.assertEqual(
            2 * units.GIB, parse(2, root='true', resources__CUSTOM_PCOW_MB='2048').root_size
        )
        self.assertEqual(
            300 * units.MIB, parse(root='yes', resources__CUSTOM_PCOW_MB='301').root_size
        )
        found = parse(
            root='true',
            data_mb='100,20',
            data_format='ext4,none',
            resources_A__CUSTOM_PCOW_MB='1000',
        )
        self.assertEqual(880 * units.MIB, found.root_size)
        self.assertEqual(
            (flavor.DataDevice(100 * units.MIB, 'ext4'), flavor.DataDevice(20 * units.MIB, 'none')),
            found.data,
        )

    def test_data_only(self) -> None:
        found = parse(10, data_mb='64,64', data_format='xfs', resources__CUSTOM_PCOW_MB='128')
        self.assertIsNone(found.root_size)
        self.assertEqual({'xfs'}, {item.format for item in found.data})

    def test_traits(self) -> None:
        found = parse(
            trait__CUSTOM_PCOW_PMEM='required',
            trait_A__CUSTOM_PCOW='required',
            trait__CUSTOM_PCOW_VOLATILE='forbidden',
        )
        self.assertEqual({'CUSTOM_PCOW', 'CUSTOM_PCOW_PMEM'}, found.required_traits)

    def test_invalid(self) -> None:
        for root_gb, specs in (
            # no size at all
            (0, {'root': 'true'}),
            # less claimed than used
            (2, {'root': 'true', 'resources__CUSTOM_PCOW_MB': '2047'}),
            (0, {'root': 'true', 'data_mb': '64', 'resources__CUSTOM_PCOW_MB': '64'}),
            (0, {'root': 'perhaps', 'resources__CUSTOM_PCOW_MB': '64'}),
            # not a multiple of 2 MiB
            (0, {'data_mb': '63', 'resources__CUSTOM_PCOW_MB': '64'}),
            (0, {'data_mb': '64', 'data_format': 'ext4,xfs', 'resources__CUSTOM_PCOW_MB': '64'}),
            (0, {'data_mb': ','.join(['2'] * 9), 'resources__CUSTOM_PCOW_MB': '64'}),
            (0, {'data_format': 'ext4'}),
        ):
            with self.subTest(specs=specs):
                self.assertRaises(flavor.FlavorInvalid, parse, root_gb, **specs)


class KnownTest(base.BaseTestCase):
    def check(self, **specs: str) -> None:
        extra_specs = {key.replace('__', ':'): value for key, value in specs.items()}
        flavor.check_known(types.SimpleNamespace(name='f', extra_specs=extra_specs))

    def test_known(self) -> None:
        self.check(pcow__root='true', pcow__data_mb='64', pcow__data_format='ext4')
        # of others, who may give them a meaning
        self.check(PCOW__root='true', hw__cpu_policy='shared', pcowroot='true')

    def test_misspelt(self) -> None:
        error = self.assertRaises(
            flavor.FlavorInvalid, self.check, pcow__root='true', pcow__rooot='true'
        )
        self.assertEqual(
            'the flavor f cannot be used: it has the property pcow:rooot, which does not exist '
            '(pcow:root is near): remove it '
            '(openstack flavor unset --property pcow:rooot f) and set the one that is meant; there '
            'are pcow:root, pcow:data_mb, pcow:data_format, pcow:bus, pcow:ram, pcow:persist',
            str(error),
        )

    def test_nothing_is_near(self) -> None:
        error = self.assertRaises(flavor.FlavorInvalid, self.check, pcow__qzx='1')
        self.assertIn('which does not exist: remove it', str(error))


class ResizeTest(base.BaseTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.old = parse(2, root='true', data_mb='64', resources__CUSTOM_PCOW_MB='4096')

    def test_larger(self) -> None:
        flavor.check_resize(self.old, self.old)
        flavor.check_resize(
            self.old, parse(3, root='true', data_mb='64,2', resources__CUSTOM_PCOW_MB='4096')
        )
        flavor.check_resize(parse(5), parse(5, data_mb='64', resources__CUSTOM_PCOW_MB='64'))

    def test_refused(self) -> None:
        for new, words in (
            (
                parse(1, root='true', data_mb='64', resources__CUSTOM_PCOW_MB='4096'),
                'root in persistent memory would shrink',
            ),
            (
                parse(2, root='true', data_mb='62', resources__CUSTOM_PCOW_MB='4096'),
                'data device 0 would shrink',
            ),
            (
                parse(2, root='true', resources__CUSTOM_PCOW_MB='4096'),
                '1 data device(s) would be lost',
            ),
            (
                parse(9, data_mb='64', resources__CUSTOM_PCOW_MB='4096'),
                'between a disk and persistent memory',
            ),
        ):
            error = self.assertRaises(flavor.FlavorInvalid, flavor.check_resize, self.old, new)
            self.assertIn(words, str(error))
