# SPDX-License-Identifier: Apache-2.0
"""As in ``nova.tests``, before anything else is imported: an ``oslo_db`` that was imported earlier
has one transaction for all green threads.
"""

import gc

from nova import monkey_patch

monkey_patch.patch()
# What Nova has imported is looked through at each collection: a seventh of a test's time.
gc.set_threshold(100_000, 20, 100)
