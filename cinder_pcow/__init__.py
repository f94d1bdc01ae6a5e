# SPDX-License-Identifier: Apache-2.0
"""Cinder's volume driver for volumes that are pcow images:
``volume_driver = cinder_pcow.driver.PcowDriver``.
"""
