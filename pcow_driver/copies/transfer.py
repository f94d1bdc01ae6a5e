# SPDX-License-Identifier: Apache-2.0
"""An image on its way to a pool of another host: as a stream of bytes, for SSH or any other pipe.

What travels is one file without its holes. It may stand on a template of the image service: a
template of one name holds the same on every host, so the receiver puts its own below. What stands
on anything else, is sealed itself, or has snapshots that others need, is sent as one file that
stands on nothing.

The stream is a line of JSON, which tells how much will come: the receiver sets that aside first, or
refuses. Then come pieces (offset and length, 8 bytes each in network order, and the data), then a
piece without data whose offset is the size of the file, then the SHA-256 of all that. An image
appears at the receiver when the stream has come to its end, was found whole and the image
undamaged; else nothing is left.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import struct
from typing import IO
from typing import Any

from oslo_log import log as logging

from pcow_driver.common import descriptors
from pcow_driver.common import durable
from pcow_driver.common import exception
from pcow_driver.common import immutable
from pcow_driver.common import names
from pcow_driver.common import units
from pcow_driver.common import workspace
from pcow_driver.copies import verify
from pcow_driver.images import image
from pcow_driver.images import image_locks
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import provisioned
from pcow_driver.pools import scrubs
from pcow_driver.pools import staging
from pcow_driver.snapshots import trash
from pcow_driver.templates import template
from pcow_driver.templates import template_cache
from pcow_driver.virt import notices

LOG = logging.getLogger(__name__)

KEPT = 'kept'  # what pcowctl says for a discard that is False
_FORMAT = 'pcow-stream-1'
_PIECE = struct.Struct('>QQ')
_CHUNK = 1 << 20
_MAX_HEADER = 4096
_MAX_SIZE = 1 << 50  # of a file; more than any pool
_REPLACED = 'somebody replaces it just now'
_MADE_ONE = 'it was made of damaged data where it was sent, and has no checksums'


@dataclasses.dataclass(frozen=True)
class _Header:
    """What a stream says of the image that follows."""

    base: str | None
    sealed: bool
    virtual: int
    stored: int  # bytes of the file that are no hole
    damaged: bool = False  # it is, and who sends it has accepted that

    def line(self) -> bytes:
        return json.dumps({'format': _FORMAT, **dataclasses.asdict(self)}).encode() + b'\n'


def template_below(path: str) -> str | None:
    """Name of the template of the image service on which an image stands, so that it can travel
    without it.

    :return: None if it is sent as a file that stands on nothing
    """
    info = image.info(path)
    if (
        info.base_filename is None
        or info.base_snapshot is not None
        or info.snapshots
        or info.chain_depth != 2
    ):
        return None
    if info.sealed:  # no other template can be put below it
        return None
    name = info.base_filename.removesuffix(names.IMAGE_SUFFIX)
    return None if template_cache.image_id(name) is None else template_cache.common_name(name)


def send(path: str, stream: IO[bytes], *, accept_damage: bool = False) -> None:
    """Write an image that nobody writes to. Damage that is found is known from then on, as if a
    scrub had found it, whether it is accepted or not.

    :param path: of an image or a template
    :param accept_damage: as it is, and the receiver takes it so, too
    :raises ImageNotFound:
    :raises ToolFailed: somebody writes to it, or it cannot be read
    :raises TransferFailed: it is damaged, or a file of its chain that is made one
    :raises ImageInUse: somebody begins to write to it just now, or replaces it
    """
    path = os.path.abspath(path)
    info, base, is_damaged = image.info(path), template_below(path), False
    with contextlib.ExitStack() as stack:
        if base is None and (info.base_filename is not None or info.snapshots):
            damaged = verify.damaged_in_chain(path)
            is_damaged = damaged is not None
            if not accept_damage:
                _refuse(path, damaged)
            path = stack.enter_context(_flat(path, sealed=info.sealed, checksums=not is_damaged))
            info = image.info(path)
        with _opened(path, info.uuid) as file:
            size = os.fstat(file.fileno()).st_size
            checked = scrubs.now()
            found = image.check_data(path)  # the receiver would refuse all that has come
            if found.damage is not None:
                is_damaged = True
                inode = os.fstat(file.fileno()).st_ino
                verify.keep(path, scrubs.of_check(inode, checked, found))
                if not accept_damage:
                    _refuse(path, verify.Damaged(path, found.damage))
            output = _Summed(stream)
            extents = list(_extents(file.fileno(), size))
            output.write(
                _Header(
                    base,
                    info.sealed,
                    info.virtual_size,
                    sum(length for _offset, length in extents),
                    is_damaged,
                ).line()
            )
            for offset, length in extents:
                output.write(_PIECE.pack(offset, length))
                for position in range(offset, offset + length, _CHUNK):
                    wanted = min(_CHUNK, offset + length - position)
                    data = os.pread(file.fileno(), wanted, position)
                    output.write(data.ljust(wanted, b'\0'))
            output.write(_PIECE.pack(size, 0))
            stream.write(output.digest())
            stream.flush()


def receive(pool: pool_module.Pool, name: str, stream: IO[bytes]) -> str:
    """Make the image that a stream holds, and return its path.

    :raises InvalidName:
    :raises ImageExists:
    :raises TransferFailed: the stream ends early or is damaged, or the template below is not in
        this pool
    :raises NoRoom: the operator's limits have no room for it
    :raises ToolFailed: what has arrived is no sound image
    """
    with staging.building(pool, name) as part, contextlib.ExitStack() as stack:
        header, file = _store(pool, name, part, stream, stack)
        _check_arrived(pool, name, part, header)  # reads all of it: nobody waits for that
        with pool.lock():
            if header.base is not None:  # of the same name; the uuid is this host's
                image.rebase(part, pool.existing_path(header.base), unsafe=True)
            info = image.info(part)
            if (info.sealed, info.virtual_size) != (header.sealed, header.virtual) or (
                header.base is None
            ) != (info.base_filename is None):
                raise exception.TransferFailed(
                    name=name, reason='the image is not what the stream said of it'
                )
            pool.check_room(0)  # what it needs was set aside
            target = pool.image_path(name)
            # it is an image: who may read those may read this one
            os.fchmod(file.fileno(), durable.private_mode())
            staging.finish(pool, name, part)
    if header.sealed:
        template.protect(pool, target)  # not before: its other name could not be deleted
    return target


def discard(pool: pool_module.Pool, name: str) -> bool:
    """Delete what :func:`receive` has made, or is making: that fails then. Done also if there is
    nothing.

    :return: False if clones keep some of it
    :raises ImageInUse: somebody has it open
    """
    return trash.delete_image(pool, name)


class _Summed:
    """Writes, and remembers the sum."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._sum = stream, hashlib.sha256()

    def write(self, data: bytes) -> None:
        self._sum.update(data)
        self._stream.write(data)

    def digest(self) -> bytes:
        return self._sum.digest()


