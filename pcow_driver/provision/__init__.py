# SPDX-License-Identifier: Apache-2.0
"""Plans that change a host: from a bare region to a pool, and back."""
