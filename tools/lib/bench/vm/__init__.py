# SPDX-License-Identifier: Apache-2.0
"""A VM as a whole, beside what QEMU has for that."""
