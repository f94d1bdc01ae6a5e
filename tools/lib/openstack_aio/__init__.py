# SPDX-License-Identifier: Apache-2.0
"""A real OpenStack on one machine, on the loopback interface: to try nova_pcow and cinder_pcow, and
to test them.

``tools/openstack-aio`` installs what is needed and runs ``python -m tools.lib.openstack_aio``.
"""
