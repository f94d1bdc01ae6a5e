# SPDX-License-Identifier: Apache-2.0
"""What test_qemu_random.py is made of: images and their models, and each kind of device."""
