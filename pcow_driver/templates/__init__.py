# SPDX-License-Identifier: Apache-2.0
"""Templates: disk images made bootable from persistent memory, sealed, and kept for each image of
an image service.
"""
