# SPDX-License-Identifier: Apache-2.0
"""What only repeats, or takes minutes and seldom changes: run by hand, tools/run-tests --long."""

import os
import unittest

LONG = bool(os.environ.get('PCOW_TEST_LONG'))
only_long = unittest.skipUnless(LONG, 'only with --long')
