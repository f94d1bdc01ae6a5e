# SPDX-License-Identifier: Apache-2.0
"""What a device holds at one moment, for programs that read it for a while; its guest may go on meanwhile."""

from collections.abc import Iterator
import contextlib
import uuid as uuidlib

from pcow_driver import attached
from pcow_driver import device
from pcow_driver import nbd
from pcow_driver import pool as pool_module
from pcow_driver import removal


@contextlib.contextmanager
def serve(pool: pool_module.Pool, name: str) -> Iterator[str]:
    """The URI by which NBD clients read the data of a device as it is now, while the block runs.

    It is a snapshot of the image that goes afterwards, also if this process is killed (:func:`pcow_driver.removal.collect`).

    :raises ImageNotFound:
    :raises DeviceInvalid: the image has no info block
    :raises ToolFailed: something that is no running domain writes to the image
    """
    path, snapshot = pool.existing_path(name), f'frozen-{uuidlib.uuid4()}'
    with contextlib.ExitStack() as stack:
        stack.callback(_release, pool, name, snapshot)
        with removal.lock(pool, name):
            removal.mark_snapshot(pool, name, snapshot)
            attached.snapshot_create(path, snapshot)
            window = device.window(path, snapshot=snapshot, force_share=True)
            uri = stack.enter_context(nbd.serve(path, window=window, snapshot=snapshot))
        yield uri


def _release(pool: pool_module.Pool, name: str, snapshot: str) -> None:
    with removal.lock(pool, name):
        removal.collect_snapshot(pool, name, snapshot)
