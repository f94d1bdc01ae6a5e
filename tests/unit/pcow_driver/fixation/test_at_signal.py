# SPDX-License-Identifier: Apache-2.0
from typing import Any
from unittest import mock

import libvirt

from pcow_driver.common import exception
from pcow_driver.fixation import at_signal
from pcow_driver.fixation import automatic
from pcow_driver.fixation import policy
from tests.unit.pcow_driver import base


class AtSignalTest(base.TestCase):
    def test_what_qemu_is_told(self) -> None:
        found: Any = mock.Mock(**{'writable.return_value': []})
        at_signal.tell(found, policy.FIXATE)
        for word in (policy.STOP, ''):
            at_signal.tell(found, word)
        command = 'pcow-checkpoint-at-signal'
        self.assertEqual(
            [mock.call(command, prefix=automatic.FIXATION), mock.call(command), mock.call(command)],
            found.qmp.mock_calls,
        )

    def test_what_libvirt_refuses(self) -> None:
        found: Any = mock.Mock(**{'writable.return_value': []})
        found.qmp.side_effect = libvirt.libvirtError('it has no lock')
        with self.assertRaises(exception.LibvirtFailed):
            at_signal.tell(found, policy.FIXATE)

    def test_no_room_for_it(self) -> None:
        """QEMU is told all the same, and looks at what the file system has."""
        found: Any = mock.Mock(**{'writable.return_value': []})
        found.name = 'web1'
        refused = exception.NoRoom(
            name='p', size='8M', provisioned='1G', limit='1G', overcommit=1.0
        )
        with (
            mock.patch('pcow_driver.pools.room.for_more', side_effect=refused),
            self.assertLogs('pcow_driver.fixation.at_signal', 'WARNING') as said,
        ):
            at_signal.tell(found, policy.FIXATE)
        found.qmp.assert_called_once_with('pcow-checkpoint-at-signal', prefix=automatic.FIXATION)
        self.assertIn('web1', said.output[0])
