# SPDX-License-Identifier: Apache-2.0
"""Drivers of devices for a QEMU without a guest; virtio.py and disks.py have more."""
