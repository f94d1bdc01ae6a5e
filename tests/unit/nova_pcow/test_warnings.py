# SPDX-License-Identifier: Apache-2.0
"""On hosts of OpenStack eventlet is installed, and warns of itself when it is imported."""

import os
import subprocess
import sys

from oslotest import base


class WarningsTest(base.BaseTestCase):
    def test_pcowctl_says_nothing_but_its_own(self) -> None:
        environment = {key: value for key, value in os.environ.items() if key != 'PYTHONWARNINGS'}

        def said(*words: str) -> str:
            return subprocess.run(
                (sys.executable, *words),
                capture_output=True,
                text=True,
                check=True,
                env=environment,
            ).stderr

        self.assertIn('Eventlet is deprecated', said('-c', 'import eventlet'))
        self.assertEqual('', said('-m', 'pcow_driver.cli.app', '--version'))
