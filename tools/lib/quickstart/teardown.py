# SPDX-License-Identifier: Apache-2.0
"""Takes away what a run left: its QEMU, its libvirtd with the mounts in its namespace,
its files.
"""

import contextlib
import os
from pathlib import Path
import shutil
import signal
import time

from oslo_log import log as logging

from pcow_driver.common import exception
from pcow_driver.images import protection
from tools.lib.quickstart import state

LOG = logging.getLogger(__name__)
_PATIENCE = 10.0  # seconds between SIGTERM and SIGKILL


def _processes(run: state.Run) -> tuple[list[int], list[int]]:
    """Pids of the run's QEMUs and of its libvirtd: its random name stands in their
    command lines.
    """
    guests, daemons = [], []
    guest_mark = f'guest={run.domain_name}'.encode()
    # or in that of the shell that is about to become one
    daemon_mark = str(run.directory / 'libvirtd.conf').encode()
    for entry in Path('/proc').iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                words = (entry / 'cmdline').read_bytes().split(b'\0')
                if any(word.startswith(guest_mark) for word in words):
                    guests.append(int(entry.name))
                elif any(daemon_mark in word for word in words):
                    daemons.append(int(entry.name))
    return guests, daemons


def end(pids: list[int], patience: float = _PATIENCE) -> None:
    """End processes, by force if they do not go by themselves; returns when they are gone."""
    alive = {pid: begun for pid in pids if (begun := state.start_time(pid)) is not None}
    for number, wait in ((signal.SIGTERM, patience), (signal.SIGKILL, patience)):
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        limit = time.monotonic() + wait
        while alive and time.monotonic() < limit:
            for pid in list(alive):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
                if state.start_time(pid) != alive[pid]:
                    del alive[pid]
            time.sleep(0.02)


def delete(path: Path) -> None:
    """Delete a file or a tree, immutable templates included; links in it are not followed.

    :raises ImageProtected: this user may not
    :raises OSError: a file cannot be deleted
    """
    if path.is_dir() and not path.is_symlink():
        for directory, _directories, files in os.walk(path):
            for name in files:
                protection.unprotect(os.path.join(directory, name))
        shutil.rmtree(path, ignore_errors=True)
    else:
        protection.unprotect(str(path))
        path.unlink(missing_ok=True)


def tear_down(run: state.Run) -> None:
    """Take all of it away.  May be called again after an interruption."""
    guests, daemons = _processes(run)
    end(guests)
    end(daemons)
    end(_processes(run)[0])  # one that libvirtd was starting meanwhile
    for path in reversed(run.paths):
        delete(Path(path))
    delete(run.directory)
    with contextlib.suppress(OSError):
        state.ROOT.rmdir()


def reap() -> None:
    """Clear up after runs whose process was killed. What cannot be cleared up is told and does not
    stand in anybody's way.
    """
    for run in state.all_runs():
        if run.abandoned():
            try:
                tear_down(run)
            except (OSError, exception.PcowError) as e:
                LOG.warning(
                    'the quickstart %s was killed and cannot be cleared up after: %s', run.id, e
                )
