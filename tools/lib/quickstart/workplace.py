# SPDX-License-Identifier: Apache-2.0
"""The pool of a run, and pcowctl as its user would call it."""

from __future__ import annotations

import json
import os
from pathlib import Path
import sys
from typing import Any

from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.common import tool
from pcow_driver.images import image
from tools.lib.quickstart import state

_TMPFS = ('/dev/shm', '/run')  # noqa: S108 - the directory made there is the run's own
_PERSISTENCE = 'volatile'


class Workplace:
    """Directories and configuration of a run, nothing shared with the host's own pcow."""

    def __init__(self, run: state.Run, libvirt_uri: str) -> None:
        self.run = run
        self.pool_name = f'quickstart-{run.id}'
        self.pool = Path()  # set by make_pool()
        self.scratch = Path()  # for the raw file: same file system as the pool
        self.config = run.directory / 'pcow.conf'
        conversion = (
            Path(os.environ.get('PCOW_CACHE_DIR', '/var/cache/pcow')) / f'.conversion-{run.id}'
        )
        run.note(conversion)
        conversion.mkdir(parents=True, mode=0o700)
        self.config.write_text(
            f'[pcow]\nstate_path = {run.directory / "pcow"}\nlibvirt_uri = {libvirt_uri}\n'
            f'conversion_dir = {conversion}\n'
        )

    def pcowctl(self, *words: str) -> str:
        """Run pcowctl and return what it prints.

        :raises ToolFailed:
        """
        program = Path(sys.prefix) / 'bin' / 'pcowctl'
        return tool.run(str(program), '--config-file', str(self.config), *words)

    def pcowctl_json(self, *words: str) -> Any:
        return json.loads(self.pcowctl(*words, '-f', 'json'))

    def make_pool(self, directory: Path | None) -> Any:
        """Make the pool, or use the one that is in ``directory``; return what pcowctl shows of it.

        :raises PcowError: no tmpfs is there, or the directory cannot be used
        """
        parent = directory or self._tmpfs()
        self.scratch = parent / f'.pcow-quickstart-{self.run.id}'
        self.run.note(self.scratch)
        try:
            self.scratch.mkdir(mode=0o711)
        except OSError as e:
            raise exception.PcowError(
                reason=f'{parent} cannot be written to: {e.strerror}'
            ) from None
        self.pool = directory or self.scratch / 'pool'
        if (self.pool / names.MARKER).exists():
            return self.pcowctl_json('pool', 'import', str(self.pool), '--name', self.pool_name)
        self.run.note(self.pool / names.MARKER)
        return self.pcowctl_json('pool', 'create', self.pool_name, str(self.pool))

    def image_path(self, name: str) -> Path:
        """Where an image of this run is made; noted, so that it is deleted with the run."""
        path = self.pool / f'{self.pool_name}-{name}{names.IMAGE_SUFFIX}'
        if str(path) not in self.run.paths:
            self.run.note(path)
        return path

    def reference(self, path: Path) -> str:
        """The image as pcowctl names it: POOL/NAME."""
        return f'{self.pool_name}/{path.name.removesuffix(names.IMAGE_SUFFIX)}'

    @staticmethod
    def _tmpfs() -> Path:
        for place in _TMPFS:
            if os.path.isdir(place) and image.probe(place) == _PERSISTENCE:
                return Path(place)
        raise exception.PcowError(reason=f'none of {", ".join(_TMPFS)} is a tmpfs: give --pool DIR')
