# SPDX-License-Identifier: Apache-2.0
"""Lets Nova find a compute driver outside of its own tree.

Nova imports ``'nova.virt.' + compute_driver`` and nothing else, so ``nova.virt.nova_pcow.driver``
must be importable. The package's ``nova_pcow.pth`` calls :func:`install` when the interpreter
starts; until Nova asks for that name nothing happens.
"""

from collections.abc import Sequence
import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType

_PARENT = 'nova.virt.'
_PACKAGE = _PARENT + __package__


class AliasFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports ``nova.virt.nova_pcow.X`` as a module with the attributes of ``nova_pcow.X``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == _PACKAGE or fullname.startswith(_PACKAGE + '.'):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=fullname == _PACKAGE)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """:raises ImportError: this release of Nova is not supported; Nova logs it and ends"""
        compat = importlib.import_module(f'{__package__}.compat')
        compat.check()
        original = importlib.import_module(module.__name__.removeprefix(_PARENT))
        module.__doc__ = original.__doc__
        module.__dict__['__getattr__'] = lambda name: getattr(original, name)


def install() -> None:
    """May be called more than once."""
    if not any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        sys.meta_path.append(AliasFinder())
