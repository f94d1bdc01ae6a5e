# SPDX-License-Identifier: Apache-2.0
"""VMs that go on where they were after a power failure, by checkpoints (:mod:`pcow_driver.vm`).

A domain that is protected has a checkpoint taken now and then (``automatic``), and one more when
the host goes down, after which its QEMU ends (``fixate``). When the host is up again, or the QEMU
was killed, it goes on from the last one (``recover``). ``policy`` is what its owner wants,
``records`` what the host knows of it, ``runs`` which QEMU it knows that of, ``watch`` the loop that
does all this, ``parallel`` what does it for several at once, and ``overview`` what people are
shown.
"""
