# SPDX-License-Identifier: Apache-2.0
"""What ``pcow-img ... --output=json`` prints, as typed values.  Sizes and offsets are bytes."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

from pcow_driver.common import exception
from pcow_driver.common import text

PERSISTENCE_CLASSES = ('volatile', 'page-cache', 'pmem')


class Reader:
    """Typed access to a JSON object from a tool.

    :raises ToolOutputInvalid: from every method, when a field is missing or of another type
    """

    def __init__(self, value: Any, what: str, tool: str = 'pcow-img') -> None:
        self.what = what
        self.tool = tool
        if not isinstance(value, dict):
            raise self.error('not an object')
        self.fields: dict[str, Any] = value

    def error(self, reason: str) -> exception.ToolOutputInvalid:
        return exception.ToolOutputInvalid(tool=self.tool, reason=f'{self.what}: {reason}')

    def _get(self, key: str, kind: type, default: Any) -> Any:
        value = self.fields.get(key)
        if value is None and default is not ...:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(f'{key} is {value!r}')
        return value

    def integer(self, key: str, default: Any = ...) -> int:
        value: int = self._get(key, int, default)
        if value < 0:
            raise self.error(f'{key} is {value}')
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.fields.get(key) is None else self.integer(key)

    def string(self, key: str) -> str:
        """Without what a terminal would obey: a guest that has broken out of its QEMU may have
        written it.
        """
        return text.printable(self._get(key, str, ...))

    def optional_string(self, key: str) -> str | None:
        return None if self.fields.get(key) is None else self.string(key)

    def boolean(self, key: str, default: Any = ...) -> bool:
        value: bool = self._get(key, bool, default)
        return value

    def array(self, key: str) -> list[Any]:
        value: list[Any] = self._get(key, list, [])
        return value

    def object(self, key: str) -> Reader:
        return Reader(self._get(key, dict, ...), f'{self.what}.{key}', self.tool)

    def date(self) -> datetime.datetime:
        """Of date-sec and date-nsec, in UTC; microseconds are the least that it knows."""
        seconds, nanoseconds = self.integer('date-sec'), self.integer('date-nsec')
        try:
            date = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
        except (OverflowError, ValueError, OSError):
            raise self.error(f'date-sec is {seconds}') from None
        return date.replace(microsecond=min(nanoseconds // 1000, 999999))

    def persistence(self) -> str:
        value = self.string('persistence')
        if value not in PERSISTENCE_CLASSES:
            raise self.error(f'unknown persistence class {value!r}')
        return value


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A frozen layer of an image."""

    id: str
    name: str
    parent_id: str | None  # nearest snapshot it descends from
    date: datetime.datetime  # with time zone UTC
    virtual_size: int
    vm_state_size: int
    data_size: int  # guest pages valid in its own layer
    current: bool  # the active layer stands on it
    # guest pages that it shows and an older snapshot of the file holds
    shared_size: int = 0
    delete_frees: int = 0  # what deleting it now would give back
    pinned: bool = False  # an image was made on it

    @classmethod
    def from_json(cls, value: Any) -> Snapshot:
        data = Reader(value, 'snapshot')
        return cls(
            id=data.string('id'),
            name=data.string('name'),
            parent_id=data.optional_string('parent-id'),
            date=data.date(),
            virtual_size=data.integer('virtual-size', 0),
            vm_state_size=data.integer('vm-state-size', 0),
            data_size=data.integer('data-size', 0),
            current=data.boolean('current', False),
            shared_size=data.integer('shared-size', 0),
            delete_frees=data.integer('delete-frees', 0),
            pinned=data.boolean('pinned', False),
        )


