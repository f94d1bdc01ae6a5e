# SPDX-License-Identifier: Apache-2.0
"""Drivers for pcow, the virtual machine image format for persistent memory.

images and chains: :mod:`pcow_driver.image`; pools: :mod:`pcow_driver.pool` and :mod:`pcow_driver.registry`;
templates: :mod:`pcow_driver.template`; libvirt: :mod:`pcow_driver.libvirt_xml`, :mod:`pcow_driver.domain_xml`
and :mod:`pcow_driver.domain`.  Nothing here knows of an OpenStack service.
"""
