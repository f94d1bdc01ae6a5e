# SPDX-License-Identifier: Apache-2.0
"""Block devices, file systems and mounts of persistent memory: looked at, and described, not
changed.

:mod:`~pcow_driver.provision` makes plans of it, and :mod:`~pcow_driver.privileged` carries them
out.
"""
