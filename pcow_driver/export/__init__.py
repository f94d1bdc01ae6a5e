# SPDX-License-Identifier: Apache-2.0
"""Images over NBD and as plain files, for programs that cannot map them."""
