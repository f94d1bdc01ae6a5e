# SPDX-License-Identifier: Apache-2.0
"""The QEMU that runs servers with persistent memory: ``[pcow] emulator``, whatever libvirt would choose."""

import os
import re

from pcow_driver import exception
from pcow_driver import tool


class EmulatorUnusable(exception.PcowError):
    msg_fmt = '%(path)s has no pcow backend: let [pcow] emulator name the QEMU that has (pcowctl doctor looks for it)'


class Emulator:
    """Finds it, and asks it once for each version of its file whether it has the backend."""

    def __init__(self) -> None:
        self._good: tuple[str, int] | None = None

    def path(self) -> str:
        """
        :raises ToolNotFound: it is not there
        :raises EmulatorUnusable: it has no pcow backend
        """
        path = tool.find('emulator', build_first=True)
        seen = (path, os.stat(path).st_mtime_ns)
        if seen != self._good:
            try:
                options = tool.run(path, '-machine', 'none', '-object', 'memory-backend-file,help')
            except exception.ToolFailed:
                options = ''
            if not re.search(r'^\s*format=', options, re.MULTILINE):
                raise EmulatorUnusable(path=path)
            self._good = seen
        return path
