# SPDX-License-Identifier: Apache-2.0
"""Options of a backend section of cinder.conf; what is not Cinder's is in the group ``[pcow]``
(:mod:`pcow_driver.common.conf`).
"""

from oslo_config import cfg

OPTS: list[cfg.Opt] = [
    cfg.ListOpt(
        'pcow_pools',
        default=[],
        help='Names of the pools of this host, as "pcowctl pool list" shows them, in which volumes '
        'are made. '
        'Empty: all of them.',
    ),
    cfg.StrOpt(
        'pcow_compute_host',
        help='Name under which nova-compute of this machine is known ([DEFAULT] host in its '
        'nova.conf). Needed only if it '
        "is neither the machine's host name nor the host of this service.",
    ),
    cfg.StrOpt(
        'pcow_migration_address',
        help='Address under which other hosts reach this one by SSH, to move volumes here; '
        'default: [DEFAULT] my_ip.',
    ),
    cfg.IntOpt(
        'pcow_max_chain',
        default=16,
        min=1,
        max=100,
        help='Longest chain of files that a clone, or a volume made from a snapshot, may stand on, '
        'itself included. '
        'What would be longer is copied into one file of its own; 1 copies always.',
    ),
]


def list_opts() -> list[tuple[str, list[cfg.Opt]]]:
    """Entry point of ``oslo.config.opts``."""
    return [('backend_defaults', OPTS)]
