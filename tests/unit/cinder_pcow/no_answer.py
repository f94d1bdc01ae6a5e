# SPDX-License-Identifier: Apache-2.0
"""A program: what cinder-volume does with volumes of a guest whose QEMU does not answer, while it
has other work.

Its arguments are a directory with a pool ``one``, and ``green`` or ``native``. It prints what it is
told, as JSON.
"""

import sys

if sys.argv[2] == 'green':
    import eventlet

    eventlet.monkey_patch()

from collections.abc import Callable
import contextlib
import faulthandler
import json
import os
from pathlib import Path
import threading
import time
import types
from typing import Any
import uuid

from cinder.volume import configuration
from cinder.volume import driver as cinder_driver
from oslo_config import cfg

from cinder_pcow import driver
from pcow_driver.common import conf
from pcow_driver.common import tool
from tests.unit import standing_qemu
from tests.unit.pcow_driver import base

DIRECTORY, MODE = sys.argv[1:]
LIMIT = 2  # seconds
GROUP, HOST = 'pcow-backend', f'host-{os.getpid()}@pcow-backend'


def make_driver() -> driver.PcowDriver:
    cfg.CONF([], project='cinder', default_config_files=[])
    conf.register_opts(cfg.CONF)
    for name, value in {
        'state_path': os.path.join(DIRECTORY, 'state'),
        'conversion_dir': DIRECTORY,
        'libvirt_timeout': LIMIT,
    }.items():
        cfg.CONF.set_override(name, value, 'pcow')
    made = driver.PcowDriver(
        host=HOST,
        configuration=configuration.Configuration(cinder_driver.volume_opts, config_group=GROUP),
    )
    made.do_setup(None)
    made.check_for_setup_error()
    return made


def record(**values: Any) -> Any:
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


def snapshot_of(volume: Any) -> Any:
    identity = str(uuid.uuid4())
    return types.SimpleNamespace(
        id=identity, name=f'_snapshot-{identity}', volume=volume, volume_id=volume.id
    )


class Hub:
    """The longest time for which another thread of this process did not get its turn; seconds."""

    def __init__(self) -> None:
        self.longest, self._over = 0.0, False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._over:
            time.sleep(0.01)
            now = time.monotonic()
            self.longest, last = max(self.longest, now - last), now

    def stop(self) -> None:
        self._over = True
        self._thread.join()


def refused(operation: Callable[[], object]) -> tuple[str, float]:
    begun = time.monotonic()
    try:
        operation()
    except Exception as e:
        return f'{type(e).__name__}: {e}', time.monotonic() - begun
    return 'done', time.monotonic() - begun


def main() -> None:
    made = make_driver()
    volumes = [record() for _ in range(2)]
    for volume in volumes:
        made.create_volume(volume)
    volume = volumes[0]
    there = snapshot_of(volume)
    made.create_snapshot(there)
    paths = [os.path.join(DIRECTORY, 'one', f'{one.name}.pcow') for one in volumes]
    pcow_io = tool.find('pcow_io')
    told: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        for path in paths:
            stack.enter_context(base.opened(path, Path(pcow_io)))
        operations = {
            'create': lambda: made.create_snapshot(snapshot_of(volume)),
            'delete': lambda: made.delete_snapshot(there),
            'clone': lambda: made.create_cloned_volume(record(), volume),
            'group': lambda: made.groups.create_snapshot([snapshot_of(one) for one in volumes]),
        }
        hub = Hub()
        for name, operation in operations.items():
            qemu = standing_qemu.StandingQemu(*paths)
            standing_qemu.install(qemu)
            told[name] = refused(operation)
            qemu.go_on()
        qemu = standing_qemu.StandingQemu(*paths)
        standing_qemu.install(qemu)
        at_once = told['at once'] = list[tuple[str, float]]()
        # each keeps the others out of the image as long as it waits
        threads = [
            threading.Thread(target=lambda work=one: at_once.append(refused(work)))
            for one in operations.values()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        qemu.go_on()
        hub.stop()
        told['longest'] = hub.longest
    # nobody holds anything any more
    for one in (there, snapshot_of(volume)):
        made.delete_snapshot(one)
    clone = record()
    made.create_cloned_volume(clone, volume)
    for one in (clone, *volumes):
        made.delete_volume(one)
    told['locks'] = os.listdir(os.path.join(DIRECTORY, 'state', 'locks'))
    told['left'] = [
        name for name in os.listdir(os.path.join(DIRECTORY, 'one')) if name.endswith('.pcow')
    ]
    print(json.dumps(told))


faulthandler.dump_traceback_later(60, exit=True)
main()
