# SPDX-License-Identifier: Apache-2.0
"""Nova's compute driver for servers with persistent memory:
``compute_driver = nova_pcow.driver.PcowLibvirtDriver``.
"""
