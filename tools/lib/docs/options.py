# SPDX-License-Identifier: Apache-2.0
"""The configuration options as a page, of the lists from which the services register them."""

from collections.abc import Iterable
from collections.abc import Iterator
import importlib
import re
from typing import Any

# in the order of the page; each has list_opts()
MODULES = ('pcow_driver.common.conf', 'nova_pcow.conf', 'cinder_pcow.options')
_TYPES = {
    'Boolean': '``true`` or ``false``',
    'Integer': 'number',
    'List': 'names with commas between them',
    'String': 'text',
}


def _kind(option: Any) -> str:
    kind = _TYPES[type(option.type).__name__]
    low, high = getattr(option.type, 'min', None), getattr(option.type, 'max', None)
    return kind if low is None else f'{kind}, {low} to {high}'


def _default(option: Any) -> str:
    value = option.default
    if value is None or value in ('', []):
        return 'none'
    return f'``{str(value).lower() if isinstance(value, bool) else value}``'


def _words(text: str) -> str:
    """Help as running text: what reStructuredText would read as marks is not meant so."""
    return re.sub(r'([*`|_\\])', r'\\\1', ' '.join(text.split()))


def options(modules: Iterable[str] = MODULES) -> Iterator[tuple[str, list[Any]]]:
    """Each group with its options."""
    for module in modules:
        for group, found in importlib.import_module(module).list_opts():
            yield getattr(group, 'name', group), list(found)


def page(group: str, modules: Iterable[str] = MODULES) -> list[str]:
    """The options of a group as lines of reStructuredText."""
    lines: list[str] = []
    for name, found in options(modules):
        for option in found if name == group else []:
            lines += [
                f'``{option.dest}``',
                f'    {_kind(option).capitalize()}; default: {_default(option)}. '
                + _words(option.help),
                '',
            ]
    if not lines:
        raise ValueError(f'no option is in a group {group}')
    return lines
