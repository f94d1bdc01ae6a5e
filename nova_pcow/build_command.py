# SPDX-License-Identifier: Apache-2.0
"""Part of the build of the package (setup.cfg names it), not of the driver: needs nothing but
setuptools.
"""

import os

from setuptools.command import build_py


class BuildPy(build_py.build_py):
    """Installs nova_pcow.pth beside the packages: Nova finds compute drivers only below
    ``nova.virt`` (nova_pcow/loader.py).
    """

    command_name = 'build_py'
    PTH = 'nova_pcow.pth'

    def run(self) -> None:
        super().run()
        # An editable wheel is made of what is in install_lib; nothing of build_lib gets into it.
        target = (
            self.get_finalized_command('install').install_lib
            if self.editable_mode
            else self.build_lib
        )
        self.mkpath(target)
        self.copy_file(
            os.path.join('nova_pcow', self.PTH), os.path.join(target, self.PTH), preserve_mode=False
        )
