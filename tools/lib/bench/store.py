# SPDX-License-Identifier: Apache-2.0
"""Where figures are kept: DIR/NAME.json and DIR/NAME.txt, and what the documentation
shows of them.
"""

import json
from pathlib import Path
from typing import Any
from typing import Protocol

from pcow_driver.common import exception
from tools.lib.bench import machine
from tools.lib.bench import plot
from tools.lib.bench import table


class Benchmark(Protocol):
    """What is used here of a module of :mod:`tools.lib.bench.commands`."""

    def tables(self, result: dict[str, Any]) -> list[table.Table]: ...

    def plots(self, result: dict[str, Any]) -> dict[str, plot.Bars]: ...


def write(path: Path, text: str) -> None:
    """The file appears when it is complete."""
    part = path.with_name(f'.{path.name}.part')
    part.write_text(text)
    part.replace(path)


def text(benchmark: Benchmark, result: dict[str, Any]) -> str:
    """All tables for a terminal."""
    return '\n'.join(
        [
            machine.sentence(result['machine']) + '\n',
            *(item.text() for item in benchmark.tables(result)),
        ]
    )


def keep(directory: Path, name: str, benchmark: Benchmark, result: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    write(directory / f'{name}.json', json.dumps(result, indent=1) + '\n')
    write(directory / f'{name}.txt', text(benchmark, result))


def load(path: Path) -> dict[str, Any]:
    """:raises PcowError: the file is not one of ours"""
    try:
        result = json.loads(path.read_text())
        if isinstance(result['rows'], list) and isinstance(result['machine'], dict):
            return dict(result)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise exception.PcowError(
            reason=f'{path} holds no figures of tools/bench ({e}): delete it and measure again'
        ) from None
    raise exception.PcowError(
        reason=f'{path} holds no figures of tools/bench: delete it and measure again'
    )


def shown(benchmark: Benchmark, result: dict[str, Any]) -> str:
    """All tables for the documentation."""
    tables = '\n'.join(item.rst() for item in benchmark.tables(result))
    return f'Measured on: {machine.sentence(result["machine"])}.\n\n{tables}'


def publish(directory: Path, name: str, benchmark: Benchmark, result: dict[str, Any]) -> list[Path]:
    """Write NAME.json, NAME.inc (tables) and the plots to ``directory`` of the documentation."""
    directory.mkdir(parents=True, exist_ok=True)
    written = {
        f'{name}.json': json.dumps(result, indent=1) + '\n',
        f'{name}.inc': shown(benchmark, result),
    }
    for file, content in written.items():
        write(directory / file, content)
    paths = [directory / file for file in written]
    for file, bars in benchmark.plots(result).items():
        bars.draw(directory / f'{file}.svg')
        paths.append(directory / f'{file}.svg')
    return paths
