# SPDX-License-Identifier: Apache-2.0
"""VMs that go on where they were after a power failure, by checkpoints (:mod:`pcow_driver.vm`).

A domain that is protected has a checkpoint taken now and then (``automatic``), and one more when
the host goes down, after which its QEMU ends (``fixation``). When the host is up again, or the QEMU
was killed, it goes on from the last one (``recovery``). ``policy`` is what its owner wants,
``records`` what the host knows of it, ``watch`` the loop that does all this.
"""