@dataclasses.dataclass(frozen=True)
class ImageInfo:
    """One file of a chain."""

    filename: str
    virtual_size: int  # what the guest sees
    actual_size: int  # blocks that the pool holds for the file
    cluster_size: int
    format: int  # 1 or 2
    uuid: str
    generation: int
    sealed: bool  # a template
    data_size: int  # guest pages valid in the active layer
    free_size: int  # slabs of the file that no layer owns
    file_size: int
    chain_depth: int  # files, this one included
    persistence: str  # one of PERSISTENCE_CLASSES
    base_filename: str | None  # as recorded in the image
    base_path: str | None  # where that is
    base_uuid: str | None
    base_snapshot: str | None
    snapshots: tuple[Snapshot, ...]

    @classmethod
    def from_json(cls, value: Any) -> ImageInfo:
        data = Reader(value, 'info')
        if data.string('format') not in ('pcow', 'pcow1'):
            raise data.error(f'format is {data.string("format")!r}')
        own = data.object('format-specific').object('data')
        return cls(
            filename=data.string('filename'),
            virtual_size=data.integer('virtual-size'),
            actual_size=data.integer('actual-size'),
            cluster_size=data.integer('cluster-size'),
            format=own.integer('format'),
            uuid=own.string('uuid'),
            generation=own.integer('generation'),
            sealed=own.boolean('sealed'),
            data_size=own.integer('data-size'),
            free_size=own.integer('free-size'),
            file_size=own.integer('file-size'),
            chain_depth=own.integer('chain-depth'),
            persistence=own.persistence(),
            base_filename=data.optional_string('backing-filename'),
            base_path=data.optional_string('full-backing-filename'),
            base_uuid=own.optional_string('base-uuid'),
            base_snapshot=own.optional_string('base-snapshot'),
            snapshots=tuple(Snapshot.from_json(item) for item in data.array('snapshots')),
        )


@dataclasses.dataclass(frozen=True)
class Summary:
    """What the tables of one image say, without its base."""

    uuid: str
    virtual_size: int  # what the guest sees
    actual_size: int  # blocks that the pool holds for the file
    may_grow: int  # most that its guest can add to that; 0: a template
    may_grow_frozen: int  # the same, after a snapshot was taken
    sealed: bool  # a template
    snapshots: int
    base_filename: str | None
    base_uuid: str | None
    base_snapshot_id: int  # 0: the active layer of the base

    @classmethod
    def from_json(cls, value: Any) -> Summary:
        data = Reader(value, 'list')
        return cls(
            uuid=data.string('uuid'),
            virtual_size=data.integer('virtual-size'),
            actual_size=data.integer('actual-size'),
            may_grow=data.integer('may-grow'),
            may_grow_frozen=data.integer('may-grow-frozen'),
            sealed=data.boolean('sealed'),
            snapshots=data.integer('snapshots'),
            base_filename=data.optional_string('base'),
            base_uuid=data.optional_string('base-uuid'),
            base_snapshot_id=data.integer('base-snapshot-id', 0),
        )


@dataclasses.dataclass(frozen=True)
class Total:
    """Of the images of a directory that are not sealed, or were not when they could be read."""

    actual_size: int  # blocks that the pool holds for them
    may_grow: int  # most that their guests can add to that
    may_grow_frozen: int  # the same, after snapshots were taken; of the unreadable their size
    unreadable: int  # how many cannot be read, sealed or not

    @classmethod
    def from_json(cls, value: Any) -> Total:
        data = Reader(value, 'list --total')
        return cls(
            data.integer('actual-size'),
            data.integer('may-grow'),
            data.integer('may-grow-frozen'),
            data.integer('unreadable'),
        )


@dataclasses.dataclass(frozen=True)
class Extent:
    """A guest range of equal status."""

    start: int
    length: int
    depth: int  # file of the chain that holds it, 0 = top
    present: bool  # some layer of the chain holds it
    zero: bool  # reads as zeros
    data: bool  # backed by allocated blocks
    offset: int | None  # where in that file
    filename: str | None

    @classmethod
    def from_json(cls, value: Any) -> Extent:
        data = Reader(value, 'map')
        return cls(
            start=data.integer('start'),
            length=data.integer('length'),
            depth=data.integer('depth'),
            present=data.boolean('present'),
            zero=data.boolean('zero'),
            data=data.boolean('data'),
            offset=data.integer('offset') if 'offset' in data.fields else None,
            filename=data.optional_string('filename'),
        )


@dataclasses.dataclass(frozen=True)
class Finding:
    kind: str  # corruption, leak or note
    message: str


