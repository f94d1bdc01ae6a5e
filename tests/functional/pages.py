# SPDX-License-Identifier: Apache-2.0
"""Pages of the documentation whose commands a test types as they stand there.

A line of a literal block is typed, or the test names it with a reason: :meth:`Page.check` fails
for any other one, so a test stays complete when its page changes.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import os
from pathlib import Path
import re
import subprocess

TOP = Path(__file__).resolve().parents[2]
DOCUMENTS = TOP / 'doc/source'
SECONDS = 300
_PROMPT = re.compile(r'^[#$] ')
_TITLE = re.compile(r'^(.+)\n([=-])\2{2,}$', re.MULTILINE)


def _blocks(text: str) -> Iterator[list[str]]:
    """The lines of each literal block, without its indentation."""
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        begins = lines[number].endswith('::') and not lines[number].lstrip().startswith('.. ')
        number += 1
        if not begins:
            continue
        indent, block = 0, []
        while number < len(lines):
            line = lines[number]
            here = len(line) - len(line.lstrip())
            if line.strip():
                indent = indent or here
                if here < max(indent, 1):
                    break
                block.append(line[indent:].rstrip())
            number += 1
        yield block


def _joined(block: list[str]) -> Iterator[str]:
    """Lines, those that a backslash continues as one; without the prompt."""
    begun = ''
    for line in block:
        begun += line.strip() if begun else _PROMPT.sub('', line.strip())
        if begun.endswith('\\'):
            begun = begun[:-1]
            continue
        yield begun
        begun = ''


def section(text: str, title: str) -> str:
    """What stands below a title, up to the next one of its kind."""
    titles = [*_TITLE.finditer(text)]
    (own,) = (one for one in titles if one[1] == title)
    ends = [one.start() for one in titles if one.start() > own.start() and one[2] == own[2]]
    return text[own.end() : ends[0] if ends else None]


class Shell:
    """Types a line as it stands into a shell of its own, but for what is elsewhere here.

    :param directory: where it is typed
    :param places: what stands in place of a part of a line
    :param launcher: words before the shell's, such as what enters a namespace
    :param prelude: a line that it has read before
    """

    def __init__(
        self,
        directory: Path,
        environment: Mapping[str, str] | None = None,
        places: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
        prelude: str = 'true',
    ) -> None:
        self.directory = directory
        self.environment = os.environ | {'LC_ALL': 'C'} | dict(environment or {})
        self.places = dict(places or {})
        self.launcher = tuple(launcher)
        self.prelude = prelude

    def words(self, line: str) -> list[str]:
        """The command that types it."""
        for place, here in self.places.items():
            line = line.replace(place, here)
        text = f'cd "$0" && set -eo pipefail && {self.prelude}\n{line}'
        return [*self.launcher, 'bash', '-c', text, str(self.directory)]

    def type(self, line: str, exit_code: int | None = 0, seconds: float = SECONDS) -> str:
        """What it prints, errors after all else; it must end with this exit code (None: any)."""
        done = subprocess.run(
            self.words(line),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors='replace',
            timeout=seconds,
            check=False,
        )
        if exit_code is not None and done.returncode != exit_code:
            raise AssertionError(f'{line}: {done.returncode}: {done.stdout}{done.stderr}')
        return done.stdout + done.stderr


class Page:
    """A page, and which of its lines were typed.

    :param name: of its file, such as ``howto/pools``
    :param not_typed: regular expressions of lines that are not, each with the reason
    :param only: the title of the section that this is about; default: all of them
    """

    def __init__(
        self, name: str, not_typed: Mapping[str, str] | None = None, only: str | None = None
    ) -> None:
        self.name = name
        text = (DOCUMENTS / f'{name}.rst').read_text(encoding='utf-8')
        self.blocks = [*_blocks(section(text, only) if only else text)]
        self.lines = [line for block in self.blocks for line in _joined(block)]
        self._not_typed = dict(not_typed or {})
        self._typed: set[str] = set()

    def commands(self) -> list[str]:
        """The lines that are to be typed."""
        return [line for line in self.lines if not any(self._named(line))]

    def _named(self, line: str) -> Iterator[str]:
        return (one for one in self._not_typed if re.search(one, line))

    def find(self, pattern: str) -> str:
        """The one line that a regular expression matches."""
        found = {line for line in self.lines if re.search(pattern, line)}
        if len(found) != 1:
            raise AssertionError(f'{self.name}: {pattern!r} is in {sorted(found)} of {self.lines}')
        return found.pop()

    def type(self, shell: Shell, pattern: str, exit_code: int | None = 0) -> str:
        """What the line prints that the regular expression matches."""
        line = self.take(pattern)
        return shell.type(line, exit_code)

    def take(self, pattern: str) -> str:
        """The same line for somebody who types it in another way."""
        line = self.find(pattern)
        self._typed.add(line)
        return line

    def took(self, line: str) -> None:
        """This line was typed."""
        self._typed.add(line)

    def check(self) -> None:
        """All lines were typed, or are named with the reason; and all that is named is there."""
        left = [line for line in self.commands() if line not in self._typed]
        if left:
            raise AssertionError(f'{self.name}: not typed, and no reason is given: {left}')
        stale = [
            one
            for one in self._not_typed
            if not any(re.search(one, line) for line in self.lines if line not in self._typed)
        ]
        if stale:
            raise AssertionError(f'{self.name}: named as not typed, and not there: {stale}')
