# SPDX-License-Identifier: Apache-2.0
"""The directives of this project's documentation, for Sphinx.

``picture:: NAME``: ``doc/source/pictures/NAME.txt`` drawn; ``options:: GROUP``, ``qmp:: KIND``.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils import statemachine
from sphinx.application import Sphinx
from sphinx.util import docutils as sphinx_docutils
from sphinx.util.nodes import nested_parse_with_titles

from tools.lib.docs import options
from tools.lib.docs import picture
from tools.lib.docs import qapi

TOP = Path(__file__).resolve().parents[3]


class Picture(sphinx_docutils.SphinxDirective):
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        path = Path(self.env.srcdir) / 'pictures' / f'{self.arguments[0]}.txt'
        self.env.note_dependency(str(path))
        self.env.note_dependency(picture.__file__)
        try:
            drawn = picture.load(path)
        except (OSError, picture.PictureInvalid) as e:
            raise self.error(str(e)) from e
        return [
            nodes.raw('', picture.draw(drawn), format='html'),
            # for whoever gets no picture: man pages and plain text
            nodes.raw('', drawn.alt, format='man text'),
        ]


class _Generated(sphinx_docutils.SphinxDirective):
    """Lines of reStructuredText that a function makes of the argument."""

    required_arguments = 1
    make: Callable[[str], list[str]]
    sources: Callable[[], list[Path]]

    def run(self) -> list[nodes.Node]:
        for path in type(self).sources():
            self.env.note_dependency(str(path))
        try:
            lines = type(self).make(self.arguments[0])
        except ValueError as e:
            raise self.error(str(e)) from e
        node = nodes.Element()
        node.document = self.state.document
        nested_parse_with_titles(
            self.state, statemachine.StringList(lines, self.get_source_info()[0]), node
        )
        return list(node.children)


class Options(_Generated):
    make = staticmethod(options.page)

    @staticmethod
    def sources() -> list[Path]:
        return [TOP / f'{module.replace(".", "/")}.py' for module in options.MODULES]


class Qmp(_Generated):
    @staticmethod
    def make(kind: str) -> list[str]:
        return qapi.page(TOP, kind)

    @staticmethod
    def sources() -> list[Path]:
        return [qapi.schema_file(TOP), *(TOP / 'qemu-backend').rglob('*.patch')]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive('picture', Picture)
    app.add_directive('options', Options)
    app.add_directive('qmp', Qmp)
    return {'version': '1', 'parallel_read_safe': True}
