# SPDX-License-Identifier: Apache-2.0
"""Commands that the documentation tells people to type are commands that the programs take.

A line of a block of commands is parsed as a whole, by the program itself. Of what stands in running
text, where operands are left out, the command and the options are looked at.
"""

import argparse
from collections.abc import Iterator
import os
from pathlib import Path
import re
import shlex
import subprocess

from pcow_driver.cli import app
from tests.unit.pcow_driver import base

PROGRAMS = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
_PROGRAM = re.compile(r'(?:^|.*/)(?P<name>pcowctl|pcow-img|pcow-io)$')
_LINE = re.compile(r'^ +(?:[#$] )?(?P<line>(?:\S+ )*?(?:\S*/)?pcow(?:ctl|-img|-io) .*)$')
_INLINE = re.compile(r'``(?P<line>pcow(?:ctl|-img|-io) [^`]+)``')
_REDIRECTION = re.compile(r'\s\d?>.*$')
_OPTION = re.compile(r'-[A-Za-z]$|--[a-z]')
_PAGES = base.TOP / 'doc/source'

# program, words; and where it stands
_Command = tuple[str, list[str], str]


def _pages() -> list[Path]:
    return sorted(
        (*_PAGES.glob('[!m]*/*.rst'), base.TOP / 'README.rst', *base.TOP.glob('devstack/*.rst'))
    )


def _blocks(page: Path) -> Iterator[str]:
    """The lines of literal blocks."""
    indent: int | None = None
    for line in page.read_text(encoding='utf-8').splitlines():
        if not line.strip():
            continue
        spaces = len(line) - len(line.lstrip())
        if indent is not None and spaces > indent:
            yield line
        else:
            indent = spaces if line.endswith('::') else None


def _typed() -> Iterator[_Command]:
    for page in _pages():
        for line in _blocks(page):
            match = _LINE.match(line)
            for part in re.split(r' \| | && ', match['line']) if match else ():
                words = shlex.split(_REDIRECTION.sub('', part), comments=True)
                if words[:1] == ['ssh']:
                    words = words[2:]
                found = _PROGRAM.match(words[0]) if words else None
                if found:
                    yield found['name'], words[1:], f'{page.name}: {line.strip()}'


def _mentioned() -> Iterator[_Command]:
    for page in _pages():
        text = re.sub(r'\n +', ' ', page.read_text(encoding='utf-8')).replace('\n', ' ')
        for match in _INLINE.finditer(text):
            words = re.sub(r'[\[\]|]', ' ', match['line']).split()
            if '...' not in words:
                yield words[0], words[1:], f'{page.name}: {match["line"]}'


def _run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAMS / program, *words],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


class DocumentedCommandTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.ctl = app.PcowCtl()

    def _parser(self, words: list[str]) -> tuple[argparse.ArgumentParser, list[str]]:
        factory, name, rest = self.ctl.command_manager.find_command(words)
        return factory(self.ctl, None).get_parser(f'pcowctl {name}'), rest

    def _takes(self, program: str, words: list[str]) -> bool:
        if program != 'pcowctl':
            # it looks at all options that stand before this one, and does nothing
            return _run(program, *words, '--help').returncode == 0
        # a user of this machine, whoever is meant
        words = ['root:root' if before == '--owner' else word for before, word in _pairs(words)]
        try:
            parser, rest = self._parser(words)
            parser.parse_args(rest)
        except (SystemExit, ValueError):
            return False
        return True

    def _known(self, program: str, words: list[str]) -> bool:
        options = [word.partition('=')[0] for word in words if _OPTION.match(word)]
        if program != 'pcowctl':
            command = [word for word in words if not word.startswith('-')][:1]
            shown = _run(program, *(command if program == 'pcow-img' else []), '--help')
            return shown.returncode == 0 and all(
                re.search(rf'(?<![\w-]){re.escape(option)}(?![\w-])', shown.stdout)
                for option in options
            )
        names = [word for word in words if not word.startswith('-')]
        if not names:
            return True
        try:
            parser, _rest = self._parser(names)
        except ValueError:
            return False
        taken = {string for action in parser._actions for string in action.option_strings}
        return set(options) <= taken

    def test_typed(self) -> None:
        commands = list(_typed())
        for program, at_least in (('pcowctl', 60), ('pcow-img', 8)):
            seen = sum(name == program for name, _words, _where in commands)
            self.assertGreater(seen, at_least, program)
        self.assertEqual(
            [], [where for name, words, where in commands if not self._takes(name, words)]
        )

    def test_readme(self) -> None:
        """All that it has people type is a program of the tree, which test_main_job and CI run, or
        a command that :meth:`test_typed` has seen.
        """
        page = base.TOP / 'README.rst'
        lines = [line.strip() for line in _blocks(page) if re.match(r' +[\w/.-]+( +#|$| -)', line)]
        self.assertIn('tools/quickstart', {line.split()[0] for line in lines})
        for line in lines:
            words = shlex.split(line, comments=True)
            self.assertTrue(os.access(base.TOP / words[0], os.X_OK), line)
            shown = subprocess.run(
                [base.TOP / words[0], '--help'], capture_output=True, text=True, check=False
            )
            self.assertEqual(0, shown.returncode, line)
            for option in words[1:]:
                self.assertIn(option, shown.stdout)

    def test_mentioned(self) -> None:
        commands = list(_mentioned())
        self.assertGreater(len(commands), 60)
        self.assertEqual(
            [], [where for name, words, where in commands if not self._known(name, words)]
        )

    def test_can_fail(self) -> None:
        """The same eyes see an option that there is not."""
        for program, line in (
            ('pcowctl', 'pool check --prometeus FILE'),
            ('pcow-img', 'check -r all --no-such-option x.pcow'),
            ('pcow-img', 'chek x.pcow'),
            ('pcow-io', '--ful wait --no-such-option x.pcow'),
        ):
            self.assertFalse(self._takes(program, line.split()), line)
            self.assertFalse(self._known(program, line.split()), line)


def _pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    return zip(['', *words], words, strict=False)
