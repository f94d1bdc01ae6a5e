# SPDX-License-Identifier: Apache-2.0
"""What was probably meant by a name that there is not.

For people at a terminal only: services do not tell their users of the images of others.
"""

from collections.abc import Iterable
import difflib
import os

from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.pools import pool
from pcow_driver.pools import registry


def near(wanted: str, known: Iterable[str]) -> str | None:
    """The one of ``known`` that is like ``wanted``."""
    found = difflib.get_close_matches(wanted, known, n=1, cutoff=0.7)
    return found[0] if found else None


def _files(directory: str) -> list[str]:
    """Names of images, if the directory can be read."""
    try:
        entries = os.listdir(directory)
    except OSError:
        return []
    return sorted(
        entry.removesuffix(names.IMAGE_SUFFIX)
        for entry in entries
        if entry.endswith(names.IMAGE_SUFFIX) and not entry.startswith('.')
    )


def in_pool(found: pool.Pool, name: str) -> str:
    """For the end of a sentence: the image of a pool that is like ``name``."""
    like = near(name, _files(found.path))
    return f' (did you mean {found.name}/{like}?)' if like else ''


def anywhere(name: str) -> str:
    """For the end of a sentence: the image of whatever pool that has this name, or one like it."""
    name = os.path.basename(name).removesuffix(names.IMAGE_SUFFIX)
    try:
        pools = registry.PoolRegistry().list()
    except exception.PcowError:
        return ''
    there = {item: entry.name for entry in pools for item in _files(entry.path)}
    like = near(name, there)
    return f' (did you mean {there[like]}/{like}?)' if like else ''