@dataclasses.dataclass(frozen=True)
class Loss:
    """What a repair gives up, or would."""

    kind: str  # data, state, snapshot, unknown
    layer: int  # 0: not known
    snapshot: str | None
    guest_offset: int | None  # None: not known
    length: int

    @classmethod
    def from_json(cls, value: Any) -> Loss:
        data = Reader(value, 'check.lost')
        offset = data.integer('guest-offset') if 'guest-offset' in data.fields else None
        return cls(
            kind=data.string('kind'),
            layer=data.integer('layer', 0),
            snapshot=data.optional_string('snapshot'),
            guest_offset=offset,
            length=data.integer('length'),
        )


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """What a check found in one file; ``leaks`` and ``slabs`` count slabs."""

    filename: str
    corruptions: int
    corruptions_fixed: int
    certain: bool  # nobody wrote meanwhile: what was found is no mistake, and all was looked at
    corruptions_certain: int  # of them those that no writing meanwhile looks like
    leaks: int
    leaks_fixed: int
    leaks_doubtful: int  # of the leaks: what may hold data
    # guest data and VM state that repair gives up, or would; None: some, and nothing tells how much
    lost_size: int | None
    lost_size_is: str  # exact, at-most, estimate, unknown
    slabs: int
    slabs_used: int
    findings: tuple[Finding, ...]
    lost: tuple[Loss, ...]  # the first 1000
    lost_left_out: int
    refused: bool  # nothing was repaired, as something would be lost
    rescue: str | None  # the file that keeps what a repair has dropped
    # of the data, if that was to be compared with its checksums; bytes
    data_checked: bool = False
    data_verified: int = 0
    data_damaged: int = 0
    data_unjudged: int = 0
    data_without: int = 0

    @property
    def clean(self) -> bool:
        return self.corruptions == self.corruptions_fixed and self.leaks == self.leaks_fixed

    @property
    def corrupted(self) -> bool:
        """Space that nothing uses is no damage, unless it may hold data."""
        return self.corruptions > self.corruptions_fixed or (
            bool(self.leaks_doubtful) and self.leaks > self.leaks_fixed
        )

    @property
    def damage(self) -> str | None:
        """The first corruption in words; None if there is none."""
        if not self.corrupted:
            return None
        kind = 'corruption' if self.corruptions > self.corruptions_fixed else 'leak'
        found = [one.message for one in self.findings if one.kind == kind]
        return found[0] if found else 'it is damaged'

    @classmethod
    def from_json(cls, value: Any) -> CheckResult:
        data = Reader(value, 'check')
        findings = [Reader(item, 'check.findings') for item in data.array('findings')]
        return cls(
            filename=data.string('filename'),
            corruptions=data.integer('corruptions', 0),
            corruptions_fixed=data.integer('corruptions-fixed', 0),
            certain=data.boolean('certain'),
            corruptions_certain=data.integer('corruptions-certain', 0),
            leaks=data.integer('leaks', 0),
            leaks_fixed=data.integer('leaks-fixed', 0),
            leaks_doubtful=data.integer('leaks-doubtful', 0),
            lost_size=data.optional_integer('lost-size'),
            lost_size_is=data.optional_string('lost-size-is') or 'exact',
            slabs=data.integer('slabs', 0),
            slabs_used=data.integer('slabs-used', 0),
            findings=tuple(
                Finding(item.string('kind'), item.string('message')) for item in findings
            ),
            lost=tuple(Loss.from_json(item) for item in data.array('lost')),
            lost_left_out=data.integer('lost-left-out', 0),
            refused=data.boolean('refused', False),
            rescue=data.optional_string('rescue'),
            data_checked=data.boolean('data-checked', False),
            data_verified=data.integer('data-verified', 0),
            data_damaged=data.integer('data-damaged', 0),
            data_unjudged=data.integer('data-unjudged', 0),
            data_without=data.integer('data-without-checksum', 0),
        )


@dataclasses.dataclass(frozen=True)
class Measure:
    """Sizes of a file before it is made."""

    required: int
    fully_allocated: int

    @classmethod
    def from_json(cls, value: Any) -> Measure:
        data = Reader(value, 'measure')
        return cls(
            required=data.integer('required'), fully_allocated=data.integer('fully-allocated')
        )
