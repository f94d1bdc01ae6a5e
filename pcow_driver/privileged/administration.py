# SPDX-License-Identifier: Apache-2.0
"""Marks what only a process of root may call. No context of oslo.privsep: whoever can start one of
those can use it.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import os
from typing import ParamSpec
from typing import TypeVar

from pcow_driver.common import exception

_P = ParamSpec('_P')
_T = TypeVar('_T')
_MARK = 'pcow_administration'


def entrypoint(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """:raises RootNeeded: when somebody else calls it"""

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if os.geteuid() != 0:
            raise exception.RootNeeded(
                what=(function.__doc__ or '').partition('\n')[0].rstrip('.:') or function.__name__
            )
        return function(*args, **kwargs)

    setattr(checked, _MARK, True)
    return checked


def is_entrypoint(function: object) -> bool:
    return getattr(function, _MARK, False)
