# SPDX-License-Identifier: Apache-2.0
"""As in ``nova.tests``, before anything else is imported: an ``oslo_db`` that was imported earlier
has one transaction for all green threads.
"""

from nova import monkey_patch

monkey_patch.patch()
