# SPDX-License-Identifier: Apache-2.0
"""What a run has made outside itself, on disk, so that anybody can take it away: the run itself,
the next one, --stop.

Every run owns the directory ``/run/pcow-quickstart/ID``.  A path is noted here before it is made.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import json
import os
from pathlib import Path
import secrets

from pcow_driver.common import exception

ROOT = Path('/run/pcow-quickstart')
_FILE = 'state.json'


def start_time(pid: int) -> int | None:
    """When a process began, in clock ticks since the boot: with the pid it names a process for
    good. None: it ended.
    """
    try:
        fields = (
            Path(f'/proc/{pid}/stat')
            .read_text(encoding='utf-8', errors='replace')
            .rpartition(')')[2]
            .split()
        )
    except OSError:
        return None
    return None if fields[0] == 'Z' else int(fields[19])


class Run:
    """One run of the quickstart, its directory and what it noted."""

    def __init__(self, run_id: str) -> None:
        self.id = run_id
        self.directory = ROOT / run_id
        self.kept = False
        self.paths: list[str] = []  # files and directories to delete
        self.owner = [os.getpid(), start_time(os.getpid()) or 0]

    @classmethod
    def create(cls) -> Run:
        run = cls(secrets.token_hex(4))
        try:
            run.directory.mkdir(parents=True, mode=0o700)
        except OSError as e:
            raise exception.PcowError(
                reason=f'{run.directory} cannot be made ({e.strerror}): run this as root'
            ) from None
        run.save()
        return run

    @classmethod
    def load(cls, run_id: str) -> Run:
        """:raises ValueError: its file is not there or incomplete; there is nothing but the
        directory then
        """
        run = cls(run_id)
        try:
            value = json.loads((run.directory / _FILE).read_text())
            run.kept, run.paths, run.owner = (
                bool(value['kept']),
                list(value['paths']),
                list(value['owner']),
            )
        except (OSError, KeyError, TypeError) as e:
            raise ValueError(str(e)) from None
        return run

    def reload(self) -> None:
        """Take over what another process of this run noted."""
        found = Run.load(self.id)
        self.kept, self.paths = found.kept, found.paths

    def save(self) -> None:
        part = self.directory / f'.{_FILE}'
        part.write_text(
            json.dumps({'owner': self.owner, 'kept': self.kept, 'paths': self.paths}) + '\n'
        )
        part.replace(self.directory / _FILE)

    def note(self, path: Path | str) -> None:
        """Call before ``path`` is made: from then on whoever clears up deletes it."""
        self.paths.append(str(path))
        self.save()

    def forget(self, path: Path | str) -> None:
        self.paths.remove(str(path))
        self.save()

    def abandoned(self) -> bool:
        """Whether its owner ended without clearing up, as after a kill -9."""
        pid, begun = self.owner
        return not self.kept and start_time(pid) != begun

    @property
    def domain_name(self) -> str:
        return f'pcow-quickstart-{self.id}'


def all_runs() -> Iterator[Run]:
    """The runs of this machine, ended ones that kept their VM included."""
    with contextlib.suppress(FileNotFoundError):
        for directory in sorted(ROOT.iterdir()):
            with contextlib.suppress(ValueError):
                yield Run.load(directory.name)
