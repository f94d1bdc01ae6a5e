# SPDX-License-Identifier: Apache-2.0
"""Nova's compute driver for servers with persistent memory:
``compute_driver = nova_pcow.driver.PcowLibvirtDriver``.

The modules here are what Nova, pcowctl and the build name; a package imports only those above it:

* :mod:`~nova_pcow.common`: what a flavor asks for, errors, names, values in metadata
* :mod:`~nova_pcow.records`: what this host writes down, and a restart of the service needs
* :mod:`~nova_pcow.placement`: pools in Placement: what is offered, and what servers claim
* :mod:`~nova_pcow.servers`: what a server has here: images, RAM, volumes, its domain
* :mod:`~nova_pcow.snapshots`: snapshots of servers, suspended ones, those that go back in place
* :mod:`~nova_pcow.warm_images`: images that stand for a checkpoint, from which servers go on
* :mod:`~nova_pcow.migration`: servers that go to another host, with their images
* :mod:`~nova_pcow.libvirt_driver`: what differs from Nova's libvirt driver
"""
