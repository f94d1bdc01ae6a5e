# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a VM: from QEMU if it runs, else from its images.

Reading changes nothing, and may be done from several threads, each with a connection of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import os

from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.images import image
from pcow_driver.images import model as image_model
from pcow_driver.vm import machine
from pcow_driver.vm import model

# What the next QEMU gives its name, or reverts all images to; see migration/pcow/checkpoint.h
_TAKING, _REVERTING = '.checkpoint-', '.loading-checkpoint-'


@dataclasses.dataclass(frozen=True)
class Parts:
    """A checkpoint of a VM that is off: its snapshot in each image, by the path of that."""

    home: image_model.Snapshot  # in the image that is the RAM
    snapshots: dict[str, image_model.Snapshot]  # with that of the RAM, which is the first


def checkpoints(found: machine.Machine) -> list[model.Checkpoint]:
    """All of them, in order of creation.

    :raises DomainInvalid: its RAM is no image
    :raises QmpFailed: the same of one that runs, as QEMU says it
    :raises LibvirtFailed:
    """
    if found.active():
        return [model.Checkpoint.from_json(item) for item in found.query('query-pcow-checkpoints')]
    return _described(*_read(found))


def find_parts(found: machine.Machine, name: str) -> Parts:
    """The checkpoint ``name`` of a domain that is off.

    :raises DomainInvalid: its RAM is no image
    :raises CheckpointNotFound:
    """
    _all, parts = _read(found)
    for one in parts:
        if one.home.name == name:
            return one
    raise exception.CheckpointNotFound(domain=found.name, name=name)


def check_exists(found: machine.Machine, name: str) -> None:
    """Before a domain that is off is started for a checkpoint.

    :raises DomainInvalid: its RAM is no image
    :raises CheckpointNotFound: also a QEMU that first finishes what another one has left will not
        find it
    """
    homes, parts = _read(found)
    if not any(map(is_unfinished, homes)) and all(one.home.name != name for one in parts):
        raise exception.CheckpointNotFound(domain=found.name, name=name)


def current(found: Sequence[model.Checkpoint]) -> model.Checkpoint | None:
    """The one that the VM has gone on from."""
    return next((one for one in found if one.current), None)


def has_unfinished(found: machine.Machine) -> bool:
    """Of a domain that is off: whether the next QEMU finishes a checkpoint, which is durable and is
    not among :func:`checkpoints` before.

    :raises DomainInvalid: its RAM is no image
    """
    homes, _parts = _read(found)
    return any(map(is_unfinished, homes))


def stands_on_unfinished(found: machine.Machine) -> bool:
    """The same, and the VM stands on that one then.

    :raises DomainInvalid: its RAM is no image
    """
    homes, _parts = _read(found)
    unfinished = [home for home in homes if is_unfinished(home)]
    if any(home.name.startswith(_REVERTING) for home in unfinished):
        return True
    last = _nearest(
        homes,
        next((home for home in homes if home.current), None),
        lambda home: is_checkpoint(home) or home in unfinished,
    )
    return last is not None and last in unfinished


def branches(found: list[model.Checkpoint]) -> Iterator[tuple[int, model.Checkpoint]]:
    """Each checkpoint after the one that it descends from, and how far it is from its root."""
    known = {one.name for one in found}
    children: dict[str | None, list[model.Checkpoint]] = {}
    for one in found:
        children.setdefault(one.parent if one.parent in known else None, []).append(one)
    left = [(0, one) for one in reversed(children.get(None, []))]
    while left:
        depth, one = left.pop()
        yield depth, one
        left += [(depth + 1, child) for child in reversed(children.get(one.name, []))]


def _read(found: machine.Machine) -> tuple[list[image_model.Snapshot], list[Parts]]:
    """The snapshots of the image that is the RAM, and what of them is a checkpoint."""
    ram = found.ram()
    if ram is None:
        raise exception.DomainInvalid(
            domain=found.name,
            reason=(
                'its RAM is no pcow image, so it has no checkpoints: define it with '
                'pcowctl domain-xml --ram'
            ),
        )
    lists = {path: image.snapshot_list(path, force_share=True) for path in found.writable()}
    homes = lists[ram]
    return homes, [
        Parts(
            home=home,
            snapshots={
                path: snapshot
                for path, snapshots in lists.items()
                for snapshot in snapshots
                if (snapshot.name, snapshot.date) == (home.name, home.date)
            },
        )
        for home in homes
        if is_checkpoint(home)
    ]


def is_checkpoint(home: image_model.Snapshot) -> bool:
    """What is in the making, or half gone, is none: the next QEMU finishes it, or takes it back."""
    return home.vm_state_size > 0 and not home.name.startswith(names.SNAPSHOT_MARKS)


def is_unfinished(home: image_model.Snapshot) -> bool:
    """It is one as soon as a QEMU has it open: all that it is made of is there."""
    return home.vm_state_size > 0 and home.name.startswith((_TAKING, _REVERTING))


def is_unfinished_in(ram: str) -> bool:
    """Whether the image that is the RAM of a VM has an unfinished one; False: it is not there."""
    return os.path.exists(ram) and any(
        map(is_unfinished, image.snapshot_list(ram, force_share=True))
    )


def reverts_at_start(ram: str) -> bool:
    """Whether a checkpoint of a VM that is off was being gone back to: the next QEMU takes all its
    images there. False: the image that is its RAM is not there.
    """
    return os.path.exists(ram) and any(
        is_unfinished(home) and home.name.startswith(_REVERTING)
        for home in image.snapshot_list(ram, force_share=True)
    )


def _nearest(
    homes: Sequence[image_model.Snapshot],
    first: image_model.Snapshot | None,
    wanted: Callable[[image_model.Snapshot], bool],
) -> image_model.Snapshot | None:
    """The first one of that kind on the way from there to the root."""
    by_id = {home.id: home for home in homes}
    while first is not None and not wanted(first):
        first = by_id.get(first.parent_id or '')
    return first


def _described(homes: list[image_model.Snapshot], parts: list[Parts]) -> list[model.Checkpoint]:
    by_id = {home.id: home for home in homes}
    now = _nearest(homes, next((home for home in homes if home.current), None), is_checkpoint)
    found = []
    for one in parts:
        parent = _nearest(homes, by_id.get(one.home.parent_id or ''), is_checkpoint)
        found.append(
            model.Checkpoint(
                name=one.home.name,
                date=one.home.date,
                parent=None if parent is None else parent.name,
                current=one.home is now,
                state_size=one.home.vm_state_size,
                data_size=sum(item.data_size for item in one.snapshots.values()),
                shared_size=sum(item.shared_size for item in one.snapshots.values()),
                delete_frees=sum(item.delete_frees for item in one.snapshots.values()),
            )
        )
    return found
