# SPDX-License-Identifier: Apache-2.0
"""Taking, reverting to and deleting a checkpoint of a VM: a libvirt domain, or one without libvirt.

QEMU does the work while it runs, and refuses in words what cannot be: nothing has changed then. Two
callers at once come one after the other. A connection of libvirt is one
thread's.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

from pcow_driver.common import exception
from pcow_driver.common import locks
from pcow_driver.common import names
from pcow_driver.images import image
from pcow_driver.images import model as image_model
from pcow_driver.pools import room
from pcow_driver.virt import libvirt_host
from pcow_driver.vm import machine
from pcow_driver.vm import model
from pcow_driver.vm import state_room
from pcow_driver.vm import tree


def take(
    found: machine.Machine, name: str, *, last: bool = False, max_wait: int | None = None
) -> model.Taken:
    """Keep what the VM is at this instant; the guest goes on, or stays paused if it was.

    :param max_wait: milliseconds to wait for disks that it only reads; by default QEMU's, 100
    :param last: the guest stores nothing after it, so it needs no room for that; its state has what
        is kept for it, or what the guest has not stored
    :raises InvalidName:
    :raises DomainInvalid: it does not run, or its RAM is no image
    :raises NoRoom: the operator's limits have no room for what the guest can then write once more,
        and for the state
    :raises QmpFailed: the name exists, or QEMU cannot, and says why
    """
    names.check_new_snapshot_name(name)
    if not found.active():
        raise exception.DomainInvalid(
            domain=found.name,
            reason=(
                'it does not run, so there is no state of it to keep; a snapshot of an image is '
                'pcowctl snapshot create'
            ),
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(_alone(found))
        if not last:
            stack.enter_context(
                room.for_long_snapshot(
                    *found.writable(), beside=functools.partial(state_room.of_state, found)
                )
            )
        reply = _command(found, 'pcow-checkpoint-create', name, max_wait)
    return model.Taken.from_json(reply)


def revert(found: machine.Machine, name: str, *, max_wait: int | None = None) -> model.Reverted:
    """Go back to a checkpoint, in the same QEMU; what the guest has stored since is dropped, and
    every other branch of the tree stays.

    A guest that runs goes on from there, one that is paused, or has crashed, is paused. A domain
    that is off is started, paused, and runs when it is there; if that fails it is off again.

    :param max_wait: milliseconds for which a guest that runs may stand for what was asked of disks
        that it only reads; by default QEMU's, 100
    :raises InvalidName:
    :raises DomainInvalid: its RAM is no image
    :raises CheckpointNotFound: it is off, and has none of that name
    :raises QmpFailed: QEMU cannot, and says why
    """
    names.check_snapshot_name(name)
    with _alone(found):
        if found.active():
            return _revert(found, name, started=False, max_wait=max_wait)
        return _start_at(found, name, run=True)


def start_at(found: machine.Machine, name: str | None, *, run: bool = True) -> str:
    """As :func:`revert` of a domain that is off; one that somebody has started is left alone.

    :param name: None: the one that it stands on when QEMU has finished what another one left, which
        no one else can name
    :param run: False: it stays paused
    :return: the name
    :raises DomainInvalid: it is not off; or it stands on none
    """
    with _alone(found):
        if found.active():
            raise exception.DomainInvalid(domain=found.name, reason='it runs already')
        if name is not None:
            _start_at(found, name, run=run)
            return name
        with found.started(run=run):
            name = current_name(found)
            _revert(found, name, started=True)
        return name


def current_name(found: machine.Machine) -> str:
    """Of the checkpoint that it stands on.

    :raises DomainInvalid: it stands on none
    """
    last = tree.current(tree.checkpoints(found))
    if last is None:
        raise exception.DomainInvalid(domain=found.name, reason='it stands on no checkpoint')
    return last.name


def _start_at(found: machine.Machine, name: str, *, run: bool) -> model.Reverted:
    tree.check_exists(found, name)
    with found.started(run=run):
        return _revert(found, name, started=True)


def delete(found: machine.Machine, name: str) -> int:
    """Delete a checkpoint with its part in each image; what still needs its data keeps it.

    :return: bytes given back to the pools
    :raises InvalidName:
    :raises DomainInvalid: its RAM is no image
    :raises CheckpointNotFound: it is off, and has none of that name
    :raises QmpFailed: QEMU cannot, and says why
    :raises ToolFailed: it is off, and images stand on the checkpoint, or somebody has one open
    """
    names.check_snapshot_name(name)
    with _alone(found):
        if found.active():
            reply = _command(found, 'pcow-checkpoint-delete', name)
            return _reader(reply, 'pcow-checkpoint-delete').integer('freed')
        parts = tree.find_parts(found, name).snapshots
        for path, snapshot in parts.items():
            if snapshot.pinned:
                image.snapshot_unpin(path, name)
        # that of the RAM first: without it the others are snapshots of their images, and no more
        return sum(image.snapshot_delete(path, name) for path in parts)


def _alone(found: machine.Machine) -> contextlib.AbstractContextManager[None]:
    """Who works on checkpoints of a domain waits for who does: QEMU would refuse the second one,
    and pcow takes some by itself. A user of a service who holds one keeps no other user waiting.
    """
    return locks.lock(f'vm-{found.uuid}', own=True)


def _revert(
    found: machine.Machine, name: str, *, started: bool, max_wait: int | None = None
) -> model.Reverted:
    reply = _command(found, 'pcow-checkpoint-revert', name, max_wait)
    time = _reader(reply, 'pcow-checkpoint-revert').integer('time')
    return model.Reverted(time=time, started=started)


def _reader(reply: Any, command: str) -> image_model.Reader:
    return image_model.Reader(reply, command, 'QEMU')


def _command(found: machine.Machine, command: str, name: str, max_wait: int | None = None) -> Any:
    """:raises DomainInvalid: RAM is an image in the XML, and not in QEMU"""
    limit = {} if max_wait is None else {'max-wait': max_wait}
    try:
        return found.qmp(command, name=name, **limit)
    except exception.QmpFailed as e:
        ram = found.ram()
        # without a class nobody has answered
        if e.details.get('error_class') and ram is not None and not _has_open(found, ram):
            raise exception.DomainInvalid(
                domain=found.name,
                reason=(
                    f'its RAM is not on {ram}, as the hook of libvirt has not run at its start: '
                    f'install etc/libvirt/hooks/qemu.d/pcow, and start it again'
                ),
            ) from None
        raise


def _has_open(found: machine.Machine, path: str) -> bool:
    files = libvirt_host.Files()
    for one in found.query():
        files.add(str(one.get('filename', '')))
    return os.path.realpath(path) in files
