# SPDX-License-Identifier: Apache-2.0
from unittest import mock

from tests.unit.pcow_driver import base
from tools.lib.bench import parts


class ClockTest(base.TestCase):
    def test_a_part_ends_with_what_the_console_says(self) -> None:
        names = [part.name for part in parts.of(direct=True)]
        clock = parts.Clock(1, parts.of(direct=True))
        with mock.patch.object(parts, 'processor', side_effect=[1.0, 3.5, 4.0]):
            clock.see(b'ignoring log')
            self.assertEqual({}, clock.took)
            clock.see(b'level setting.\nRun /pcow/init as init process\n')
            clock.see(b'pcow-ready\n')
            clock.see(b'ignoring loglevel once more\n')
        self.assertEqual(dict(zip(names, [1.0, 2.5, 0.5], strict=True)), clock.took)

    def test_both_kernels_of_the_shim_have_their_parts(self) -> None:
        ends = [part.end for part in parts.of(direct=False)]
        self.assertEqual(2, ends.count(b'ignoring loglevel'))
        names = [part.name for part in parts.of(direct=False)]
        self.assertEqual(len(names), len(set(names)))
