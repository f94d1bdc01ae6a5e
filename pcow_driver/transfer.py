# SPDX-License-Identifier: Apache-2.0
"""An image on its way to a pool of another host: as a stream of bytes, for SSH or any other pipe.

What travels is one file without its holes.  It may stand on a template of the image service: a template of one name holds the
same on every host, so the receiver puts its own below.  What stands on anything else, is sealed itself, or has snapshots that
others need, is sent as one file that stands on nothing.

The stream is a line of JSON, then pieces (offset and length, 8 bytes each in network order, and the data), then a piece
without data whose offset is the size of the file, then the SHA-256 of all that.  An image appears at the receiver when the
stream has come to its end, was found whole and the image undamaged; else nothing is left.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import errno
import hashlib
import json
import os
import struct
from typing import IO
from typing import Any

from pcow_driver import exception
from pcow_driver import image
from pcow_driver import image_locks
from pcow_driver import names
from pcow_driver import pool as pool_module
from pcow_driver import removal
from pcow_driver import staging
from pcow_driver import template
from pcow_driver import template_cache
from pcow_driver import workspace

KEPT = 'kept'                          # what pcowctl says for a discard that is False
_FORMAT = 'pcow-stream-1'
_PIECE = struct.Struct('>QQ')
_CHUNK = 1 << 20
_MAX_HEADER = 4096
_MAX_SIZE = 1 << 50                    # of a file; more than any pool


def template_below(path: str) -> str | None:
    """Name of the template of the image service on which an image stands, so that it can travel without it.

    :return: None if it is sent as a file that stands on nothing
    """
    info = image.info(path)
    if info.base_filename is None or info.base_snapshot is not None or info.snapshots or info.chain_depth != 2:
        return None
    if info.sealed:                            # no other template can be put below it
        return None
    name = info.base_filename.removesuffix(names.IMAGE_SUFFIX)
    return None if template_cache.image_id(name) is None else template_cache.common_name(name)


def send(path: str, stream: IO[bytes]) -> None:
    """Write an image that nobody writes to.

    :param path: of an image or a template
    :raises ImageNotFound:
    :raises ToolFailed: somebody writes to it, or it is damaged
    :raises ImageInUse: somebody begins to write to it just now
    """
    path = os.path.abspath(path)
    info, base = image.info(path), template_below(path)
    with contextlib.ExitStack() as stack:
        if base is None and (info.base_filename is not None or info.snapshots):
            path = stack.enter_context(_flat(path, sealed=info.sealed))
        with open(path, 'rb') as file:
            image_locks.read_active(file.fileno(), path)
            size = os.fstat(file.fileno()).st_size
            output = _Summed(stream)
            output.write(json.dumps({'format': _FORMAT, 'base': base, 'sealed': info.sealed}).encode() + b'\n')
            for offset, length in _extents(file.fileno(), size):
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
    :raises TransferFailed: the stream ends early or is damaged, or the template below is not in this pool
    :raises NoRoom: the operator's limits have no room for it
    :raises ToolFailed: what has arrived is no sound image
    """
    with staging.building(pool, name) as part:
        base, sealed = _store(pool, name, part, stream)
        with pool.lock():
            if base is not None:               # of the same name; the uuid is this host's
                image.rebase(part, pool.existing_path(base), unsafe=True)
            info = image.info(part)
            if info.sealed != sealed or (base is None) != (info.base_filename is None):
                raise exception.TransferFailed(name=name, reason='the image is not what the stream said of it')
            pool.check_room(0 if sealed else info.virtual_size)
            if not image.check(part).clean:
                raise exception.TransferFailed(name=name, reason='the image that has arrived is damaged')
            target = pool.image_path(name)
            staging.publish(part, target)
    if sealed:
        template.protect(pool, target)     # not before: its other name could not be deleted
    return target


def discard(pool: pool_module.Pool, name: str) -> bool:
    """Delete what :func:`receive` has made, or is making: that fails then.  Done also if there is nothing.

    :return: False if clones keep some of it
    :raises ImageInUse: somebody has it open
    """
    return removal.delete_image(pool, name)


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
def _flat(path: str, *, sealed: bool) -> Iterator[str]:
    with workspace.directory('send') as directory:
        target = os.path.join(directory, f'flat{names.IMAGE_SUFFIX}')
        image.convert(path, image.FORMAT, target, sealed=sealed)
        yield target


def _extents(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Offset and length of what is not a hole."""
    end = 0
    while end < size:
        try:
            begin = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as e:
            if e.errno == errno.ENXIO:         # nothing but a hole follows
                return
            raise
        end = min(os.lseek(descriptor, begin, os.SEEK_HOLE), size)
        if begin < end:
            yield begin, end - begin


def _store(pool: pool_module.Pool, name: str, part: str, stream: IO[bytes]) -> tuple[str | None, bool]:
    """Write the file; what the stream says of its base and seal."""
    total = hashlib.sha256()

    def read(length: int) -> bytes:
        data = stream.read(length)
        total.update(data)
        if len(data) != length:
            raise exception.TransferFailed(name=name, reason='the stream has ended too early')
        return data

    line = stream.readline(_MAX_HEADER)
    total.update(line)
    base, sealed = _header(name, line)
    if base is not None:
        pool.existing_path(base)               # before anything is stored
    try:
        with open(part, 'xb') as file:
            end = 0
            while True:
                offset, length = _PIECE.unpack(read(_PIECE.size))
                if offset < end or offset + length > _MAX_SIZE:
                    raise exception.TransferFailed(name=name, reason='a piece of the stream lies where none can be')
                if length == 0:
                    file.truncate(offset)
                    break
                end = offset + length
                file.seek(offset)
                for position in range(offset, end, _CHUNK):
                    file.write(read(min(_CHUNK, end - position)))
            file.flush()
            os.fsync(file.fileno())
    except OSError as e:
        raise exception.TransferFailed(name=name, reason=f'{part}: {e.strerror}') from None
    if stream.read(total.digest_size) != total.digest():
        raise exception.TransferFailed(name=name, reason='the data were changed on their way')
    return base, sealed


def _header(name: str, line: bytes) -> tuple[str | None, bool]:
    try:
        value: Any = json.loads(line)
        if value['format'] != _FORMAT or not isinstance(value['sealed'], bool):
            raise ValueError
        base = value['base']
        if base is not None and (not isinstance(base, str) or template_cache.image_id(base) is None):
            raise ValueError
    except (ValueError, LookupError, TypeError):
        raise exception.TransferFailed(name=name, reason='this is no stream of an image, or of another version') from None
    return base, value['sealed']
