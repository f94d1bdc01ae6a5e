# SPDX-License-Identifier: Apache-2.0
"""The real driver, and what Cinder's records of volumes and snapshots have of interest to it: for
programs that need neither Cinder's database nor its services.
"""

from __future__ import annotations

import os
import types
from typing import Any
import uuid

from cinder.volume import configuration
from cinder.volume import driver as cinder_driver
from oslo_config import cfg

from cinder_pcow import driver
from pcow_driver.common import conf

GROUP, HOST = 'pcow-backend', f'host-{os.getpid()}@pcow-backend'


def make_driver(directory: str, *, libvirt_timeout: int) -> driver.PcowDriver:
    cfg.CONF([], project='cinder', default_config_files=[])
    conf.register_opts(cfg.CONF)
    for name, value in {
        'state_path': os.path.join(directory, 'state'),
        'conversion_dir': directory,
        'libvirt_timeout': libvirt_timeout,
    }.items():
        cfg.CONF.set_override(name, value, 'pcow')
    made = driver.PcowDriver(
        host=HOST,
        configuration=configuration.Configuration(cinder_driver.volume_opts, config_group=GROUP),
    )
    made.do_setup(None)
    made.check_for_setup_error()
    return made


def volume(**values: Any) -> Any:
    identity = str(uuid.uuid4())
    return types.SimpleNamespace(
        id=identity,
        name=f'volume-{identity}',
        size=1,
        host=f'{HOST}#one',
        encryption_key_id=None,
        multiattach=False,
        volume_type_id=None,
        volume_type=None,
        migration_status=None,
        status='available',
        **values,
    )


def snapshot_of(found: Any) -> Any:
    identity = str(uuid.uuid4())
    return types.SimpleNamespace(
        id=identity, name=f'_snapshot-{identity}', volume=found, volume_id=found.id
    )
