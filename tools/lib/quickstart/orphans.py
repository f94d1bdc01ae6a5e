# SPDX-License-Identifier: Apache-2.0
"""The parent of the QEMUs of libvirtd.

One that has ended counts as alive for libvirt until its parent has taken note of it. The first
process of a container or a small VM may take seconds for that, unlike systemd; that is not what is
measured here.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import ctypes
import os
from pathlib import Path
import threading

_PR_SET_CHILD_SUBREAPER = 36
_PERIOD = 0.02  # seconds
_PROGRAM = 'qemu-system'


def _note_ends() -> None:
    own = os.getsid(0)
    for task in Path('/proc/self/task').iterdir():
        with contextlib.suppress(OSError):
            for pid in (task / 'children').read_text().split():
                name, _, rest = (
                    Path('/proc', pid, 'stat').read_text().partition('(')[2].rpartition(')')
                )
                state, _parent, _group, session = rest.split()[:4]
                # libvirt gives each a session of its own; others are waited for by who started them
                if name.startswith(_PROGRAM) and state == 'Z' and int(session) != own:
                    os.waitpid(int(pid), os.WNOHANG)


@contextlib.contextmanager
def adopted() -> Iterator[None]:
    """Of processes that are started in it."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    done = threading.Event()

    def work() -> None:
        while not done.wait(_PERIOD):
            _note_ends()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