@contextlib.contextmanager
def _opened(path: str, uuid: str) -> Iterator[IO[bytes]]:
    """The image that was looked at, and that nobody writes to meanwhile. Who may write to its
    directory may have put another file of root's under its name since.

    :raises ImageInUse:
    """
    try:
        descriptor = descriptors.open_file(path)
    except OSError:
        raise exception.ImageInUse(path=path, reason=_REPLACED) from None
    with open(descriptor, 'rb') as file:
        image_locks.read_active(descriptor, path)
        if immutable.uuid_of(descriptor) != uuid:
            raise exception.ImageInUse(path=path, reason=_REPLACED)
        yield file


def _check_arrived(pool: pool_module.Pool, name: str, part: str, header: _Header) -> None:
    """The checksums of its data came along. Damage that is accepted is known from the beginning, as
    if a scrub had found it.

    :raises TransferFailed:
    """
    inode, checked, found = os.stat(part).st_ino, scrubs.now(), image.check_data(part)
    if found.damage is None and not header.damaged:
        return
    if not header.damaged:
        raise exception.TransferFailed(
            name=name,
            reason=f'the image that has arrived is damaged: {found.damage}; look at it where it is '
            'sent (pcow-img check --data), and send it once more, or with --accept-damage as it is',
        )
    result = scrubs.of_check(inode, checked, found)
    if found.damage is None:  # it was made one file, which has no checksums
        result = dataclasses.replace(result, findings=(_MADE_ONE,))
    LOG.warning('%s has arrived damaged, as who sent it has accepted: %s', name, result.findings[0])
    notices.keep(pool, name, result)


def _refuse(path: str, damaged: verify.Damaged | None) -> None:
    """:raises TransferFailed: it is damaged, or what it stands on"""
    if damaged is not None:
        raise exception.TransferFailed(
            name=os.path.basename(path),
            reason=f'{damaged.path} is damaged: {damaged.finding}; --accept-damage sends it as it '
            'is',
        )


