# SPDX-License-Identifier: Apache-2.0
"""Templates: a disk image made bootable from persistent memory, as a sealed pcow image that thin
images stand on.

Layout of what the guest sees: the DAX info block (:mod:`pcow_driver.images.info_block`) and, from
``dataoff`` on, the source byte for byte, be it a bare file system or a partitioned disk; the
virtual size is a multiple of 2 MiB. Of a source that was an image of pcow, and has such a block,
what lies behind it is taken.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import os
import stat
import uuid as uuidlib

from oslo_log import log as logging
from oslo_utils.imageutils import format_inspector

from pcow_driver.common import conf
from pcow_driver.common import descriptors
from pcow_driver.common import exception
from pcow_driver.common import immutable
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.common import workspace
from pcow_driver.images import image
from pcow_driver.images import info_block
from pcow_driver.images import model
from pcow_driver.images import protection
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import staging
from pcow_driver.templates import alignment
from pcow_driver.templates import exported
from pcow_driver.templates import limits

LOG = logging.getLogger(__name__)

SOURCE_FORMATS = ('qcow2', 'raw')
_QCOW2_CLUSTER = 64 << 10  # of qemu-img, unless it is told another
# What a raw disk may look like to the inspector: partition tables and ISO file systems are content,
# not containers.
_RAW_CONTENT = ('raw', 'gpt', 'iso')


@dataclasses.dataclass(frozen=True)
class Source:
    path: str  # absolute
    format: str  # one of SOURCE_FORMATS
    virtual_size: int  # bytes
    offset: int = 0  # of the data: behind the info block of an export
    move: alignment.Move | None = None  # of a partition

    @property
    def data_size(self) -> int:
        return self.virtual_size - self.offset

    @property
    def disk_size(self) -> int:
        """Of what the guest sees."""
        return self.data_size + (self.move.distance if self.move else 0)

    def pieces(self) -> Iterator[alignment.Piece]:
        """What to copy of the data, and where on the guest's disk it goes."""
        if self.move:
            yield from self.move.pieces(self.data_size)
        else:
            yield alignment.Piece(0, self.data_size, 0)


def inspect_source(path: str, source_format: str) -> Source:
    """Check a source before anything else reads it.

    The inspector does not run QEMU's parsers: it refuses images with backing or data files, unknown
    features, and content of another format than the one that was given.

    :raises SourceRejected:
    """
    path = os.path.abspath(path)
    reason = ''
    if source_format not in SOURCE_FORMATS:
        reason = (
            f'the format {source_format} is not one of {", ".join(SOURCE_FORMATS)}; convert it '
            f'with qemu-img'
        )
    elif not os.path.isfile(path):
        reason = 'it is not a file'
    else:
        try:
            size = _inspected_size(path, source_format)
        except format_inspector.SafetyCheckFailed as e:
            reason = f'unsafe: {e}'
        except (format_inspector.ImageFormatError, OSError) as e:
            reason = str(e)
        else:
            if size > 0:
                return Source(path, source_format, size)
            reason = 'it is empty'
    raise exception.SourceRejected(path=path, reason=reason)


def _inspected_size(path: str, source_format: str) -> int:
    """Virtual size in bytes of a source that is what it was said to be."""
    found = format_inspector.detect_file_format(path)
    if found is None:
        raise format_inspector.ImageFormatError('its format cannot be told')
    if str(found) not in (_RAW_CONTENT if source_format == 'raw' else (source_format,)):
        raise format_inspector.ImageFormatError(
            f'it was given as {source_format} and holds {found}; give the right format'
        )
    if source_format == 'raw':
        return os.path.getsize(path)
    found.safety_check()
    return int(found.virtual_size)


