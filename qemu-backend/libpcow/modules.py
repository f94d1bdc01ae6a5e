# SPDX-License-Identifier: BSD-3-Clause
"""modules.py ARCHIVE: which file of libpcow calls which, that no files, nor folders, call in a
circle, and that nobody but the table of engines knows one of them.

--dot prints the folders and their calls for Graphviz, --dot FOLDER the files of one.
"""

from collections.abc import Iterable
import re
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
    graph = read(arguments[0])
    folders = of_folders(graph)
    if arguments[1:] == ['--dot']:
        print(dot(folders, folders))
        return 0
    if len(arguments) == 3:
        print(dot(graph, (file for file in graph if file.startswith(f'{arguments[2]}/'))))
        return 0
    circles = [circle for circle in (find_circle(graph), find_circle(folders)) if circle]
    for circle in circles:
        print('these call each other in a circle:')
        for one in circle:
            print(
                f'  {one} calls {", ".join(sorted((graph.get(one) or folders[one]) & set(circle)))}'
            )
    intruders = find_intruders(graph)
    for intruder in intruders:
        print(f'past the interface of engines: {intruder}')
    print(f'{len(graph)} files in {len(folders)} folders, {sum(map(len, graph.values()))} calls')
    return 1 if circles or intruders or len(graph) < 10 else 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
