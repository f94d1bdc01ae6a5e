# SPDX-License-Identifier: Apache-2.0
"""Running pcow-bench."""

import argparse
import json
from pathlib import Path
import subprocess
import tempfile
from typing import Any

from pcow_driver.common import exception
from pcow_driver.common import tool

NAME = 'pcow-bench'


def path() -> Path:
    """:raises PcowError: it was not built"""
    for directory in tool.build_dirs():
        if (directory / NAME).exists():
            return directory / NAME
    raise exception.PcowError(reason=f'{NAME} is not there: run tools/build --no-qemu')


def given(options: argparse.Namespace, *names: str) -> list[str]:
    """The options that were given, for pcow-bench."""
    return [f'--{name}={getattr(options, name)}' for name in names if getattr(options, name)]


def run(arguments: list[str]) -> dict[str, Any]:
    """Run it and return its JSON; what it has to say on stderr is said.

    :raises ToolFailed: it did not get to the end
    """
    with tempfile.NamedTemporaryFile(suffix='.json') as file:
        with subprocess.Popen(
            (path(), f'--json-file={file.name}', *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        ) as process:
            try:
                code = process.wait()
            except BaseException:
                process.terminate()  # it takes its files away
                raise
        if code:
            raise exception.ToolFailed(
                tool=NAME, exit_code=code, message=f'{NAME} did not get to the end'
            )
        return dict(json.loads(Path(file.name).read_text()))
