# SPDX-License-Identifier: Apache-2.0
"""A pool: a directory of images on one byte-addressable (or ordinary) file system.

A marker tells a pool from any other directory (:mod:`pcow_driver.pools.marker`). Images are the
files ``NAME.pcow``; one that is sealed is a template, and what stands on it are its children.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import datetime
import os
import stat
from typing import Any
import uuid as uuidlib

from oslo_log import log as logging

from pcow_driver.common import access
from pcow_driver.common import exception
from pcow_driver.common import immutable
from pcow_driver.common import locks
from pcow_driver.common import names
from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.images import image_locks
from pcow_driver.images import model
from pcow_driver.images import protection
from pcow_driver.pools import bases
from pcow_driver.pools import list_cache
from pcow_driver.pools import marker
from pcow_driver.pools import provisioned
from pcow_driver.pools import scrubs
from pcow_driver.pools import settings as settings_module
from pcow_driver.pools import watermark

LOG = logging.getLogger(__name__)


def _is_damaged(path: str) -> bool:
    """Not if only a writer was in the way of a look at it, or if the look was killed."""
    try:
        image.info(path, force_share=True)
    except exception.ToolFailed as e:
        return bool(e.details['exit_code'] >= 0)
    return False


@dataclasses.dataclass(frozen=True)
class PoolEntry:
    """What the registry knows of a pool, without looking at its directory."""

    name: str
    path: str
    uuid: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    # what is left to be ended, see registry.Ending; None: nobody began that
    ending: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class PoolImage:
    """An image file of a pool; ``info`` is None and ``error`` says why if it cannot be read."""

    name: str
    path: str
    info: model.ImageInfo | None
    error: str | None = None


def _provisioned(item: bases.ListedImage) -> int:
    """For an image that is no template."""
    return item.summary.actual_size + item.summary.may_grow if item.summary else 0


@dataclasses.dataclass(frozen=True)
class Pool:
    name: str
    path: str  # absolute
    uuid: str
    created: str  # ISO 8601, UTC
    settings: settings_module.Settings = dataclasses.field(default_factory=settings_module.Settings)
    made_as: str | None = None  # persistence class when it was made; None: nobody noted it

    @property
    def marker(self) -> marker.Marker:
        return marker.Marker(self.name, self.uuid, self.created, self.made_as)

    def renamed(self, name: str) -> Pool:
        return dataclasses.replace(self, name=name)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold while images appear or disappear: nobody then deletes a base that somebody is about
        to stand on, on any host that has the pool mounted.

        :raises PoolInvalid: it was removed, or is not mounted any more; or something that is no
            lock is in it
        """
        name = f'pool-{self.uuid}'
        with locks.lock(name), contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locks.lock_in(self.path, names.LOCK, name, self._check_there))
            except OSError as e:
                raise exception.PoolInvalid(
                    path=self.path, reason=f'{names.LOCK}: {e.strerror}: delete that'
                ) from None
            self._check_there()
            yield

    def _check_there(self) -> None:
        """:raises PoolInvalid:"""
        if marker.read(self.path).uuid != self.uuid:
            raise exception.PoolInvalid(
                path=self.path, reason=f'the pool {self.name} was here and another one is now'
            )

    def persistence(self) -> str:
        """What survives: ``volatile``, ``page-cache`` or ``pmem``, as the file system was found to
        behave.

        :raises ToolFailed: not even the marker can be opened
        """
        try:
            return image.probe(self.path)
        except exception.ToolFailed:
            # A file is made for that, which a read-only or full file system refuses; then one tells
            # that is there already.
            return image.probe(os.path.join(self.path, names.MARKER))

    def has_lost_pmem(self) -> bool:
        """What guests flush was durable when the pool was made, and is no longer: mounted without
        DAX, or copied.
        """
        return self.made_as == 'pmem' and self.persistence() != 'pmem'

    def capacity(self) -> watermark.Capacity:
        return watermark.Capacity.of(self.path)

    def entries(self) -> list[str]:
        """Names of all files but the marker, the lock, and what the file system itself keeps in its
        root.
        """
        others = {names.MARKER, names.LOCK, 'lost+found'}
        return sorted(name for name in os.listdir(self.path) if name not in others)

    def rescue_files(self) -> Iterator[tuple[str, str]]:
        """The files that keep what repairs have dropped, and of each the image's file name."""
        # of thousands of names hardly one is such a file's, and the deletion of an image asks
        for name in sorted(name for name in os.listdir(self.path) if names.RESCUE_MARK in name):
            match = names.RESCUE.fullmatch(name)
            path = os.path.join(self.path, name)
            if match and os.path.isfile(path) and not os.path.islink(path):
                yield path, match['image']

    def image_path(self, name: str) -> str:
        """Where the image of this name is, or would be.

        :raises InvalidName:
        """
        return os.path.join(self.path, names.check_name('image', name) + names.IMAGE_SUFFIX)

    def existing_path(self, name: str) -> str:
        """Where the image of this name is.

        :raises InvalidName:
        :raises ImageNotFound: no regular file has this name
        """
        path = self.image_path(name)
        try:
            if stat.S_ISREG(os.lstat(path).st_mode):
                return path
        except FileNotFoundError:
            pass
        raise exception.ImageNotFound(path=path)

    def listed(self, *, base_uuid: str | None = None) -> list[bases.ListedImage]:
        """All images and templates by name, also those that somebody has open; one program looks at
        all of them.

        :param base_uuid: only those that stand on this image, and those that cannot be read and
            stood on it when they could be, or may stand on it for all that is known
        """
        found = []
        listed = image.list_directory(
            self.path, base_uuid=base_uuid, cache=list_cache.path(self.uuid)
        )
        for entry, value in sorted(listed.items()):
            name, path = entry.removesuffix(names.IMAGE_SUFFIX), os.path.join(self.path, entry)
            if isinstance(value, model.Summary):
                found.append(bases.ListedImage(name, path, value))
            elif os.path.lexists(path):  # else it was deleted meanwhile
                found.append(bases.ListedImage(name, path, None, value))
        return found

    def known_size(self, name: str) -> int:
        """Virtual size of an image that cannot be read, by which :meth:`account` counts it: as it
        was when it could be; 0 if nobody knows that, or it was a template.
        """
        found = image.total(self.path, name + names.IMAGE_SUFFIX, cache=list_cache.path(self.uuid))
        return found.may_grow_frozen if found.unreadable else 0

    def remember(self, name: str) -> None:
        """Have it known what a new image stands on, or how large one is now, before a guest can
        make it unreadable. Of those of other users this user knows it from his next
        :meth:`listed` on.
        """
        try:
            image.list_directory(
                self.path, name + names.IMAGE_SUFFIX, cache=list_cache.path(self.uuid)
            )
        except (exception.PcowError, OSError) as e:  # the image is there, and its maker goes on
            LOG.warning('What %s stands on, and its size, are not known yet: %s', name, e)

    def images(self) -> list[PoolImage]:
        """As :meth:`listed`, with all that there is to say of each; a program looks at each.
        Symbolic links are no images.
        """
        found = []
        for entry in sorted(os.scandir(self.path), key=lambda entry: entry.name):
            if entry.name.startswith('.') or not entry.name.endswith(names.IMAGE_SUFFIX):
                continue
            if entry.is_file(follow_symlinks=False):
                name = entry.name.removesuffix(names.IMAGE_SUFFIX)
                try:
                    found.append(
                        PoolImage(name, entry.path, image.info(entry.path, force_share=True))
                    )
                except exception.ImageNotFound:
                    continue  # deleted meanwhile
                except exception.ToolFailed as e:
                    found.append(PoolImage(name, entry.path, None, str(e)))
        return found

    def templates(self) -> list[PoolImage]:
        return [item for item in self.images() if item.info and item.info.sealed]

    def standing_on(self, name: str, uuid: str) -> list[bases.ListedImage]:
        """What stands on the image of this name and UUID, and what cannot be read and may.

        An image that leads to another one with that UUID stands on that one; and neither an image
        nor what it stands on stands on itself.
        """
        items = self.listed(base_uuid=uuid)
        if all(item.summary is None for item in items):
            return items
        listed = bases.Bases(self.listed())
        below = listed.below(name)
        return [
            item
            for item in items
            if item.summary is None or (listed.leads_to(item.name, name) and item.name not in below)
        ]

    def children(
        self, name: str, *, known_only: bool = False, uuid: str | None = None
    ) -> list[str]:
        """Names of the images that stand on this one; if it cannot be read itself, of those that
        name its file as their base.

        :param known_only: leave out what cannot be read, rather than raise ImageHasChildren
        :param uuid: of the image, if the caller has looked at it
        :raises ImageNotFound:
        :raises ImageHasChildren: another image cannot be read, and stood on this one when it could
            be, or nobody knows what it stood on
        """
        path, known, doubtful = self.existing_path(name), list[str](), None
        with contextlib.suppress(exception.ToolFailed):
            items = self.standing_on(name, uuid or image.info(path, force_share=True).uuid)
            known = [item.name for item in items if item.summary]
            doubtful = frozenset(item.name for item in items if item.summary is None)
            if known_only or not doubtful:
                return known
        return self._children_beside_damage(name, path, known_only, doubtful, known)

    def _children_beside_damage(
        self,
        name: str,
        path: str,
        known_only: bool,
        doubtful: frozenset[str] | None,
        known: list[str],
    ) -> list[str]:
        """
        :param doubtful: what cannot be read and may stand on it; None: whatever cannot be
        :param known: what was found to stand on it, and may not be readable any more
        """
        listed = self.listed()
        items = {item.name: item for item in listed}
        own, known_bases = items.get(name), bases.Bases(listed)
        # with itself: what it stands on cannot stand on it, readable or not
        below, below_by_uuid = (
            {item.name for item in bases.chain(items, name)},
            known_bases.below(name),
        )
        found = []
        for item in items.values():
            if item.name in known:
                found.append(item.name)
            elif item.summary is None:
                may_stand = doubtful is None or item.name in doubtful
                if may_stand and item.name not in below and not known_only:
                    raise exception.ImageHasChildren(
                        path=path,
                        reason=f'{item.error}: whether this image stands on it is unknown',
                    )
            elif own is not None and own.summary is not None:
                if name in known_bases.of(item.name) and item.name not in below_by_uuid:
                    found.append(item.name)
            elif item.summary.base_filename == os.path.basename(path):
                found.append(item.name)
        return found

    def check_sound(self, base: str) -> None:
        """Before something is made to stand on this image.

        :raises ImageDamaged: a scrub has found it damaged, or what it stands on
        """
        for item, found in self.known_damage(base):
            raise exception.ImageDamaged(
                path=item.path,
                above='' if item.name == base else f', on which {base} stands,',
                when=found.checked,
                finding=found.findings[0],
                pool=self.name,
                name=item.name,
            )

    def without_mirror(self) -> list[str]:
        """Images of which damaged metadata is found late, and cannot be put right; of those that
        this user may read.
        """
        found = []
        for item in self.listed():
            with contextlib.suppress(OSError), immutable.opened(item.path) as descriptor:
                if immutable.lacks_mirror(descriptor):
                    found.append(item.name)
        return found

    def known_damage(self, name: str) -> list[tuple[bases.ListedImage, scrubs.Result]]:
        """Which images of a chain a scrub has found damaged, and nobody has accepted that; top
        first. Nearly always there are none in the pool, and nothing else is looked at.
        """
        known = scrubs.read(self.uuid)
        if not known.damaged():
            return []
        # a symbolic link is no image of the list
        own = os.path.basename(os.path.realpath(self.image_path(name)))
        items = {item.name: item for item in self.listed()}
        return [
            (item, found)
            for item in bases.chain(items, own.removesuffix(names.IMAGE_SUFFIX))
            if (found := known.damage_of(item.name, item.path))
        ]

    def create_image(
        self,
        name: str,
        *,
        size: int | None = None,
        base: str | None = None,
        base_snapshot: str | None = None,
        cluster_size: int | None = None,
    ) -> str:
        """Make an image and return its path.

        :param size: virtual size in bytes; that of ``base`` if not given
        :param base: name of the template or image of this pool to stand on
        :raises InvalidName:
        :raises InvalidSize:
        :raises ImageExists:
        :raises ImageNotFound: the base is not there
        :raises ImageDamaged: a scrub has found it damaged
        """
        path = self.image_path(names.check_new_name('image', name))
        with self.lock():
            self.check_room(size, base)
            if base is not None:
                self.check_sound(base)
                image.create_overlay(
                    path,
                    self.existing_path(base),
                    size=size,
                    base_snapshot=base_snapshot,
                    cluster_size=cluster_size,
                )
            elif size is None:
                raise exception.SizeMissing(name=name)
            else:
                image.create(path, size, cluster_size=cluster_size)
        self.remember(name)
        state, reason = watermark.judge(self.capacity(), self.settings)
        if state is not watermark.State.OK:
            LOG.warning('Pool %s has %s', self.name, reason)
        return path

    def account(self) -> provisioned.Account:
        """What is provisioned, and what can be."""
        images = image.total(self.path, cache=list_cache.path(self.uuid))
        building, building_fixed = self._building()
        # afterwards: what guests store meanwhile counts as growth, and not as free either
        now = self.capacity()
        return provisioned.Account(
            total=now.total,
            free=now.free,
            reserved=self.settings.reserved(now.total),
            overcommit=self.settings.overcommit,
            held=images.actual_size,
            growth=images.may_grow,
            building=building,
            building_fixed=building_fixed,
        )

    def _building(self) -> tuple[int, int]:
        """What images that are being built (pcow_driver.pools.staging) will take beside what they
        take already: what guests will be able to fill, and what nobody will.
        """
        reserved = {
            name: sizes
            for name, note in locks.notes(f'build-{self.uuid}-').items()
            if any(sizes := provisioned.read_reservation(note))
        }
        hidden = [entry for entry in os.listdir(self.path) if entry[0] == '.'] if reserved else []
        building = building_fixed = 0
        for name, (thin, fixed) in reserved.items():
            part, there = f'.{name}{names.IMAGE_SUFFIX}.part', 0
            for entry in hidden:
                if entry == part or entry.startswith(f'.{part}.'):
                    with contextlib.suppress(FileNotFoundError):
                        there += os.lstat(os.path.join(self.path, entry)).st_blocks * 512
            building += max(thin - there, 0)
            building_fixed += max(fixed - there, 0)
        return building, building_fixed

    def check_room(self, size: int | None, base: str | None = None, *, fixed: int = 0) -> None:
        """Refuse what the operator's limits have no room for.

        :param size: virtual size of a new image in bytes, or by how much one grows; that of
            ``base`` if None
        :param fixed: blocks of what nobody can fill, as a template
        :raises PoolDraining:
        :raises NoRoom:
        """
        if self.settings.draining:
            raise exception.PoolDraining(name=self.name)
        if not self.settings.overcommit:
            return
        if size is None:
            size = (
                image.info(self.existing_path(base), force_share=True).virtual_size if base else 0
            )
        self._check_provisioned(provisioned.whole_size(size), fixed)

    def check_snapshot_room(self, *files: str, beside: int = 0) -> int:
        """Refuse snapshots of images, after which their guests can fill them once more; a draining
        pool takes them.

        :param files: names of the files
        :param beside: bytes that are stored into them besides
        :return: bytes that can come to them then, and could not before; 0 if there is no limit
        :raises NoRoom:
        """
        if not self.settings.overcommit:
            return 0
        found = image.list_directory(self.path, *files) if files else {}
        items = [item for item in found.values() if isinstance(item, model.Summary)]
        more = sum(item.may_grow_frozen - item.may_grow for item in items) + beside
        self._check_provisioned(more, 0)
        return more

    def _check_provisioned(self, thin: int, fixed: int) -> None:
        account = self.account()
        if account.lacks(thin, fixed):
            self._tell_largest(account)
            raise exception.NoRoom(
                name=self.name,
                size=units.format_size(thin + fixed),
                provisioned=units.format_size(account.provisioned),
                limit=units.format_size(account.limit or 0),
                overcommit=self.settings.overcommit,
            )

    def _tell_largest(self, account: provisioned.Account) -> None:
        """In the log: who is refused something need not hear of the images of others."""
        images = [item for item in self.listed() if item.summary and not item.summary.sealed]
        if images:
            largest = max(images, key=_provisioned)
            LOG.warning(
                'Pool %s takes no more: of %s that are provisioned in it most, %s, are for the '
                'image %s. If its flavor or volume is smaller, a guest that has broken out of its '
                "QEMU may have written that size: 'pcowctl image resize --shrink' cuts it off",
                self.name,
                units.format_size(account.provisioned),
                units.format_size(_provisioned(largest)),
                largest.name,
            )

    def check_free(self, size: int) -> None:
        """Refuse to store what was not provisioned for a guest, and would have guests wait soon.

        :param size: in bytes
        :raises NoSpace:
        """
        now = self.capacity()
        kept = now.total * max(self.settings.reserve, self.settings.critical) // 100
        if size > now.free - kept:
            raise exception.NoSpace(
                name=self.name,
                size=units.format_size(size),
                free=units.format_size(max(0, now.free - kept)),
            )

    def delete_image(self, name: str, *, force: bool = False, damaged: bool = False) -> None:
        """Delete an image.

        :param force: also if it is damaged, or if other images cannot be read; known children
            still protect it, and so does whoever has it open, on any host
        :param damaged: force, if it cannot be read; one that can be is deleted as any other
        :raises ImageNotFound:
        :raises IsATemplate:
        :raises ImageHasChildren:
        :raises ImageInUse: somebody has it open
        """
        self._delete(name, sealed=False, force=force, damaged=damaged)

    def delete_template(self, name: str, *, damaged: bool = False) -> None:
        """Delete a template.

        :param damaged: also one that cannot be read
        :raises ImageNotFound:
        :raises NotATemplate:
        :raises ImageHasChildren:
        :raises ImageInUse: somebody has it open
        """
        self._delete(name, sealed=True, force=False, damaged=damaged)

    def delete_orphan(self, name: str) -> None:
        """Delete an image or a template whose base is gone.

        :raises ImageNotFound:
        :raises ImageInUse: its base is there, it has children, or somebody has it open
        """
        self._delete(name, sealed=None, force=False)

    def _delete(
        self, name: str, *, sealed: bool | None, force: bool, damaged: bool = False
    ) -> None:
        """``sealed`` None: an image or a template, but one whose base is gone."""
        with self.lock():
            path, uuid = self.existing_path(name), None
            try:
                info = image.info(path)  # without force_share: fails while a writer has it
                uuid = info.uuid
                if info.sealed and sealed is False and not names.is_of_service(name):
                    raise exception.IsATemplate(path=path)
                if sealed and not info.sealed:
                    raise exception.NotATemplate(path=path)
                if sealed is None and (info.base_path is None or os.path.lexists(info.base_path)):
                    raise exception.ImageInUse(
                        path=path, reason=f'its base {info.base_filename or "(none)"} is there'
                    )
            except exception.ToolFailed as e:
                if not force and not (damaged and _is_damaged(path)):
                    raise exception.ImageInUse(path=path, reason=str(e)) from None
                force = True
            self._check_childless(name, path, uuid, force)
            with protection.lifted(path), image_locks.alone(path):
                # by who has not waited for the lock of the pool, as earlier versions on other hosts
                self._check_childless(name, path, uuid, force)
                os.unlink(path)
            self._tell_rescue_files(path)

    def _check_childless(self, name: str, path: str, uuid: str | None, force: bool) -> None:
        """:raises ImageHasChildren:"""
        children = self.children(name, known_only=force, uuid=uuid)
        if children:
            raise exception.ImageHasChildren(
                path=path,
                reason=(
                    f'{len(children)} image(s) stand on it: {", ".join(children[:5])}'
                    + (', ...' if children[5:] else '')
                ),
            )

    def _tell_rescue_files(self, path: str) -> None:
        """They hold what only the owner of the image can judge: they stay when that goes."""
        left = [
            rescue
            for rescue, image_name in self.rescue_files()
            if image_name == os.path.basename(path)
        ]
        if left:
            LOG.warning(
                '%s is deleted, but not %s, which keeps what a repair of it has dropped: delete '
                'that too when nobody needs it (pcow-img rescue lists it)',
                path,
                ', '.join(left),
            )


def make(name: str, directory: str) -> Pool:
    """The directory is made if it is missing.

    :raises PoolInvalid: it is a pool already, or cannot be used
    """
    path = os.path.abspath(directory)
    marker.check_none(path)
    _make_directory(path)
    pool = Pool(
        name=name,
        path=path,
        uuid=str(uuidlib.uuid4()),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
        made_as=_class_of(path),
    )
    marker.write(path, pool.marker)
    return pool


def _make_directory(path: str) -> None:
    try:
        if not os.path.lexists(path):
            os.mkdir(path, 0o700)
            access.close(path)
    except OSError as e:
        raise exception.PoolInvalid(path=path, reason=str(e.strerror)) from None


def _class_of(path: str) -> str | None:
    """As far as it can be tried there: a pool can be made without pcow-img."""
    try:
        return image.probe(path)
    except exception.PcowError:
        return None


def open_directory(directory: str) -> Pool:
    """The pool in a directory, under the name in its marker.

    :raises PoolInvalid: there is none
    """
    path = os.path.abspath(directory)
    found = marker.read(path)
    return Pool(found.name, path, found.uuid, found.created, made_as=found.made_as)
