# SPDX-License-Identifier: Apache-2.0
"""Where a benchmark with guests keeps its files."""

from collections.abc import Iterator
import contextlib
import os
from pathlib import Path

from pcow_driver.common import exception
from tools.lib.quickstart import state
from tools.lib.quickstart import teardown

_PLACE = Path('/dev/shm')  # noqa: S108 - the directory made there is the run's own


@contextlib.contextmanager
def directory() -> Iterator[tuple[state.Run, Path]]:
    """A run, and a directory of it in memory; nothing of both is left.

    :raises PcowError: not as root, who alone can make a guest
    """
    if os.geteuid() != 0:
        raise exception.PcowError(reason='making the guest needs root: run it as root')
    teardown.reap()
    run = state.Run.create()
    try:
        made = _PLACE / f'pcow-bench-{run.id}'
        run.note(made)
        made.mkdir(mode=0o700)
        yield run, made
    finally:
        teardown.tear_down(run)
