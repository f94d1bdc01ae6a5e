# SPDX-License-Identifier: Apache-2.0
"""Virtual machines on pcow images, under real KVM faults: tools/vm-test.

suite.py and what it imports run inside the outer machine as well, where there is nothing but
Python's standard library.
"""
