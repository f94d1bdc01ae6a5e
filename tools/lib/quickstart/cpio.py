# SPDX-License-Identifier: Apache-2.0
"""Writes initramfs archives (cpio, format "newc") without the help of other programs.

The kernel unpacks several archives one after another, so an archive made here may be appended to
any initrd.
"""

from pathlib import Path
import stat

_ALIGNMENT = 4


def _padding(length: int) -> bytes:
    return bytes(-length % _ALIGNMENT)


def _entry(number: int, name: str, mode: int, data: bytes) -> bytes:
    encoded = name.encode() + b"\0"
    # magic; inode, mode, uid, gid, links, mtime, size, device major and minor (twice), length of
    # the name, checksum
    fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(encoded), 0)
    header = b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
    return header + _padding(len(header)) + data + _padding(len(data))


def archive(files: dict[str, Path]) -> bytes:
    """Return an archive of regular files with their directories.

    :param files: path inside the archive (relative, with '/') to the file that it is a copy of; its
        permissions are kept.
    :returns: the archive, a multiple of 4 bytes long.
    :raises OSError: a file cannot be read.
    """
    directories = sorted(
        {str(parent) for name in files for parent in Path(name).parents if str(parent) != "."}
    )
    parts = [
        _entry(number, name, stat.S_IFDIR | 0o755, b"")
        for number, name in enumerate(directories, 1)
    ]
    for number, (name, source) in enumerate(sorted(files.items()), len(parts) + 1):
        mode = stat.S_IFREG | stat.S_IMODE(source.stat().st_mode)
        parts.append(_entry(number, name, mode, source.read_bytes()))
    parts.append(_entry(0, "TRAILER!!!", 0, b""))
    return b"".join(parts)
