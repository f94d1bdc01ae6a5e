# SPDX-License-Identifier: Apache-2.0
"""The QEMU that runs servers with persistent memory: ``[pcow] emulator``, whatever libvirt would
choose.
"""

import os
import re

from pcow_driver.common import exception
from pcow_driver.common import tool


class EmulatorUnusable(exception.PcowError):
    msg_fmt = (
        '%(path)s has no pcow backend: let [pcow] emulator name the QEMU that has (pcowctl doctor '
        'looks for it)'
    )


class EmulatorStays(exception.PcowError):
    msg_fmt = (
        '%(path)s does not take pcow images along in a live migration, on this host: let [pcow] '
        'emulator name one of this '
        'version of pcow, or stop the server and migrate it then (openstack server migrate)'
    )


class Emulator:
    """Finds it, and asks it once for each version of its file what it can."""

    def __init__(self) -> None:
        self._good: tuple[str, int] | None = None
        self._migrates = False

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
            found = re.search(r'^\s*format=.*$', options, re.MULTILINE)
            if not found:
                raise EmulatorUnusable(path=path)
            self._migrates = 'live migration' in found[0]
            self._good = seen
        return path

    def check_migrates(self) -> None:
        """Make sure that it can run a server that comes or goes while it runs.

        :raises EmulatorStays:
        :raises: as :meth:`path`
        """
        path = self.path()
        if not self._migrates:
            raise EmulatorStays(path=path)
