# SPDX-License-Identifier: Apache-2.0
"""A virtual machine as one: its RAM, devices and persistent memory of one instant.

Its RAM is an image as its NVDIMMs are, so a checkpoint of all of it takes as long as a snapshot of
an image. Each writable image has a snapshot of the checkpoint's name and date; that of the RAM's
image keeps the state of the devices as well.
"""
