# SPDX-License-Identifier: Apache-2.0
"""Templates of the images of an image service: one for each image and pool, made when it is first
needed.

The name of a template has the id of its image and the start of its checksum, so templates of one
name hold the same on every host. Its time of modification is when it was last used. So it is for
the templates of empty file systems, which each host makes for itself: they age out as well.

The data of a template are compared with their checksums when a service first uses it, and again a
day later (``[pcow] compare_templates_after``). One that is damaged, and that nothing stands on, is
made anew.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import errno
import os
import re
import time

from oslo_log import log as logging

from pcow_driver.common import conf
from pcow_driver.common import exception
from pcow_driver.common import locks
from pcow_driver.common import workspace
from pcow_driver.images import image
from pcow_driver.images import protection
from pcow_driver.pools import device
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import scrubs
from pcow_driver.templates import template
from pcow_driver.virt import notices

LOG = logging.getLogger(__name__)

_CHECKSUM_LENGTH = 16
# at its end, the UUID of one that came from another host, where something stood on the very file
_NAME = re.compile(
    r'(?P<common>image-(?P<image_id>[0-9A-Za-z-]{1,128}?)-(?P<checksum>[0-9a-f]{8,16}))'
    r'(?:-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})?'
)
_EMPTY = re.compile(r'format-(?:ext4|xfs)-[0-9]{1,10}-[0-9](?:-[0-9a-f-]{36})?')


@dataclasses.dataclass(frozen=True)
class SourceImage:
    """An image of the image service."""

    id: str
    checksum: str  # hexadecimal, of its data
    format: str  # as the service says it; qcow2 and raw can become templates

    @property
    def template_name(self) -> str:
        """:raises SourceRejected: id or checksum are not what an image service gives"""
        name = f'image-{self.id}-{self.checksum[:_CHECKSUM_LENGTH]}'
        if not _NAME.fullmatch(name):
            raise exception.SourceRejected(
                path=f'image {self.id}', reason='the image service tells no checksum of it'
            )
        return name


@dataclasses.dataclass(frozen=True)
class CachedTemplate:
    """A template that was made by :meth:`TemplateCache.template` or :meth:`TemplateCache.named`."""

    name: str
    image_id: str | None  # None: an empty file system
    size: int  # bytes that it holds in the pool
    last_used: float  # seconds since 1970
    children: int  # images of the pool that stand on it


def _counts() -> int:
    """Seconds for which a comparison does; 0: there is to be none."""
    return int(conf.CONF.pcow.compare_templates_after)


class _Compared:
    """Which files were compared, and when; of this process."""

    def __init__(self) -> None:
        self._when: dict[tuple[int, int], float] = {}

    def is_due(self, status: os.stat_result) -> bool:
        when, counts = self._when.get((status.st_dev, status.st_ino)), _counts()
        return counts > 0 and (when is None or time.monotonic() - when >= counts)

    def note(self, status: os.stat_result) -> None:
        self._when[status.st_dev, status.st_ino] = time.monotonic()


_COMPARED = _Compared()


def image_id(template_name: str) -> str | None:
    """The id of the image that a template was made of; None if it is not one of this cache."""
    match = _NAME.fullmatch(template_name)
    return match['image_id'] if match else None


def common_name(template_name: str) -> str:
    """The name under which each host has a template that holds the same."""
    match = _NAME.fullmatch(template_name)
    return match['common'] if match else template_name


def _fetch(path: str, fetch: Callable[[str], None]) -> None:
    try:
        fetch(path)
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT):  # of the image service, for instance
            raise
        with workspace.errors():
            raise


class TemplateCache:
    """The templates of one pool; any number of processes and threads of the host may use them at
    once.
    """

    def __init__(self, pool: pool_module.Pool) -> None:
        self.pool = pool

    @contextlib.contextmanager
    def template(
        self,
        source: SourceImage,
        fetch: Callable[[str], None],
        accept: Callable[[int], None] | None = None,
    ) -> Iterator[str]:
        """Name of the template of an image, which is made if it is not there; it stays while the
        context is held.

        :param fetch: writes the image's data to the path that it is given
        :param accept: called with the bytes that a device needs for the image, before anything is
            made of it; raises what keeps the caller from using it
        :raises SourceRejected: it is not what its format says, damaged, or unsafe
        :raises InvalidSize: too large
        :raises ConversionDirUnusable: full, for instance
        :raises NoSpace: it does not fit in the pool
        :raises ToolFailed: the pool is full, for instance
        :raises ImageDamaged: its data are not what they were, and images stand on it
        """
        name = source.template_name
        with self.named(name, lambda: self._build(name, source, fetch, accept)):
            if accept is not None:
                accept(device.window(self.pool.existing_path(name)).size)
            yield name

    @contextlib.contextmanager
    def named(self, name: str, build: Callable[[], None]) -> Iterator[None]:
        """A template stays while the context is held; it is built if it is not there.

        :raises ImageDamaged: its data are not what they were, and images stand on it
        :raises PcowError: what ``build`` raises
        """
        with self._lock(name):
            path = self.pool.image_path(name)
            damage = self._damage_of(name, path)
            if damage is not None:
                self._drop_damaged(name, path, damage)
            if os.path.lexists(path):
                with protection.lifted(path):
                    os.utime(path, follow_symlinks=False)
                template.protect(self.pool, path)  # a build may have been killed before it did
            else:
                build()
            yield

    def _damage_of(self, name: str, path: str) -> str | None:
        """The first finding of a comparison, if one is due; None: it is whole, as far as is known,
        not there, or somebody has accepted it as it is.
        """
        try:
            status = os.stat(path)
        except OSError:
            return None
        known = scrubs.read(self.pool.uuid).images.get(name)
        is_known = known is not None and known.inode == status.st_ino and known.is_damaged
        if is_known and known is not None and known.accepted:
            return None
        if not is_known and not _COMPARED.is_due(status):
            return None
        checked = scrubs.now()
        try:
            found = image.check_data(path)
        except exception.PcowError as e:  # who makes an image on it hears of it, too
            LOG.warning('Template %s cannot be compared with its checksums: %s', path, e)
            _COMPARED.note(status)
            return None
        if found.damage is None:
            _COMPARED.note(status)
        if found.damage is not None or is_known:
            notices.keep(self.pool, name, scrubs.of_check(status.st_ino, checked, found))
        return found.damage

    def _drop_damaged(self, name: str, path: str, damage: str) -> None:
        """:raises ImageDamaged: images stand on it, or may"""
        LOG.error('Template %s is damaged: %s', path, damage)
        try:
            self.pool.delete_template(name, damaged=True)
        except exception.ImageInUse as e:
            raise exception.ImageDamaged(
                path=path,
                above='',
                when=scrubs.now(),
                finding=f'{damage}; it cannot be made anew, {e}',
                pool=self.pool.name,
                name=name,
            ) from None

    def _lock(self, name: str) -> contextlib.AbstractContextManager[None]:
        return locks.lock(f'template-{self.pool.uuid}-{name}')

    def _build(
        self,
        name: str,
        source: SourceImage,
        fetch: Callable[[str], None],
        accept: Callable[[int], None] | None,
    ) -> None:
        started = time.monotonic()
        if source.format not in template.SOURCE_FORMATS:  # before it is fetched
            raise exception.SourceRejected(
                path=f'image {source.id}',
                reason=(
                    f'its format is {source.format}; a guest on pcow takes '
                    f'{" or ".join(template.SOURCE_FORMATS)}'
                ),
            )
        with workspace.directory('fetch') as directory:
            path = os.path.join(directory, 'image')
            _fetch(path, fetch)
            try:
                template.build(self.pool, name, path, source.format, accept=accept)
            except exception.SourceRejected as e:
                raise exception.SourceRejected(
                    path=f'image {source.id}', reason=e.details['reason']
                ) from None
        LOG.info('Template %s was made in %.1f s', name, time.monotonic() - started)

    def entries(self) -> list[CachedTemplate]:
        """Templates of images and of empty file systems, by name, with how many images stand on
        each.
        """
        images = [item for item in self.pool.listed() if item.summary is not None]
        bases = collections.Counter(item.summary.base_uuid for item in images if item.summary)
        found = []
        for item in images:
            ours = _NAME.fullmatch(item.name) or _EMPTY.fullmatch(item.name)
            if ours and item.summary and item.summary.sealed:
                with contextlib.suppress(FileNotFoundError):
                    found.append(
                        CachedTemplate(
                            item.name,
                            image_id(item.name),
                            item.summary.actual_size,
                            os.stat(item.path).st_mtime,
                            bases[item.summary.uuid],
                        )
                    )
        return found

    def age_out(self, max_age: float) -> list[str]:
        """Delete the templates that nothing stands on and that nobody used for ``max_age`` seconds;
        their names.
        """
        deleted = []
        for item in self.entries():
            if item.children or time.time() - item.last_used < max_age:
                continue
            try:
                with self._lock(item.name):
                    if time.time() - os.stat(self.pool.existing_path(item.name)).st_mtime < max_age:
                        continue  # somebody took it meanwhile
                    self.pool.delete_template(item.name)
            except exception.PcowError as e:
                LOG.info('Template %s stays: %s', item.name, e)
            else:
                deleted.append(item.name)
                LOG.info(
                    'Template %s was deleted: nothing stands on it and it was not used for %d s',
                    item.name,
                    max_age,
                )
        return deleted
