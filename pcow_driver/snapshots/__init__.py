# SPDX-License-Identifier: Apache-2.0
"""Snapshots of images that may be open, and the deletion of what others may stand on."""
