# SPDX-License-Identifier: Apache-2.0
"""Regions and namespaces as a script that stands for ndctl(1) prints them; the real one runs in a
VM (tools/vm-test fsdax).
"""

import os

import fixtures

from pcow_driver.common import exception
from pcow_driver.provision import ndctl
from pcow_driver.provision import provision
from tests.unit.pcow_driver import base

# Printed by ndctl 76.1 in a guest with two NVDIMMs of 2 and 1 GiB, shortened.
LISTED = """
[{"provider":"ACPI.NFIT","dev":"ndbus0","dimms":[{"dev":"nmem1","id":"8680-57341200","handle":2,"phys_id":0}],
  "regions":[
   {"dev":"region1","size":1071644672,"align":16777216,"available_size":0,"max_available_extent":0,"type":"pmem",
    "mappings":[{"dimm":"nmem1","offset":0,"length":1071644672,"position":0}],"persistence_domain":"unknown",
    "namespaces":[{"dev":"namespace1.0","mode":"raw","size":1071644672,"sector_size":512,"blockdev":"pmem1"}]},
   {"dev":"region0","size":2145386496,"align":16777216,"available_size":1493172224,"max_available_extent":1000000000,"type":"pmem",
    "mappings":[{"dimm":"nmem0","offset":0,"length":2145386496,"position":0}],"persistence_domain":"memory_controller",
    "namespaces":[
     {"dev":"namespace0.2","mode":"raw","size":0,"uuid":"00000000-0000-0000-0000-000000000000","sector_size":512,"state":"disabled"},
     {"dev":"namespace0.0","mode":"fsdax","map":"dev","size":526385152,"uuid":"e3fc7486-664e-4d17-a787-794d5ea95cfa",
      "sector_size":512,"align":2097152,"blockdev":"pmem0","name":"pcow1","badblock_count":3}]}]}]
"""


class NdctlTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.configure(pools_path=str(self.directory))
        nstype = self.directory / 'sys/region0/nstype'
        nstype.parent.mkdir(parents=True)
        nstype.write_text('5\n')  # with labels
        self.useFixture(
            fixtures.MonkeyPatch('pcow_driver.provision.ndctl._SYSFS', str(self.directory / 'sys'))
        )

    def _prints(self, text: str) -> None:
        (self.directory / 'text').write_text(text, encoding='utf-8')
        self.script('ndctl', f'#!/bin/sh\ncat {self.directory}/text\n')
        self.useFixture(
            fixtures.EnvironmentVariable('PATH', f'{self.directory}:{os.environ["PATH"]}')
        )

    def test_regions(self) -> None:
        self._prints(LISTED)
        first, second = ndctl.regions()
        self.assertEqual(
            (
                'region0',
                'ACPI.NFIT',
                2145386496,
                1000000000,
                ('nmem0',),
                16777216,
                'memory_controller',
            ),
            (
                first.dev,
                first.provider,
                first.size,
                first.available,
                first.dimms,
                first.align,
                first.persistence_domain,
            ),
        )
        # one without a size is only the kernel's seed for the next
        (namespace,) = first.namespaces
        self.assertEqual(
            ndctl.Namespace(
                dev='namespace0.0',
                mode='fsdax',
                size=526385152,
                uuid='e3fc7486-664e-4d17-a787-794d5ea95cfa',
                align=2097152,
                map='dev',
                blockdev='pmem0',
                enabled=True,
                badblocks=3,
            ),
            namespace,
        )
        self.assertEqual('/dev/pmem0', namespace.device)
        self.assertEqual(['namespace1.0'], [item.dev for item in second.namespaces])

    def test_none(self) -> None:
        self._prints('')
        self.assertEqual([], ndctl.regions())
        error = self.assertRaises(exception.RegionNotFound, ndctl.find_region, 'region0')
        self.assertIn('there are: none', str(error))

    def test_damaged_labels(self) -> None:
        """What is no label and not empty either: zeros or ones of a new label area are."""
        self._prints(LISTED)
        region = ndctl.find_region('region1')
        for content, damaged in ((r'\0\0\0\0', False), (r'\377\377', False), (r'\0x\0', True)):
            self.script(
                'ndctl',
                f'#!/bin/sh\n[ "$1 $2 $4" = "read-labels --output nmem1" ] && printf \'{content}\' '
                f'>"$3"\n',
            )
            self.assertEqual(damaged, ndctl.labels_are_damaged(region), content)
        self.script('ndctl', '#!/bin/sh\nexit 1\n')  # no label area
        self.assertFalse(ndctl.labels_are_damaged(region))

    def test_unknown_output(self) -> None:
        for text in (
            'x',
            '[1]',
            '{"dev": "ndbus0", "regions": [{"dev": "region0"}]}',
            '[{"provider": "p", "regions": [{"dev": "region0"}]}]',
        ):
            self._prints(text)
            self.assertRaises(exception.ToolOutputInvalid, ndctl.regions)

    def test_names_are_checked(self) -> None:
        for name in ('', 'all', '-f', 'region', 'region0 ', 'region0;x'):
            self.assertRaises(exception.InvalidName, ndctl.find_region, name)
        for name in ('namespace0', 'all', 'namespace0.0.0'):
            self.assertRaises(exception.InvalidName, ndctl.find_namespace, name)

    def test_bad_sectors_are_refused(self) -> None:
        self._prints(LISTED)
        error = self.assertRaises(
            exception.DeviceRefused,
            provision.plan_create,
            provision.Request(
                name='p',
                directory=str(self.directory / 'mnt'),
                filesystem='xfs',
                namespace='namespace0.0',
            ),
        )
        self.assertIn('3 bad sectors', str(error))

    def test_a_region_whose_namespaces_are_not_to_be_seen(self) -> None:
        """Disabled, without labels: what lies in it cannot be looked at, so that nothing may be
        written over it.
        """
        (self.directory / 'sys/region1').mkdir()
        (self.directory / 'sys/region1/nstype').write_text('4\n')
        (self.directory / 'text').write_text(
            LISTED.replace(
                '"namespaces":[{"dev":"namespace1.0","mode":"raw","size":1071644672,"sector_size":512,"blockdev":"pmem1"}]',
                '"state":"disabled"',
            ),
            encoding='utf-8',
        )
        self.script(
            'ndctl',
            f'#!/bin/sh\ncase "$1 $2" in "read-labels --json") echo [1] ;; read-labels*) printf "" '
            f'>"$3" ;; '
            f'*) cat {self.directory}/text ;; esac\n',
        )
        self.useFixture(
            fixtures.EnvironmentVariable('PATH', f'{self.directory}:{os.environ["PATH"]}')
        )
        error = self.assertRaises(
            exception.DeviceRefused,
            provision.plan_create,
            provision.Request(
                name='p', directory=str(self.directory / 'mnt'), filesystem='ext4', region='region1'
            ),
        )
        self.assertIn('ndctl enable-region region1', str(error))

    def test_sizes_are_rounded_to_what_the_region_can_do(self) -> None:
        self._prints(LISTED)
        for size, expected in ((100 << 20, [f'--size={112 << 20}']), (None, [])):
            made = provision.plan_create(
                provision.Request(
                    name='p',
                    directory=str(self.directory / 'mnt'),
                    filesystem='ext4',
                    region='region0',
                    size=size,
                )
            )
            first = next(iter(made.lines())).split()
            self.assertEqual(['ndctl', 'create-namespace'], first[:2])
            self.assertEqual(expected, [word for word in first if word.startswith('--size')])