@contextlib.contextmanager
def _flat(path: str, *, sealed: bool, checksums: bool) -> Iterator[str]:
    """
    :param checksums: of a template; of damaged data they would call it whole
    """
    with workspace.directory('send') as directory:
        target = os.path.join(directory, f'flat{names.IMAGE_SUFFIX}')
        # it was looked at, or its damage is accepted
        image.convert(
            path,
            image.FORMAT,
            target,
            sealed=sealed,
            checksums=checksums if sealed else None,
            accept_damage=True,
        )
        yield target


def _extents(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Offset and length of what is not a hole."""
    end = 0
    while end < size:
        try:
            begin = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as e:
            if e.errno == errno.ENXIO:  # nothing but a hole follows
                return
            raise
        end = min(os.lseek(descriptor, begin, os.SEEK_HOLE), size)
        if begin < end:
            yield begin, end - begin


def _set_aside(pool: pool_module.Pool, name: str, header: _Header) -> None:
    """What the image will take, before it takes anything.  Nobody can fill one that is sealed."""
    with pool.lock():
        if header.sealed:
            pool.check_room(0, fixed=header.stored)
            staging.reserve(pool, name, fixed=header.stored)
        else:
            pool.check_room(header.virtual)
            staging.reserve(pool, name, thin=provisioned.whole_size(header.virtual))


class _Incoming:
    """What is read of a stream, and its sum."""

    def __init__(self, name: str, stream: IO[bytes]) -> None:
        self.name, self._stream, self._sum = name, stream, hashlib.sha256()

    def line(self) -> bytes:
        line = self._stream.readline(_MAX_HEADER)
        self._sum.update(line)
        return line

    def read(self, length: int) -> bytes:
        data = self._stream.read(length)
        self._sum.update(data)
        if len(data) != length:
            raise exception.TransferFailed(name=self.name, reason='the stream has ended too early')
        return data

    def check(self) -> None:
        if self._stream.read(self._sum.digest_size) != self._sum.digest():
            raise exception.TransferFailed(
                name=self.name, reason='the data were changed on their way'
            )


def _store(
    pool: pool_module.Pool, name: str, part: str, stream: IO[bytes], stack: contextlib.ExitStack
) -> tuple[_Header, IO[bytes]]:
    """Write the file, if there is room for it. What has arrived may be anything until it was
    checked: until then it is for nobody else.

    :param stack: closes it
    """
    incoming = _Incoming(name, stream)
    header = _header(name, incoming.line())
    if header.base is not None:
        pool.existing_path(header.base)  # before anything is stored
    _set_aside(pool, name, header)
    try:
        file = stack.enter_context(open(part, 'xb', opener=durable.secret_opener))
        _store_pieces(incoming, file, header.stored)
        file.flush()
        os.fsync(file.fileno())
    except OSError as e:
        raise exception.TransferFailed(name=name, reason=f'{part}: {e.strerror}') from None
    incoming.check()
    return header, file


def _store_pieces(incoming: _Incoming, file: IO[bytes], left: int) -> None:
    end = 0
    while True:
        offset, length = _PIECE.unpack(incoming.read(_PIECE.size))
        if offset < end or offset + length > _MAX_SIZE:
            raise exception.TransferFailed(
                name=incoming.name, reason='a piece of the stream lies where none can be'
            )
        if length == 0:
            file.truncate(offset)
            return
        end, left = offset + length, left - length
        if left < 0:
            raise exception.TransferFailed(
                name=incoming.name, reason='more has come than the stream said'
            )
        file.seek(offset)
        for position in range(offset, end, _CHUNK):
            file.write(incoming.read(min(_CHUNK, end - position)))


def _header(name: str, line: bytes) -> _Header:
    try:
        value: Any = json.loads(line)
        header = _Header(
            value['base'],
            value['sealed'],
            value['virtual'],
            value['stored'],
            value.get('damaged', False) is True,
        )
        if value['format'] != _FORMAT or not isinstance(header.sealed, bool):
            raise ValueError
        if type(header.virtual) is not int or not 0 < header.virtual <= units.MAX_VIRTUAL_SIZE:
            raise ValueError
        if type(header.stored) is not int or not 0 < header.stored <= _MAX_SIZE:
            raise ValueError
        if header.base is not None and (
            not isinstance(header.base, str) or template_cache.image_id(header.base) is None
        ):
            raise ValueError
    except (ValueError, LookupError, TypeError, RecursionError):
        raise exception.TransferFailed(
            name=name, reason='this is no stream of an image, or of another version'
        ) from None
    return header
