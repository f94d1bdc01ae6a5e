# SPDX-License-Identifier: Apache-2.0

import os
from pathlib import Path
from unittest import mock

from nova import context as nova_context
from nova import exception as nova_exception
from nova import objects

from tests.unit.nova_pcow import base


class SnapshotTest(base.ServersTestCase):
    """Images of servers whose root is not there."""

    def test_root_that_is_not_there(self) -> None:
        """No data device is uploaded in its place."""
        self.start_compute()
        server = self.boot(self.make_flavor(1088, root='true', data_mb='64'))
        root = Path(self.pool.existing_path(f'server-{server["id"]}-root'))
        os.rename(root, root.with_suffix('.away'))
        context = nova_context.get_admin_context()
        instance = objects.Instance.get_by_uuid(
            context, server['id'], expected_attrs=['flavor', 'system_metadata']
        )
        driver = self.computes['compute1'].driver
        error = self.assertRaises(
            nova_exception.InternalError,
            driver.snapshot,
            context,
            instance,
            base.IMAGE,
            mock.Mock(),
        )
        self.assertIn(
            f'{root.stem} is in none of the pools fast of this host: mount the pool that has it',
            str(error),
        )