def check_source(source: Source) -> None:
    """Find out whether a qcow2 file is whole: qemu-img would read what a truncated one lacks as
    zeros.

    :raises SourceRejected: it is damaged
    :raises ToolFailed: it cannot be opened
    :raises ToolLimited: it is made to take all of the host
    :raises ToolCrashed: it may be
    """
    if source.format != 'qcow2':
        return
    try:
        # 3: leaks
        tool.run(
            tool.find('qemu_img'),
            'check',
            '-q',
            '-f',
            source.format,
            source.path,
            ok_exit_codes=(0, 3),
            # what it holds: a sparse file has any size
            limits=limits.of_look(os.stat(source.path).st_blocks * 512),
        )
    except exception.ToolFailed as e:
        if e.details['exit_code'] != 2:
            raise
        raise exception.SourceRejected(
            path=source.path,
            reason="it is damaged or not complete ('qemu-img check' shows details); get it again",
        ) from None


def virtual_size(source_size: int, page_map: info_block.PageMap, size: int | None = None) -> int:
    """Virtual size of the template of a source of ``source_size`` bytes.

    :param size: wanted virtual size in bytes, rounded up to 2 MiB; the smallest possible if not
        given
    :raises InvalidSize: too small for the source, or above ``[pcow] max_image_size``
    """
    needed = info_block.namespace_size(source_size, page_map)
    total = needed if size is None else units.round_up(size, units.SLAB_SIZE)
    try:
        limit = min(units.parse_size(str(conf.CONF.pcow.max_image_size)), units.MAX_VIRTUAL_SIZE)
    except exception.InvalidSize as e:
        raise exception.ConfigInvalid(reason=f'[pcow] max_image_size: {e}') from None
    if total - info_block.data_offset(total, page_map) < source_size:
        raise exception.InvalidSize(
            size=total, reason=f'the source and the DAX info block need {needed} bytes'
        )
    if total > limit:
        raise exception.InvalidSize(
            size=total, reason=f'[pcow] max_image_size allows {limit} bytes'
        )
    return total


def build(
    pool: pool_module.Pool,
    name: str,
    source_path: str,
    source_format: str,
    *,
    size: int | None = None,
    page_map: info_block.PageMap = info_block.PageMap.RAM,
    align: bool = False,
    cluster_size: int | None = None,
    accept: Callable[[int], None] | None = None,
) -> str:
    """Make the sealed template ``name`` in a pool from a qcow2 or raw image, and return its path.

    The template appears under its name when it is complete; a failed or interrupted build leaves
    nothing.

    :param size: virtual size in bytes; by default just enough for the source
    :param page_map: where guests keep the struct pages
    :param align: have its largest partition begin at a multiple of 2 MiB
    :param accept: called with the bytes of the data before anything is converted; raises what
        keeps the caller from using it
    :raises InvalidName:
    :raises ImageExists:
    :raises SourceRejected:
    :raises InvalidSize:
    :raises PoolDraining:
    :raises NoRoom: more is provisioned than the operator's limits allow
    :raises NoSpace: its data do not fit in the pool
    :raises ConversionDirUnusable: nor in the directory for conversions
    :raises ToolFailed: qemu-img or pcow-img failed, for instance because the pool is full
    """
    target = pool.image_path(name)
    with staging.building(pool, name) as part, contextlib.ExitStack() as stack:
        # for a template nothing is provisioned; but nothing new comes where too much is provisioned
        pool.check_room(0)
        source = inspect_source(stack.enter_context(_held(source_path)), source_format)
        check_source(source)
        source = dataclasses.replace(
            source, offset=exported.data_offset(source.path, source.format, source.virtual_size)
        )
        if align:
            virtual_size(source.data_size, page_map, size)
            source = aligned(source, stack.enter_context(workspace.directory('template')))
        total = virtual_size(source.disk_size, page_map, size)
        if accept is not None:
            accept(source.disk_size)
        stored = measure(source.path, source.format, source.virtual_size)
        workspace.check_free(stored)
        if source.format != 'raw':
            pool.check_free(stored)  # it may be many times what was fetched; zeros in it count
        with workspace.directory('template') as directory:
            raw = os.path.join(directory, 'namespace.raw')
            write_namespace(raw, source, total, page_map)
            pool.check_free(measure(raw, 'raw', total))
            most = image.measure(raw, 'raw').required
            with pool.lock():
                pool.check_room(0, fixed=most)
                staging.reserve(pool, name, fixed=most)
            image.convert(raw, 'raw', part, cluster_size=cluster_size)
        image.seal(part, checksums=True)
        with pool.lock():
            pool.check_room(0)
            staging.finish(pool, name, part)
    protect(pool, target)  # not before: its other name could not be deleted
    return target


