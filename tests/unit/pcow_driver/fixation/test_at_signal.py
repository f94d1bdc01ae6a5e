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
