# SPDX-License-Identifier: Apache-2.0
"""What the images of a pool stand on, as far as a list of them tells."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import os
import uuid as uuidlib

from pcow_driver.common import names
from pcow_driver.images import model

_NO_UUID = str(uuidlib.UUID(int=0))  # of a base of format 1, or at which nobody has looked


@dataclasses.dataclass(frozen=True)
class ListedImage:
    """An image of a pool with what can be said of many at little cost."""

    name: str
    path: str
    summary: model.Summary | None
    error: str | None = None


def chain(items: dict[str, ListedImage], name: str) -> Iterator[ListedImage]:
    """An image and what it stands on, top first, as far as a list tells; what cannot be read ends
    it.
    """
    seen: set[str] = set()
    at = items.get(name)
    while at is not None and at.name not in seen:  # damage can make a ring
        seen.add(at.name)
        yield at
        base = at.summary.base_filename if at.summary else None
        at = items.get(base.removesuffix(names.IMAGE_SUFFIX)) if base else None


class Bases:
    """What images of a list stand on. Who has broken out of a QEMU writes what he likes into the
    record of his image, and as its own UUID.
    """

    def __init__(self, items: list[ListedImage]) -> None:
        self._items = {item.name: item for item in items}
        self._by_uuid: dict[str, list[ListedImage]] = {}
        for item in items:
            if item.summary is not None:
                self._by_uuid.setdefault(item.summary.uuid, []).append(item)

    def of(self, name: str) -> set[str]:
        """Those with the UUID that the image has recorded; if one has the recorded name as well,
        that alone. None has it where a base was moved by hand, or its name is not printable.
        """
        item = self._items.get(name)
        if item is None or item.summary is None or item.summary.base_uuid is None:
            return set()
        wanted = item.summary.base_filename
        found = {one.name: one.path for one in self._by_uuid.get(item.summary.base_uuid, ())}
        named = {one for one, path in found.items() if os.path.basename(path) == wanted}
        return named or (set() if item.summary.base_uuid == _NO_UUID else set(found))

    def leads_to(self, name: str, base: str) -> bool:
        """Whether an image that was found to name the UUID of this one stands on it; also if one
        of them is another by now, or cannot be read any more.
        """
        item, found = self._items.get(name), self.of(name)
        has_uuid = item is None or item.summary is None or item.summary.base_uuid != _NO_UUID
        return base in found or (not found and has_uuid)

    def below(self, name: str) -> set[str]:
        """The image, and what it stands on. None of these can stand on it: a chain that leads back
        to itself was written by hand, and nobody can open it.
        """
        found, todo = set[str](), [name]
        while todo:
            at = todo.pop()
            if at not in found:
                found.add(at)
                todo += self.of(at)
        return found
