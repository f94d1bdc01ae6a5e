# SPDX-License-Identifier: Apache-2.0
"""Small files that are there whole, or as they were before, whenever the power goes."""

from __future__ import annotations

import contextlib
import os
import tempfile

# of a file that nobody else than its owner and group may read
PRIVATE = 0o640


def replace(path: str, text: str, *, mode: int = PRIVATE) -> None:
    """Give a file this content in one step; durable on return.

    :raises OSError:
    """
    directory, name = os.path.split(os.path.abspath(path))
    fd, temporary = tempfile.mkstemp(prefix=f'.{name}.', suffix='.part', dir=directory)
    try:
        with os.fdopen(fd, 'w', encoding='utf-8') as f:
            f.write(text)
            f.flush()
            os.fchmod(f.fileno(), mode)
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync(directory)


def sync(directory: str) -> None:
    """Names that were given and taken there are durable on return.

    :raises OSError:
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def secret_opener(path: str, flags: int) -> int:
    """For :func:`open`: a new file is for its owner alone."""
    return os.open(path, flags, 0o600)


def private_mode() -> int:
    """PRIVATE, less the umask."""
    # umask() itself would change it for a moment, and for all threads
    with open('/proc/self/status', encoding='ascii', errors='replace') as f:
        umask = next(line.split()[1] for line in f if line.startswith('Umask:'))
    return PRIVATE & ~int(umask, 8)
