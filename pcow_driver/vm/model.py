# SPDX-License-Identifier: Apache-2.0
"""What QEMU says of checkpoints, as typed values.  Sizes are bytes, times nanoseconds."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

from pcow_driver.images import model


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """One that can be reverted to; sizes are sums over the images of the VM."""

    name: str
    date: datetime.datetime  # with time zone UTC
    parent: str | None  # name of the nearest checkpoint that it descends from
    current: bool  # the VM has gone on from it
    state_size: int  # state of the devices, in the image that is the RAM
    data_size: int  # pages of the guest that it keeps itself
    shared_size: int  # pages that it shows and an older snapshot keeps
    delete_frees: int  # what deleting it now would give back

    @classmethod
    def from_json(cls, value: Any) -> Checkpoint:
        """:raises ToolOutputInvalid:"""
        data = model.Reader(value, 'query-pcow-checkpoints', 'QEMU')
        return cls(
            name=data.string('name'),
            date=data.date(),
            parent=data.optional_string('parent'),
            current=data.boolean('current'),
            state_size=data.integer('state-size'),
            data_size=data.integer('data-size'),
            shared_size=data.integer('shared-size'),
            delete_frees=data.integer('delete-frees'),
        )


@dataclasses.dataclass(frozen=True)
class Taken:
    """How a checkpoint was taken."""

    pause: int  # ns that the guest stood
    durable: int  # ns from the command until nothing but the loss of the pool takes it away
    state_size: int  # bytes

    @classmethod
    def from_json(cls, value: Any) -> Taken:
        """:raises ToolOutputInvalid:"""
        data = model.Reader(value, 'pcow-checkpoint-create', 'QEMU')
        return cls(
            pause=data.integer('pause'),
            durable=data.integer('durable'),
            state_size=data.integer('state-size'),
        )


@dataclasses.dataclass(frozen=True)
class Reverted:
    """How a VM went back to a checkpoint."""

    time: int  # ns that QEMU took
    started: bool  # it was off, and has a new QEMU


@dataclasses.dataclass(frozen=True)
class Forked:
    """A domain that goes on from a checkpoint of another one."""

    name: str
    images: tuple[str, ...]  # paths: its RAM first
    time: int  # ns from the first of its images to its first instruction
