# SPDX-License-Identifier: Apache-2.0
"""Entry point of tools/bench."""

import argparse
import importlib
import logging
from pathlib import Path
import pkgutil
import sys
from typing import Any

from pcow_driver.common import exception
from pcow_driver.common import interrupt
from tools.lib.bench import commands
from tools.lib.bench import store

TOP = Path(__file__).resolve().parents[3]
DEFAULT = 'datapath'  # what is meant when no benchmark is named


def benchmarks() -> dict[str, Any]:
    """The modules of :mod:`tools.lib.bench.commands`, by name."""
    return {
        item.name: importlib.import_module(f'{commands.__name__}.{item.name}')
        for item in pkgutil.iter_modules(commands.__path__)
    }


def _parser(known: dict[str, Any]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='tools/bench',
        description='Measure pcow, and show figures.',
        epilog=f'Without a '
        f'benchmark, {DEFAULT} is meant. Each writes DIR/NAME.json and DIR/NAME.txt.',
    )
    parser.add_argument(
        '--output-dir',
        type=Path,
        default=TOP / 'build' / 'bench',
        metavar='DIR',
        help='where figures are kept (default: build/bench)',
    )
    words = parser.add_subparsers(dest='word', required=True, metavar='BENCHMARK')
    for name, module in known.items():
        module.add_arguments(words.add_parser(name, help=module.HELP, description=module.HELP))
    docs = words.add_parser(
        'docs', help='write the kept figures as the tables and plots of the documentation'
    )
    docs.add_argument(
        '--target',
        type=Path,
        default=TOP / 'doc' / 'source' / '_static' / 'benchmarks',
        metavar='DIR',
        help='default: doc/source/_static/benchmarks',
    )
    return parser


def _with_default(arguments: list[str], known: dict[str, Any]) -> list[str]:
    """The arguments with the benchmark that is meant: the first word that is neither --output-dir
    nor its value names it.
    """
    at = 0
    while at < len(arguments) and arguments[at].startswith('--output-dir'):
        at += 1 if '=' in arguments[at] else 2
    if at < len(arguments) and arguments[at] in (*known, 'docs', '-h', '--help'):
        return arguments
    return [*arguments[:at], DEFAULT, *arguments[at:]]


def _publish(known: dict[str, Any], kept: Path, target: Path) -> None:
    found = {name: kept / f'{name}.json' for name in known if (kept / f'{name}.json').exists()}
    if not found:
        raise exception.PcowError(reason=f'{kept} holds no figures: run tools/bench first')
    for name, path in found.items():
        for written in store.publish(target, name, known[name], store.load(path)):
            print(written)


def main(arguments: list[str]) -> int:
    # errors are told once, by the line below
    logging.getLogger().addHandler(logging.NullHandler())
    known = benchmarks()
    options = _parser(known).parse_args(_with_default(arguments, known))
    interrupt.install()
    try:
        if options.word == 'docs':
            _publish(known, options.output_dir, options.target)
            return 0
        module = known[options.word]
        result = module.run(options)
        store.keep(options.output_dir, options.word, module, result)
        print(store.text(module, result))
        print(f'== {options.output_dir / options.word}.json and .txt')
        return 0
    except exception.PcowError as e:
        print(f'bench: {e}', file=sys.stderr)
    except OSError as e:
        print(f'bench: {e.filename or "the system"}: {e.strerror}', file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    return 1


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
