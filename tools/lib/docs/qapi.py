# SPDX-License-Identifier: Apache-2.0
"""QEMU's description of its monitor's commands (QAPI) as reStructuredText.

It reads what the schema of pcow uses: enum, struct, command, event, with the comments that QEMU
wants of each.
"""

import ast
from collections.abc import Iterator
import dataclasses
from pathlib import Path
import re
from typing import Any

KINDS = ('command', 'event', 'struct', 'enum')
_BLOCK = re.compile(r'^##\n(?P<comment>(?:#.*\n)*?)##\n(?P<code>\{(?:.*\n)*?.*\}\n)', re.MULTILINE)
_MEMBER = re.compile(r'@(?P<name>[\w-]+): ?(?P<text>.*)$')
_SECTION = re.compile(r'(?P<name>Returns|Errors|Since):\s*(?P<text>.*)$')


class SchemaInvalid(ValueError):
    """The message names the thing."""


@dataclasses.dataclass
class Entry:
    kind: str
    name: str
    code: dict[str, Any]
    text: list[str] = dataclasses.field(default_factory=list)
    members: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    sections: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    examples: list[str] = dataclasses.field(default_factory=list)

    def types(self) -> dict[str, str]:
        """Type by member; '[TYPE]': a list."""
        data = self.code.get('data', {})
        if isinstance(data, list):
            return dict.fromkeys(data, '')
        return {
            name.removeprefix('*'): f'[{kind[0]}]' if isinstance(kind, list) else str(kind)
            for name, kind in data.items()
        }

    def is_optional(self, member: str) -> bool:
        return f'*{member}' in self.code.get('data', {})


def schema_file(top: Path) -> Path:
    """Where the schema lies in the tree, in whichever folder.

    :raises SchemaInvalid: there is not just one
    """
    found = sorted((top / 'qemu-backend').rglob('pcow.json'))
    if len(found) != 1:
        raise SchemaInvalid(f'pcow.json is {len(found)} times below qemu-backend')
    return found[0]


def patched_schema(top: Path) -> str:
    """What the patches add to QEMU's own schema: the properties of the memory backend."""
    added: list[str] = []
    for patch in sorted((top / 'qemu-backend').rglob('*.patch')):
        text = patch.read_text(encoding='utf-8', errors='replace')
        for part in re.split(r'^diff --git ', text, flags=re.MULTILINE)[1:]:
            if part.startswith('a/qapi/qom.json '):
                lines = part.splitlines()
                added += [line[1:] for line in lines if re.match(r'[+ ](?!\+\+)', line)]
    return '\n'.join(added) + '\n'


def _comment(entry: Entry, lines: list[str]) -> None:
    into = entry.text
    for line in lines:
        if re.match(r'\.\. qmp-example::', line):
            into = entry.examples
            continue
        member, section = _MEMBER.match(line), _SECTION.match(line)
        if member and into is not entry.examples:
            into = entry.members.setdefault(member['name'], [])
            line = member['text']
        elif section and into is not entry.examples:
            into = entry.sections.setdefault(section['name'], [])
            line = section['text']
        elif re.match(r'\.\. note::', line):
            into = entry.text
            into.append('')
        into.append(line)


def parse(text: str, prefix: str = '') -> Iterator[Entry]:
    """What has a name that begins so.

    :raises SchemaInvalid:
    """
    for match in _BLOCK.finditer(text):
        if not match['comment'].startswith(f'# @{prefix}'):
            continue
        try:
            code = ast.literal_eval(
                re.sub(r'\btrue\b', 'True', re.sub(r'\bfalse\b', 'False', match['code']))
            )
        except (SyntaxError, ValueError) as e:
            raise SchemaInvalid(f'{match["code"].splitlines()[0]}: {e}') from e
        kind = next((kind for kind in KINDS if kind in code), None)
        if kind is None:
            continue
        lines = [re.sub(r'^# ?', '', line) for line in match['comment'].splitlines()]
        name = code[kind]
        if lines[0] != f'@{name}:':
            raise SchemaInvalid(f'{name}: its comment is of {lines[0]}')
        entry = Entry(kind, name, code)
        _comment(entry, lines[1:])
        if set(entry.members) != set(entry.types()):
            raise SchemaInvalid(f'{name}: members and comments differ')
        yield entry


def backend_properties(text: str) -> dict[str, list[str]]:
    """What is added to the properties of memory-backend-file: name, text."""
    entry = Entry('struct', 'MemoryBackendFileProperties', {})
    _before, _name, after = text.partition(f'# @{entry.name}:\n')
    comment, _end, _after = after.partition('##\n')
    # of the lines around them, which the patch only shows, there are bits
    _comment(entry, [line[2:] for line in comment.splitlines()])
    return {
        name: lines
        for name, lines in entry.members.items()
        if name == 'format' or name.startswith('pcow-')
    }


def _marks(line: str) -> str:
    return re.sub(r'(?<![\w`])@([\w-]+)', r'``\1``', line)


def _paragraph(lines: list[str]) -> str:
    return ' '.join(_marks(line.strip()) for line in lines if line.strip())


def _type(name: str, known: set[str]) -> str:
    inner = name.strip('[]')
    shown = f'`{inner}`_' if inner in known else inner
    return f'list of {shown}' if name.startswith('[') else shown


def _table(entry: Entry, known: set[str]) -> list[str]:
    lines = []
    for name, kind in entry.types().items():
        shown = _type(kind, known) if kind else ''
        if entry.is_optional(name):
            shown += ', optional'
        head = f'``{name}``' + (f' ({shown})' if shown else '')
        lines += [head, f'    {_paragraph(entry.members[name])}', '']
    return lines


def section(entry: Entry, known: set[str], mark: str = '-') -> list[str]:
    """One entry as a section: lines of reStructuredText."""
    lines = [entry.name, mark * len(entry.name), '', *map(_marks, entry.text), '']
    lines += _table(entry, known)
    returns = entry.code.get('returns')
    if returns:
        kind = f'[{returns[0]}]' if isinstance(returns, list) else returns
        lines += [f'Returns: {_type(kind, known)}.', '']
    errors = entry.sections.get('Errors')
    if errors:
        # indented in the schema; a list item goes on behind its dash
        lines += ['It fails:', '']
        lines += [_marks(re.sub(r'^ {4}', '', line)).replace('- If', '- if') for line in errors]
        lines += ['']
    if entry.examples:
        lines += ['::', '', *entry.examples, '']
    return lines


def entries(top: Path) -> list[Entry]:
    """All of pcow's, also those that the patches add to QEMU's schema."""
    found = {entry.name: entry for entry in parse(schema_file(top).read_text(encoding='utf-8'))}
    added = patched_schema(top)
    # what stands whole in a patch; of QEMU's own only some lines do
    for prefix in ('HostMemFormat', 'HostMemPcow'):
        for entry in parse(added, prefix):
            # there may be a patch for each version of QEMU
            found.setdefault(entry.name, entry)
    return list(found.values())


def page(top: Path, kind: str) -> list[str]:
    """All entries of a kind, or 'property', as lines of reStructuredText."""
    if kind == 'property':
        found = backend_properties(patched_schema(top))
        return [
            line
            for name, text in found.items()
            for line in (f'``{name}``', f'    {_paragraph(text)}', '')
        ]
    every = entries(top)
    known = {entry.name for entry in every}
    kinds = ('struct', 'enum') if kind == 'type' else (kind,)
    return [line for entry in every if entry.kind in kinds for line in section(entry, known)]
