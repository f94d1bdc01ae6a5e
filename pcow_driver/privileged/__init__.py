# SPDX-License-Identifier: Apache-2.0
"""What pcow does as root, and nothing else.  Two kinds of entry points, which nothing connects:

* :mod:`~pcow_driver.privileged.services`: what a service (nova-compute, cinder-volume) may have
  done that is not root: the immutable flag of its own templates. A daemon of *oslo.privsep* does
  it, which runs as that user and has one capability more.
* :mod:`~pcow_driver.privileged.administration`: the rest, for pcowctl. Only a process of root may
  call it. There is no daemon that would do it for somebody else, so that no rule of sudo or
  rootwrap can hand it to a service by being too wide.

Each does one thing to one thing: it takes names, sizes and choices, never a command or an option,
checks them itself, and builds the command.
"""
