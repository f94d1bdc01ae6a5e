# SPDX-License-Identifier: Apache-2.0
"""Templates: a disk image made bootable from persistent memory, as a sealed pcow image that thin images stand on.

Layout of what the guest sees: the DAX info block (:mod:`pcow_driver.dax`) and, from ``dataoff`` on, the source byte for
byte, be it a bare file system or a partitioned disk; the virtual size is a multiple of 2 MiB.
"""

import dataclasses
import os
import uuid as uuidlib

from oslo_log import log as logging
from oslo_utils.imageutils import format_inspector

from pcow_driver import conf
from pcow_driver import dax
from pcow_driver import exception
from pcow_driver import image
from pcow_driver import immutable
from pcow_driver import pool as pool_module
from pcow_driver import staging
from pcow_driver import tool
from pcow_driver import units
from pcow_driver import workspace

LOG = logging.getLogger(__name__)

SOURCE_FORMATS = ('qcow2', 'raw')
# What a raw disk may look like to the inspector: partition tables and ISO file systems are content, not containers.
_RAW_CONTENT = ('raw', 'gpt', 'iso')


@dataclasses.dataclass(frozen=True)
class Source:
    path: str                      # absolute
    format: str                    # one of SOURCE_FORMATS
    virtual_size: int              # bytes


def inspect_source(path: str, source_format: str) -> Source:
    """Check a source before anything else reads it.

    The inspector does not run QEMU's parsers: it refuses images with backing or data files, unknown features, and
    content of another format than the one that was given.

    :raises SourceRejected:
    """
    path = os.path.abspath(path)
    reason = ''
    if source_format not in SOURCE_FORMATS:
        reason = f'the format {source_format} is not one of {", ".join(SOURCE_FORMATS)}; convert it with qemu-img'
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
        raise format_inspector.ImageFormatError(f'it was given as {source_format} and holds {found}; give the right format')
    if source_format == 'raw':
        return os.path.getsize(path)
    found.safety_check()
    return int(found.virtual_size)


def check_source(source: Source) -> None:
    """Find out whether a qcow2 file is whole: qemu-img would read what a truncated one lacks as zeros.

    :raises SourceRejected: it is damaged
    :raises ToolFailed: it cannot be opened
    """
    if source.format != 'qcow2':
        return
    try:
        tool.run(tool.find('qemu_img'), 'check', '-q', '-f', source.format, source.path, ok_exit_codes=(0, 3))    # 3: leaks
    except exception.ToolFailed as e:
        if e.details['exit_code'] != 2:
            raise
        raise exception.SourceRejected(
            path=source.path, reason="it is damaged or not complete ('qemu-img check' shows details); get it again") from None


def virtual_size(source_size: int, page_map: dax.PageMap, size: int | None = None) -> int:
    """Virtual size of the template of a source of ``source_size`` bytes.

    :param size: wanted virtual size in bytes, rounded up to 2 MiB; the smallest possible if not given
    :raises InvalidSize: too small for the source, or above ``[pcow] max_image_size``
    """
    needed = dax.namespace_size(source_size, page_map)
    total = needed if size is None else units.round_up(size, units.SLAB_SIZE)
    limit = min(units.parse_size(str(conf.CONF.pcow.max_image_size)), units.MAX_VIRTUAL_SIZE)
    if total - dax.data_offset(total, page_map) < source_size:
        raise exception.InvalidSize(size=total, reason=f'the source and the DAX info block need {needed} bytes')
    if total > limit:
        raise exception.InvalidSize(size=total, reason=f'[pcow] max_image_size allows {limit} bytes')
    return total


def build(pool: pool_module.Pool, name: str, source_path: str, source_format: str, *, size: int | None = None,
          page_map: dax.PageMap = dax.PageMap.RAM, cluster_size: int | None = None) -> str:
    """Make the sealed template ``name`` in a pool from a qcow2 or raw image, and return its path.

    The template appears under its name when it is complete; a failed or interrupted build leaves nothing.

    :param size: virtual size in bytes; by default just enough for the source
    :param page_map: where guests keep the struct pages
    :raises InvalidName:
    :raises ImageExists:
    :raises SourceRejected:
    :raises InvalidSize:
    :raises PoolDraining:
    :raises NoRoom: more is promised than the operator's limits allow
    :raises ToolFailed: qemu-img or pcow-img failed, for instance because the pool is full
    """
    target = pool.image_path(name)
    with staging.building(pool, name) as part:
        pool.check_room(0)             # a template promises nothing; but nothing new comes where too much is promised
        source = inspect_source(source_path, source_format)
        total = virtual_size(source.virtual_size, page_map, size)
        check_source(source)
        with workspace.directory('template') as directory:
            raw = os.path.join(directory, 'namespace.raw')
            write_namespace(raw, source, total, page_map)
            image.convert(raw, 'raw', part, cluster_size=cluster_size)
        image.seal(part)
        with pool.lock():
            pool.check_room(0)
            staging.publish(part, target)
    protect(pool, target)              # not before: its other name could not be deleted
    return target


def protect(pool: pool_module.Pool, path: str) -> None:
    """Let nobody change or delete a template, where that can be had; a pool in DRAM ends with the host anyway."""
    if not immutable.is_set(path) and pool.persistence() != 'volatile':
        immutable.protect(path)


def write_namespace(path: str, source: Source, size: int, page_map: dax.PageMap) -> None:
    """Write what the guest shall see to the new sparse raw file ``path`` of ``size`` bytes."""
    with open(path, 'xb') as f:
        f.truncate(size)
    offset = dax.data_offset(size, page_map)
    LOG.info('Copying %s (%s) to a namespace of %s', source.path, source.format, units.format_size(size))
    # -n --target-is-zero: the file is all holes, and zeros of the source stay holes
    tool.run(tool.find('qemu_img'), 'convert', '-f', source.format, '-n', '--target-is-zero', '--target-image-opts',
             source.path, f'driver=raw,offset={offset},file.driver=file,file.filename={path.replace(",", ",,")}')
    with open(path, 'r+b') as f:
        f.seek(dax.BLOCK_OFFSET)
        f.write(dax.info_block(size, page_map, uuidlib.uuid4()))
