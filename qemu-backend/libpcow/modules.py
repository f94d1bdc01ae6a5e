# SPDX-License-Identifier: BSD-3-Clause
"""modules.py ARCHIVE SOURCES [TABLE PICTURE]: which file of libpcow calls which, that no files, nor
folders, call or include each other in a circle, that nobody but the table of engines knows one of
them, and that the documentation has the table of the folders, and the picture.

--table and --picture print those, --dot the folders and their calls for Graphviz, --dot FOLDER the
files of one.
"""

from collections.abc import Iterable
import graphlib
from pathlib import Path
import re
import statistics
import subprocess
import sys

Graph = dict[str, set[str]]


def read(archive: str) -> Graph:
    """The files whose symbols each file needs, as FOLDER/FILE."""
    output = subprocess.run(
        ['nm', '--extern-only', '--format=posix', archive],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    needed: dict[str, set[str]] = {}
    owner: dict[str, str] = {}
    file = ''
    for line in output.splitlines():
        words = line.split()
        if line.endswith(']:'):  # ARCHIVE[ANYTHING/FOLDER_FILE.c.o]:
            file = re.split(r'[/[]', line)[-1].removesuffix('.c.o]:').replace('_', '/', 1)
            needed[file] = set()
        elif len(words) > 1 and words[1] in 'Uw':
            needed[file].add(words[0])
        elif len(words) > 1:
            owner[words[0]] = file
    return {
        file: {owner[name] for name in names if name in owner} - {file}
        for file, names in needed.items()
    }


def read_includes(sources: Path) -> Graph:
    """The headers of libpcow that each of its files includes, as FOLDER/FILE.h."""
    found: Graph = {}
    for path in sorted(sources.rglob('*.[ch]')):
        included = re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)
        found[str(path.relative_to(sources))] = {
            str(header.relative_to(sources))
            for name in included
            for place in (path.parent, sources, sources / 'include')
            if (header := place / name).is_file()
        }
    return found


def table(folders: Graph, sources: Path) -> str:
    """A row a folder, callers first: its files, their median and largest number of lines, and what
    it calls.
    """
    rows = ['folder       files median largest  calls', '']
    order = [*graphlib.TopologicalSorter(folders).static_order()][::-1]
    for folder in order:
        lines = [len(path.read_text().splitlines()) for path in (sources / folder).rglob('*.[ch]')]
        called = ' '.join(one for one in order if one in folders[folder])
        counts = f'{len(lines):5} {statistics.median_low(lines):6} {max(lines):7}'
        rows.append(f'{folder:12} {counts}  {called}'.rstrip())
    return '\n'.join(rows) + '\n'


def reduced(graph: Graph) -> Graph:
    """Without the calls that others imply: A -> C where there are A -> B and B -> C."""

    def below(one: str) -> set[str]:
        return graph[one].union(*(below(other) for other in graph[one]))

    return {
        one: called - set().union(*(below(other) for other in called))
        for one, called in graph.items()
    }


def picture(folders: Graph) -> str:
    """The folders, callers above, for tools/lib/docs/picture.py."""
    arrows, row, below = reduced(folders), dict.fromkeys(folders, 0), dict.fromkeys(folders, 0)
    column: dict[str, int] = {}
    order = [*graphlib.TopologicalSorter(folders).static_order()][::-1]
    for one in order:
        for called in folders[one]:
            row[called] = max(row[called], row[one] + 1)
    for one in reversed(order):
        below[one] = max((below[called] + 1 for called in folders[one]), default=0)
    lines = [
        '# written by libpcow/modules.py --picture',
        'alt The folders of libpcow. Each calls those that its arrows lead to, and may call all',
        'alt that are below these; none calls one above it.',
        'grid 150 62',
    ]
    # the longest way down is the first column
    for one in sorted(folders, key=lambda one: (row[one], -below[one], one)):
        column[one] = sum(row[other] == row[one] for other in column)
        lines.append(f'box {one} {column[one]} {row[one]} 0.8x0.55 plain | {one}')
    lines += [
        f'arrow {one} {called}{".right" if column[called] < column[one] else ""}'
        for one in order
        for called in sorted(arrows[one])
    ]
    return '\n'.join(lines) + '\n'


def _without_lines(text: str) -> list[list[str]]:
    """Those of a table may have changed since."""
    return sorted([line.split()[0], *line.split()[4:]] for line in text.splitlines() if line)


def of_folders(graph: Graph) -> Graph:
    folders: Graph = {}
    for file, called in graph.items():
        mine = folders.setdefault(file.partition('/')[0], set())
        mine |= {other.partition('/')[0] for other in called}
    return {folder: called - {folder} for folder, called in folders.items()}


def find_circle(graph: Graph) -> list[str]:
    """What calls itself by way of others."""

    def reached(one: str) -> set[str]:
        found: set[str] = set()
        left = set(graph[one])
        while left:
            other = left.pop()
            found.add(other)
            left |= graph[other] - found
        return found

    return sorted(one for one in graph if one in reached(one))


def find_intruders(graph: Graph) -> list[str]:
    """Who calls an engine, and not through its interface (monitor/engine.h)."""
    return sorted(
        f'{file} calls {engine}'
        for file, called in graph.items()
        for engine in called
        if engine.startswith('monitor/engine_') and file != 'monitor/engine'
    )


def dot(graph: Graph, names: Iterable[str]) -> str:
    shown = set(names)
    lines = [
        f'  "{one}" -> "{other}"' for one in sorted(shown) for other in sorted(graph[one] & shown)
    ]
    return '\n'.join(('digraph libpcow {', *lines, '}'))


def main(arguments: list[str]) -> int:
    graph, sources = read(arguments[0]), Path(arguments[1])
    folders = of_folders(graph)
    match arguments[2:]:
        case ['--dot']:
            print(dot(folders, folders))
            return 0
        case ['--dot', folder]:
            print(dot(graph, (file for file in graph if file.startswith(f'{folder}/'))))
            return 0
        case ['--table']:
            print(table(folders, sources), end='')
            return 0
        case ['--picture']:
            print(picture(folders), end='')
            return 0
    includes = read_includes(sources)
    wrong = [
        f'{one} {verb} {", ".join(sorted(whom[one] & set(circle)))}, in a circle'
        for verb, whom in (('calls', graph), ('calls', folders), ('includes', includes))
        for circle in [find_circle(whom)]
        for one in circle
    ]
    wrong += [f'past the interface of engines: {intruder}' for intruder in find_intruders(graph)]
    if arguments[2:]:
        seen, drawn = map(Path, arguments[2:])
        if _without_lines(seen.read_text()) != _without_lines(table(folders, sources)):
            wrong.append(f'{seen} is of before: write it with --table')
        if drawn.read_text() != picture(folders):
            wrong.append(f'{drawn} is of before: write it with --picture')
    print(*wrong, sep='\n', end='\n' if wrong else '')
    print(
        f'{len(graph)} files in {len(folders)} folders, {sum(map(len, graph.values()))} calls, '
        f'{sum(map(len, includes.values()))} includes'
    )
    return 1 if wrong or len(graph) < 10 or len(includes) < len(graph) else 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
