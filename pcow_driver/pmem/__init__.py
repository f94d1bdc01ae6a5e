# SPDX-License-Identifier: Apache-2.0
"""From a bare region of persistent memory to a file system that images can be mapped from.

Order of use: :mod:`ndctl` says what there is, :mod:`device` what a block device carries, :mod:`provision` makes a
:class:`~pcow_driver.pmem.plan.Plan` of it, which can be shown before it is carried out.
"""
