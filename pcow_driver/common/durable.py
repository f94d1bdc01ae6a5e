# SPDX-License-Identifier: Apache-2.0
"""Small files that are there whole, or as they were before, whenever the power goes.

Others may write to the directory above: a link that they put in the place of the directory, or of a
file that is read, is refused (:func:`pcow_driver.common.descriptors.open_file`).
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import errno
import os
import tempfile

from pcow_driver.common import descriptors

# of a file that nobody else than its owner and group may read
PRIVATE = 0o640


def replace(path: str, text: str, *, mode: int = PRIVATE) -> None:
    """Give a file this content in one step; durable on return.

    :raises OSError:
    """
    with _place(path) as (directory, name):
        fd, temporary = tempfile.mkstemp(prefix=f'.{name}.', suffix='.part', dir=directory)
        try:
            with os.fdopen(fd, 'w', encoding='utf-8') as f:
                f.write(text)
                f.flush()
                os.fchmod(f.fileno(), mode)
                os.fsync(f.fileno())
            os.replace(temporary, os.path.join(directory, name))
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        sync(directory)


def read(path: str, *, own: bool = False) -> str:
    """The content of a file.

    :param own: none that somebody else than root and this user has made
    :raises OSError: also for a link of another user, and for what is no regular file
    :raises UnicodeDecodeError:
    """
    with _place(path) as (directory, name):
        descriptor = descriptors.open_file(os.path.join(directory, name))
        with open(descriptor, encoding='utf-8') as f:
            if own and os.fstat(descriptor).st_uid not in (0, os.geteuid()):
                raise OSError(errno.EPERM, 'it is a file of another user', path)
            return f.read()


def remove(path: str) -> None:
    """Delete a file; durable on return. One that is not there is no error.

    :raises OSError:
    """
    with contextlib.suppress(FileNotFoundError), _place(path) as (directory, name):
        os.unlink(os.path.join(directory, name))
        sync(directory)


@contextlib.contextmanager
def _place(path: str) -> Iterator[tuple[str, str]]:
    """Of the directory, and the name in it.

    :raises OSError: with the path as it was given
    """
    directory, name = os.path.split(os.path.abspath(path))
    try:
        with descriptors.directory_place(directory) as place:
            yield place, name
    except OSError as e:
        raise OSError(e.errno, e.strerror, path) from None


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
