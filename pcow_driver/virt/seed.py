# SPDX-License-Identifier: Apache-2.0
"""A seed: a small file system with what cloud-init makes of a guest on its first boot, as a
read-only disk of a libvirt domain.

It is a virtio disk and no CD-ROM: cloud-init goes by the label of the file system alone, and a
guest all of whose devices are virtio needs no bounce buffers.
"""

from __future__ import annotations

import os
from pathlib import Path
import stat
import xml.etree.ElementTree as ET

from pcow_driver.common import exception

# what the sources NoCloud and ConfigDrive of cloud-init look for, all in small or capital letters
LABELS = ('cidata', 'config-2')
# ISO 9660 (ECMA-119): the primary volume descriptor
_VOLUME, _VOLUME_MAGIC, _VOLUME_LABEL = 16 * 2048, b'\x01CD001', slice(40, 72)
# FAT: where the boot sector names its kind and its label, of FAT32 and of the smaller ones
_FAT = ((b'FAT32', 82, slice(71, 82)), (b'FAT', 54, slice(43, 54)))


def _read(path: Path) -> tuple[bytes, bytes]:
    """The boot sector and the volume descriptor.

    :raises OSError: it is not there, is no regular file, or cannot be read
    """
    # a FIFO would have this wait for a writer
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(None, 'it is no regular file')
        return os.pread(descriptor, 512, 0), os.pread(descriptor, 2048, _VOLUME)
    finally:
        os.close(descriptor)


def _label(boot: bytes, volume: bytes) -> str:
    """Of the file system, '' if it is none of those that a seed is made of."""
    if volume.startswith(_VOLUME_MAGIC):
        return volume[_VOLUME_LABEL].decode('ascii', 'replace').rstrip(' \0')
    if boot[510:512] == b'\x55\xaa':
        for kind, place, label in _FAT:
            if boot[place : place + len(kind)] == kind:
                return boot[label].decode('ascii', 'replace').rstrip(' \0')
    return ''


def check(path: str) -> None:
    """
    :raises SeedInvalid: it is not a file that cloud-init would read
    """
    try:
        label = _label(*_read(Path(path)))
    except OSError as e:
        raise exception.SeedInvalid(path=path, reason=e.strerror) from None
    if label not in LABELS and label not in [known.upper() for known in LABELS]:
        raise exception.SeedInvalid(
            path=path,
            reason='it has no file system (ISO 9660 or FAT, not compressed and not qcow2) with the '
            f'label {LABELS[0]} or {LABELS[1]}, by which cloud-init finds it',
        )


def to_element(path: str, target: str) -> ET.Element:
    """:param target: name of the disk, as 'vda'"""
    disk = ET.Element('disk', type='file', device='disk')
    ET.SubElement(disk, 'driver', name='qemu', type='raw')
    ET.SubElement(disk, 'source', file=path)
    ET.SubElement(disk, 'target', dev=target, bus='virtio')
    ET.SubElement(disk, 'readonly')
    return disk
