# SPDX-License-Identifier: Apache-2.0
"""Commands that the documentation tells people to type are commands that pcowctl takes."""

from collections.abc import Iterator
import re
import shlex

from pcow_driver.cli import app
from tests.unit.pcow_driver import base

_LINE = re.compile(r'^\s+(?:[#$] )?pcowctl (?P<words>.*)$', re.MULTILINE)
_REDIRECTION = re.compile(r'\s\d?>.*$')
_PAGES = base.TOP / 'doc/source'


def _commands() -> Iterator[tuple[str, list[str]]]:
    """Where it stands, and its words."""
    for page in sorted(
        (*_PAGES.glob('[!m]*/*.rst'), base.TOP / 'README.rst', *base.TOP.glob('devstack/*.rst'))
    ):
        for match in _LINE.finditer(page.read_text(encoding='utf-8')):
            words = shlex.split(_REDIRECTION.sub('', match['words']), comments=True)
            yield f'{page.name}: {match[0].strip()}', words


class DocumentedCommandTest(base.TestCase):
    def test_all(self) -> None:
        ctl = app.PcowCtl()
        refused, seen = [], 0
        for where, words in _commands():
            seen += 1
            factory, name, rest = ctl.command_manager.find_command(words)
            parser = factory(ctl, None).get_parser(f'pcowctl {name}')
            try:
                parser.parse_args(rest)
            except SystemExit:
                refused.append(where)
        self.assertEqual([], refused)
        self.assertGreater(seen, 20)
