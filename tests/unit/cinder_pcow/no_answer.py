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
from typing import Any

from pcow_driver.common import tool
from tests.unit import standing_qemu
from tests.unit.cinder_pcow import records
from tests.unit.pcow_driver import base

DIRECTORY, MODE = sys.argv[1:]
LIMIT = 2  # seconds


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
    made = records.make_driver(DIRECTORY, libvirt_timeout=LIMIT)
    volumes = [records.volume() for _ in range(2)]
    for volume in volumes:
        made.create_volume(volume)
    volume = volumes[0]
    there = records.snapshot_of(volume)
    made.create_snapshot(there)
    paths = [os.path.join(DIRECTORY, 'one', f'{one.name}.pcow') for one in volumes]
    pcow_io = tool.find('pcow_io')
    told: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        for path in paths:
            stack.enter_context(base.opened(path, Path(pcow_io)))
        operations = {
            'create': lambda: made.create_snapshot(records.snapshot_of(volume)),
            'delete': lambda: made.delete_snapshot(there),
            'clone': lambda: made.create_cloned_volume(records.volume(), volume),
            'group': lambda: made.groups.create_snapshot(
                [records.snapshot_of(one) for one in volumes]
            ),
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
    for one in (there, records.snapshot_of(volume)):
        made.delete_snapshot(one)
    clone = records.volume()
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
