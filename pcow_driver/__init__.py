# SPDX-License-Identifier: Apache-2.0
"""Drivers for pcow, the virtual machine image format for persistent memory.

Nothing here knows of an OpenStack service.  A package imports only those above it:

* :mod:`~pcow_driver.common`: options, errors, names, sizes, locks, programs that are run
* :mod:`~pcow_driver.pmem`: block devices, file systems and mounts, looked at
* :mod:`~pcow_driver.privileged`: what root does, and the one thing that it does for services
* :mod:`~pcow_driver.images`: image files by themselves
* :mod:`~pcow_driver.pools`: pools, and new images in them
* :mod:`~pcow_driver.export`: images over NBD and as plain files
* :mod:`~pcow_driver.virt`: libvirt domains and their guests
* :mod:`~pcow_driver.templates`: disk images made bootable, kept for an image service
* :mod:`~pcow_driver.snapshots`: of images that may be open, and the deletion of both
* :mod:`~pcow_driver.copies`: clones, forks, exports, transfers
* :mod:`~pcow_driver.vm`: checkpoints of a whole virtual machine
* :mod:`~pcow_driver.fixation`: virtual machines that outlive their host
* :mod:`~pcow_driver.provision`: plans that change the host
* :mod:`~pcow_driver.health`: the doctor, and garbage
* :mod:`~pcow_driver.cli`: pcowctl
"""
