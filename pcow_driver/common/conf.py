# SPDX-License-Identifier: Apache-2.0
"""Options of the group ``[pcow]``; services register them in their own configuration with
:func:`register_opts`.
"""

from oslo_config import cfg
from oslo_config import types

from pcow_driver.common import units

GROUP = cfg.OptGroup('pcow', title='pcow images and pools')

OPTS: list[cfg.Opt] = [
    cfg.StrOpt(
        'state_path',
        default='/var/lib/pcow',
        help='Directory of the list of pools (pools.json) and of the locks that processes of this '
        'host share.',
    ),
    cfg.StrOpt(
        'pools_path',
        default='/var/lib/pcow/pools',
        help='Directory in which pcowctl pool create mounts the file systems that it makes.',
    ),
    cfg.StrOpt(
        'volume_name_template',
        default='volume-%s',
        help='What Cinder calls a volume, and the driver its image: volume_name_template of '
        'cinder.conf, if that is not the default. cinder-volume knows it; set it for pcowctl and '
        "nova-compute, which take what has such a name, with a UUID for %s, for Cinder's.",
    ),
    cfg.BoolOpt(
        'protect_templates',
        default=True,
        help='Give templates the immutable flag (chattr +i) where the file system has it and this '
        'user may: nobody then '
        'changes or deletes one under its children. Pools in DRAM are left alone.',
    ),
    cfg.StrOpt(
        'pcow_img',
        default='pcow-img',
        help='The pcow-img program: a path, or a name looked for in PATH and then in build/bin of '
        'the checkout '
        'that this package runs from.',
    ),
    cfg.StrOpt(
        'pcowctl',
        default='pcowctl',
        help='The pcowctl program, by which the libvirt hook serves images that are disks: a path, '
        'or a name looked for in PATH and then in /usr/local/bin and /usr/bin.',
    ),
    cfg.StrOpt('pcow_io', default='pcow-io', help='The pcow-io program, looked for like pcow-img.'),
    cfg.StrOpt(
        'nbdkit', default='nbdkit', help='The nbdkit program, which serves images over NBD.'
    ),
    cfg.StrOpt(
        'nbdfuse',
        default='nbdfuse',
        help='The nbdfuse program of libnbd, which shows what nbdkit serves as a file.',
    ),
    cfg.StrOpt(
        'nbdkit_plugin',
        default='nbdkit-pcow-plugin.so',
        help="The nbdkit plug-in of pcow: a path, or a name looked for in build/bin of the "
        "checkout that this package "
        'runs from and then in /usr/lib/*/nbdkit/plugins and /usr/lib/nbdkit/plugins.',
    ),
    cfg.StrOpt(
        'qemu_img',
        default='qemu-img',
        help='The qemu-img program, which reads the sources of templates.',
    ),
    cfg.StrOpt(
        'emulator',
        default='qemu-system-x86_64',
        help='QEMU with the pcow backend; a path, or a name looked for in build/bin of the '
        'checkout that this '
        'package runs from and then in PATH (the distribution has a QEMU of the same name without '
        'the '
        'backend).',
    ),
    cfg.StrOpt(
        'boot_shim',
        default='pcow-boot-shim',
        help='The directory of the boot shim (its files kernel and initrd), from which a guest '
        'boots that is given no kernel: a path, or a name looked for in build/share of the '
        'checkout that this package runs from and then in /usr/local/share and /usr/share.',
    ),
    cfg.StrOpt(
        'libvirt_uri',
        default='qemu:///system',
        help='Connection over which running domains are controlled.',
    ),
    cfg.IntOpt(
        'libvirt_timeout',
        default=60,
        min=1,
        help='Seconds after which a call of libvirt is given up that libvirt, or the QEMU of a '
        'domain, does not answer. What writes data of a guest, starts or ends it, has ten times as '
        'long; what saves or loads all of its RAM (suspend and resume of a server, virsh '
        'snapshots) has no limit. libvirt itself gives up after 30 s where another call of the '
        'same domain keeps it waiting, so fewer hide what it says.',
    ),
    cfg.StrOpt(
        'conversion_dir',
        default='/var/tmp',  # noqa: S108 - the files in it have random names
        help='Directory for the sparse raw file that exists while a template is built; it takes as '
        'much space '
        'as the source holds data.',
    ),
    cfg.Opt(
        'max_image_size',
        type=types.String(),
        default='16T',
        help='Largest virtual size that a template may get, so that a small hostile source cannot '
        'ask for a '
        'huge image. Bytes, or a number with K, M, G, T, P or E, which count in 1024.',
    ),
    cfg.IntOpt(
        'cluster_size',
        default=64 * units.KIB,
        min=units.MIN_CLUSTER_SIZE,
        max=units.MAX_CLUSTER_SIZE,
        help='Cluster size of new images in bytes: a power of two from 4 KiB to 2 MiB.',
    ),
    cfg.IntOpt(
        'compare_templates_after',
        default=86400,
        min=0,
        help='Seconds for which it counts that the data of a template were compared with their '
        'checksums. After that they are compared again before something is made on it, which takes '
        'a third of a second for each GiB that the template holds. 0: scrubs alone compare.',
    ),
]


def register_opts(conf: cfg.ConfigOpts) -> None:
    """Make ``conf.pcow.*`` available; may be called more than once."""
    conf.register_group(GROUP)
    conf.register_opts(OPTS, group=GROUP)


def list_opts() -> list[tuple[cfg.OptGroup, list[cfg.Opt]]]:
    """Entry point of ``oslo.config.opts``."""
    from oslo_privsep import priv_context

    helper = [option for option in priv_context.OPTS if option.name == 'helper_command']
    return [
        (GROUP, OPTS),
        (
            cfg.OptGroup(
                'pcow_privileged',
                title='the immutable flag of templates, for services that are not root',
            ),
            helper,
        ),
    ]


CONF = cfg.CONF
register_opts(CONF)
