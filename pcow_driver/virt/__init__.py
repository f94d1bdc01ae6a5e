# SPDX-License-Identifier: Apache-2.0
"""libvirt domains: their XML, their guests, and the images that they have open."""