def aligned(source: Source, directory: str) -> Source:
    """The source, as it is to be written if its largest partition shall begin at a multiple of
    2 MiB.

    :param directory: for its new partition table
    :raises SourceRejected: the partition cannot be moved
    """
    move = alignment.plan(source.path, source.format, source.data_size, source.offset, directory)
    if move is not None:
        LOG.info(
            'The partition at %s is moved up by %s',
            units.format_exact(move.start),
            units.format_exact(move.distance),
        )
    return dataclasses.replace(source, move=move)


@contextlib.contextmanager
def _held(path: str) -> Iterator[str]:
    """A name of the source under which nobody puts, or writes, anything else between the looks at
    it and the copy.

    What others may write to is copied first: its header could name another file after it was
    accepted.

    :raises SourceRejected: it is no file that can be read, or behind a link of another user
    """
    path = os.path.abspath(path)
    try:
        fd = descriptors.open_source(path)
    except OSError as e:
        raise exception.SourceRejected(path=path, reason=str(e.strerror)) from None
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, fd)
        held, status = f'/proc/{os.getpid()}/fd/{fd}', os.fstat(fd)
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            workspace.check_free(status.st_blocks * 512)
            copy = os.path.join(stack.enter_context(workspace.directory('template')), 'source')
            tool.run(tool.find_system('cp', 'coreutils'), '--sparse=always', held, copy)
            held = copy
        try:
            yield held
        except exception.SourceRejected as e:
            raise exception.SourceRejected(path=path, reason=e.details['reason']) from None
        except exception.ToolLimited as e:
            raise exception.SourceRejected(path=path, reason=str(e)) from None
        except exception.ToolFailed as e:
            raise exception.ToolFailed(
                e.details | {'message': str(e.details['message']).replace(held, path)}
            ) from None


def measure(path: str, image_format: str, size: int) -> int:
    """The bytes of data that an image of ``size`` bytes stores at most, not compressed."""
    output = tool.run_json(
        tool.find('qemu_img'),
        'measure',
        '--output=json',
        '-f',
        image_format,
        '-O',
        'qcow2',
        path,
        limits=limits.of_look(size),
    )
    found = model.Reader(output, 'measure', 'qemu-img')
    # both with the metadata of all of it
    holes = found.integer('fully-allocated') - found.integer('required')
    return units.round_up(size, _QCOW2_CLUSTER) - holes


def protect(pool: pool_module.Pool, path: str) -> None:
    """Let nobody change or delete a template, where that can be had; a pool in DRAM ends with the
    host anyway.
    """
    if not immutable.is_set(path) and pool.persistence() != 'volatile':
        protection.protect(path)


def write_namespace(path: str, source: Source, size: int, page_map: info_block.PageMap) -> None:
    """Write what the guest shall see to the new sparse raw file ``path`` of ``size`` bytes."""
    with open(path, 'xb') as f:
        f.truncate(size)
    offset = info_block.data_offset(size, page_map)
    LOG.info(
        'Copying %s (%s) to a namespace of %s', source.path, source.format, units.format_size(size)
    )
    # -n --target-is-zero: the file is all holes, and zeros of the source stay holes
    for piece in source.pieces():
        # qemu-img wants whole sectors of a piece, which the last one need not have
        last = piece.offset + piece.size == source.data_size
        tool.run(
            tool.find('qemu_img'),
            'convert',
            '-n',
            '--target-is-zero',
            '--image-opts',
            '--target-image-opts',
            exported.options(
                source.path,
                source.format,
                source.offset + piece.offset,
                None if last else piece.size,
            ),
            exported.options(path, 'raw', offset + piece.target),
            limits=limits.of_copy(piece.size),
        )
    if source.move is not None:
        source.move.write_table(path, offset, source.disk_size)
    with open(path, 'r+b') as f:
        f.seek(info_block.BLOCK_OFFSET)
        f.write(info_block.info_block(size, page_map, uuidlib.uuid4()))
