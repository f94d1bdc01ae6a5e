# SPDX-License-Identifier: Apache-2.0
"""The driver has what the manager calls, under the names and with the parameters with which it
calls.

Cinder's own compliance check looks for abstract methods only, which a class without them always
passes.
"""

import inspect

from cinder import interface
from cinder.interface import volume_driver
from cinder.interface import volume_group_driver
from cinder.interface import volume_manageable_driver
from cinder.interface import volume_snapshot_revert
from cinder.interface import volume_snapshotmanagement_driver
from cinder.volume import driver as cinder_driver

from cinder_pcow import driver
from tests.unit.cinder_pcow import base

INTERFACES = (
    volume_driver.VolumeDriverCore,
    volume_group_driver.VolumeGroupDriver,
    volume_manageable_driver.VolumeListManageableDriver,
    volume_snapshot_revert.VolumeSnapshotRevertDriver,
    volume_snapshotmanagement_driver.VolumeSnapshotManagementDriver,
    cinder_driver.BaseVD,
    cinder_driver.CloneableImageVD,
    cinder_driver.MigrateVD,
    cinder_driver.ManageableVD,
    cinder_driver.ManageableSnapshotsVD,
)


def methods(of: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(value)
        for name, value in inspect.getmembers(of, inspect.isfunction)
        if not name.startswith('_') or name == '_update_volume_stats'
    }


def parameters(signature: inspect.Signature, kind: object) -> list[str]:
    return [name for name, value in signature.parameters.items() if value.kind is kind]


class InterfaceTest(base.PcowTestCase):
    def test_it_is_a_registered_driver_of_every_interface(self) -> None:
        self.assertIn(driver.PcowDriver, interface._volume_register)
        for of in INTERFACES:
            missing = set(methods(of)) - set(dir(driver.PcowDriver))
            self.assertEqual(set(), missing, of)

    def test_signatures(self) -> None:
        positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
        ours = {
            name: value
            for name, value in methods(driver.PcowDriver).items()
            if name in vars(driver.PcowDriver)
        }
        compared = 0
        for of in INTERFACES:
            for name, theirs in methods(of).items():
                if name not in ours:
                    continue
                compared += 1
                wanted, got = parameters(theirs, positional), parameters(ours[name], positional)
                renamed = {'ctxt': 'context'}
                wanted = [renamed.get(one, one) for one in wanted if one != 'initiator_data']
                got = [renamed.get(one, one) for one in got]
                self.assertEqual(wanted, got[: len(wanted)], f'{of.__name__}.{name}')
                for extra in got[len(wanted) :]:
                    self.assertIsNot(
                        ours[name].parameters[extra].default,
                        inspect.Parameter.empty,
                        f'{name}: {extra}',
                    )
                for one, value in theirs.parameters.items():
                    if (
                        value.default is not inspect.Parameter.empty
                        and one in ours[name].parameters
                    ):
                        self.assertIsNot(
                            ours[name].parameters[one].default,
                            inspect.Parameter.empty,
                            f'{name}: {one}',
                        )
        self.assertGreater(compared, 60)

    def test_what_the_driver_is_called(self) -> None:
        self.assertRegex(self.driver.get_version(), r'^\d+\.\d+\.\d+$')
        self.assertEqual('pcow_CI', driver.PcowDriver.CI_WIKI_NAME)
        self.assertEqual(
            {'pcow_pools', 'pcow_compute_host', 'pcow_migration_address', 'pcow_max_chain'},
            {option.name for option in driver.PcowDriver.get_driver_options()},
        )
        self.assertTrue(self.driver.supported)
