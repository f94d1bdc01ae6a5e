# SPDX-License-Identifier: Apache-2.0
"""pcowctl doctor"""

import argparse
import shutil
import sys
from typing import Any

from cliff import lister

from pcow_driver.common import finding as finding_module
from pcow_driver.health import doctor


class Doctor(lister.Lister):
    """Say what this host lacks for pcow, and what to do about it; exit code 1 if something
    essential is missing.
    """

    _status = 0

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        if not sys.stdout.isatty():
            # sentences in columns: cliff folds them at a terminal only
            parser.set_defaults(max_width=shutil.get_terminal_size((100, 0)).columns)
        return parser

    def take_action(
        self, parsed_args: argparse.Namespace
    ) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        findings = doctor.diagnose()
        self._status = int(any(finding.status == finding_module.MISSING for finding in findings))
        return (
            ('check', 'status', 'found', 'what to do'),
            [
                (finding.check, finding.status, finding.found, finding.advice)
                for finding in findings
            ],
        )

    def run(self, parsed_args: argparse.Namespace) -> int:
        return super().run(parsed_args) or self._status
