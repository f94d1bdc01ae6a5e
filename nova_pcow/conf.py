# SPDX-License-Identifier: Apache-2.0
"""Options of the group ``[nova_pcow]`` in nova.conf; those of ``[pcow]`` are there as well."""

from oslo_config import cfg

from pcow_driver.common import units

GROUP = cfg.OptGroup('nova_pcow', title='Servers with persistent memory')

OPTS: list[cfg.Opt] = [
    cfg.ListOpt(
        'pools',
        default=[],
        help='Names of the pools of this host (as pcowctl pool list shows them) that servers are '
        'put on. Each is a '
        'resource provider of its own, with inventory of CUSTOM_PCOW_MB and the trait of its '
        'persistence class.',
    ),
    cfg.IntOpt(
        'hotplug_gb',
        default=64,
        min=0,
        max=16 * units.KIB,
        help='Guest address space in GiB that is kept for volumes that are attached to a running '
        'server as persistent '
        'memory.',
    ),
    cfg.IntOpt(
        'volume_slots',
        default=8,
        min=0,
        max=64,
        help='How many volumes can be attached to a server as persistent memory.',
    ),
    cfg.StrOpt(
        'qemu_group',
        default='',
        help='Group of the QEMU processes, where they do not run as the user of nova-compute, '
        'which has to be a member: it '
        'gets access to the sockets of volumes that servers without persistent memory have as '
        'disks.',
    ),
    cfg.IntOpt(
        'warm_images',
        default=0,
        min=0,
        help='How many warm images a project may have on this host: images of running servers with '
        'pcow:ram, from '
        'which others go on in the midst of their run. Each keeps in the pool what its server had '
        'in RAM and root, until the image is deleted and no server stands on it. 0: none.',
    ),
    cfg.BoolOpt(
        'shelve_drops_data',
        default=False,
        help='Whether servers with data devices in persistent memory (pcow:data_mb) can be '
        'shelved: only their root '
        'becomes an image, and when they are offloaded, what is on the data devices is lost. If '
        'not, it is refused.',
    ),
]


def register_opts(conf: cfg.ConfigOpts) -> None:
    """Make ``conf.nova_pcow.*`` available; may be called more than once."""
    conf.register_group(GROUP)
    conf.register_opts(OPTS, group=GROUP)


def list_opts() -> list[tuple[cfg.OptGroup, list[cfg.Opt]]]:
    """Entry point of ``oslo.config.opts``."""
    return [(GROUP, OPTS)]


CONF = cfg.CONF
register_opts(CONF)
