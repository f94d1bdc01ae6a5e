# SPDX-License-Identifier: Apache-2.0
"""The pools that this host knows: names and directories, in ``pools.json`` under
``[pcow] state_path``.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from typing import Any

from pcow_driver.common import durable
from pcow_driver.common import exception
from pcow_driver.common import locks
from pcow_driver.common import names
from pcow_driver.pools import list_cache
from pcow_driver.pools import marker
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import scrubs
from pcow_driver.pools import settings as settings_module
from pcow_driver.pools import staging

_STATE_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Ending:
    """What a pool stands on that is being ended, by names that a reboot does not change."""

    source: str  # what was mounted
    filesystem: str | None  # UUID; None: it has none
    namespace: str | None  # UUID of the namespace; None: it stood on none


def _settings_are_valid(value: Any) -> bool:
    try:
        settings_module.Settings(**value).check()
    except (TypeError, exception.UsageInvalid):
        return False
    return True


def _ending_is_valid(value: Any) -> bool:
    try:
        fields = dataclasses.asdict(Ending(**value))
    except TypeError:
        return False
    return isinstance(fields.pop('source'), str) and all(
        field is None or isinstance(field, str) for field in fields.values()
    )


def _has_marker(entry: pool_module.PoolEntry) -> bool:
    return os.path.lexists(os.path.join(entry.path, names.MARKER))


class PoolRegistry:
    """All operations may be called from any number of processes at once."""

    def __init__(self) -> None:
        self.path = os.path.join(locks.state_path(), 'pools.json')

    def list(self) -> list[pool_module.PoolEntry]:
        """Known pools by name, whether their directory is there or not.

        :raises StateInvalid:
        """
        return [
            pool_module.PoolEntry(
                name, item['path'], item['uuid'], item.get('settings', {}), item.get('ending')
            )
            for name, item in sorted(self._read().items())
        ]

    def entry(self, name: str) -> pool_module.PoolEntry:
        """:raises PoolNotFound:"""
        entries = {entry.name: entry for entry in self.list()}
        if name in entries:
            return entries[name]
        like = difflib.get_close_matches(name, entries, n=1)
        raise exception.PoolNotFound(name=name, hint=f' (did you mean {like[0]}?)' if like else '')

    def get(self, name: str) -> pool_module.Pool:
        """The pool of this name.

        :raises PoolNotFound: the name is not known
        :raises PoolInvalid: its directory is not there, or holds another pool
        """
        return self._open(self.entry(name))

    def find(self, directory: str) -> pool_module.Pool | None:
        """The known pool whose directory this is."""
        for entry in self.list():
            if os.path.realpath(entry.path) == os.path.realpath(directory):
                return self._open(entry)
        return None

    def create(self, name: str, directory: str) -> pool_module.Pool:
        """Make ``directory`` (made if missing) a pool.  Files in it are left alone.

        :raises PoolExists: the name is taken
        :raises PoolInvalid: the directory is a pool already, or cannot be used
        :raises InvalidName:
        """
        names.check_name('pool', name)
        with locks.lock('pools'):
            pools = self._read()
            self._check_free(pools, name)
            pool = pool_module.make(name, directory)
            try:
                self._add(pools, pool)
            except BaseException:
                marker.remove(pool.path)
                raise
        return pool

    def import_(self, directory: str, name: str | None = None) -> pool_module.Pool:
        """Make a directory known that is a pool already, under its own name or another; or where a
        known pool is now.

        :raises PoolExists: the name is taken, or the pool is known
        :raises PoolInvalid: no pool is there
        :raises InvalidName:
        """
        pool = pool_module.open_directory(directory)
        with locks.lock('pools'):
            pools = self._read()
            entry = self.known(pool, name)
            if entry is None:
                pool = pool.renamed(names.check_name('pool', name or pool.name))
                self._check_free(pools, pool.name)
                self._add(pools, pool)
                return pool
            if os.path.realpath(entry.path) == os.path.realpath(pool.path):
                raise exception.PoolInvalid(
                    path=directory, reason=f'it is known already, as pool {entry.name}'
                )
            pools[entry.name]['path'] = pool.path
            self._write(pools)
        return self.get(entry.name)

    def known(self, pool: pool_module.Pool, name: str | None) -> pool_module.PoolEntry | None:
        """Under which name a pool is known, there or in a place where it is no more.

        :param name: under which somebody wants it to be known; None: any
        :raises PoolInvalid: it is known under another name, or is in that other place as well
        """
        for entry in self.list():
            if entry.uuid == pool.uuid:
                if name not in (None, entry.name):
                    raise exception.PoolInvalid(
                        path=pool.path, reason=f'it is known already, as pool {entry.name}'
                    )
                if os.path.realpath(entry.path) != os.path.realpath(pool.path) and self._is_there(
                    entry
                ):
                    raise exception.PoolInvalid(
                        path=pool.path,
                        reason=(
                            f'it is known already, as pool {entry.name}, and is in {entry.path} as '
                            f'well: one of them is a copy, or the '
                            'same file system mounted once more'
                        ),
                    )
                return entry
        return None

    @staticmethod
    def _is_there(entry: pool_module.PoolEntry) -> bool:
        try:
            return pool_module.open_directory(entry.path).uuid == entry.uuid
        except exception.PoolInvalid:
            return False

    def set(self, name: str, **settings: Any) -> pool_module.Pool:
        """Change some of the pool's :class:`~pcow_driver.pools.settings.Settings`.

        :raises PoolNotFound:
        :raises UsageInvalid: a value is out of range
        """
        with locks.lock('pools'):
            pools, changed = self._read(), self.changed(name, **settings)
            pools[name]['settings'] = dataclasses.asdict(changed)
            self._write(pools)
        return self.get(name)

    def changed(self, name: str, **settings: Any) -> settings_module.Settings:
        """What :meth:`set` would make of the pool's settings.

        :raises PoolNotFound:
        :raises UsageInvalid: a value is out of range
        """
        return settings_module.Settings(**{**self.entry(name).settings, **settings}).check()

    def remove(self, name: str, *, forget: bool = False) -> None:
        """Undo create: delete the marker file and forget the name; the directory stays.

        :param forget: only forget the name; the images stay, and import brings them back
        :raises PoolNotFound:
        :raises PoolNotEmpty: images are in it, or are being made
        """
        with locks.lock('pools'):
            pools = self._read()
            entry = self.entry(name)
            if not forget and _has_marker(entry):
                pool = self._open(entry)
                with pool.lock():
                    self._check_empty(pool)
                    marker.remove(pool.path)
            del pools[name]
            self._write(pools)
        list_cache.forget(entry.uuid)
        scrubs.forget(entry.uuid)

    def begin_end(self, name: str, ending: Ending) -> None:
        """Let nothing new come into a pool whose ground is taken away; its name stays until that is
        done.

        :param ending: what the same command finds when it has to go on after a kill
        :raises PoolNotFound:
        :raises PoolNotEmpty: images are in it
        """
        with locks.lock('pools'):
            pools = self._read()
            pool = self._open(self.entry(name))
            with pool.lock():
                self._check_empty(pool)
                pools[name]['ending'] = dataclasses.asdict(ending)
                self._write(pools)
                marker.remove(pool.path)

    @staticmethod
    def _check_empty(pool: pool_module.Pool) -> None:
        left = pool.entries() or [
            f'{made}, which is being made' for made in staging.in_the_making(pool)
        ]
        if left:
            raise exception.PoolNotEmpty(
                name=pool.name,
                count=len(left),
                entries=', '.join(left[:3]) + (', ...' if left[3:] else ''),
            )

    def restore(self, pool: pool_module.Pool) -> None:
        """Undo :meth:`begin_end` (and remove): the pool is there again as it was, with its
        settings.

        :param pool: as :meth:`get` gave it before
        :raises PoolExists: the name was taken meanwhile
        :raises PoolInvalid: another pool is in its directory by now
        """
        with locks.lock('pools'):
            pools = self._read()
            if pool.name not in pools or pools[pool.name]['uuid'] != pool.uuid:
                self._check_free(pools, pool.name)
            marker.write(pool.path, pool.marker)
            self._add(pools, pool)

    @staticmethod
    def _open(entry: pool_module.PoolEntry) -> pool_module.Pool:
        if not _has_marker(entry):
            raise exception.PoolInvalid(
                path=entry.path,
                reason=(
                    f"its end was begun: 'pcowctl pool remove --destroy {entry.name}' goes on with "
                    f"that"
                    if entry.ending is not None
                    else f'it has no {names.MARKER}: if its file system is not mounted, mount it; '
                    f'if that is in another place now, '
                    f"'pcowctl pool import DIRECTORY'; if it is gone for good, 'pcowctl pool "
                    f"remove --forget {entry.name}'"
                ),
            )
        pool = pool_module.open_directory(entry.path)
        settings = settings_module.Settings(**entry.settings)
        if pool.uuid != entry.uuid:
            raise exception.PoolInvalid(
                path=entry.path,
                reason=(
                    f'the pool {entry.name} was here and another one is now; forget the old one '
                    f'with '
                    f"'pcowctl pool remove --forget {entry.name}'"
                ),
            )
        return dataclasses.replace(pool, name=entry.name, settings=settings)

    def check_unknown(self, name: str) -> None:
        """:raises PoolExists: the name is taken"""
        self._check_free(self._read(), name)

    @staticmethod
    def _check_free(pools: dict[str, Any], name: str) -> None:
        if name in pools:
            raise exception.PoolExists(name=name, path=pools[name]['path'])

    def _add(self, pools: dict[str, Any], pool: pool_module.Pool) -> None:
        settings = (
            {}
            if pool.settings == settings_module.Settings()
            else {'settings': dataclasses.asdict(pool.settings)}
        )
        pools[pool.name] = {'path': pool.path, 'uuid': pool.uuid, **settings}
        self._write(pools)

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            state = json.loads(durable.read(self.path))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as e:
            raise exception.StateInvalid(path=self.path, reason=str(e)) from None
        if not isinstance(state, dict) or state.get('format') != _STATE_FORMAT:
            raise exception.StateInvalid(path=self.path, reason='it was written by another version')
        pools = state.get('pools')
        if not isinstance(pools, dict) or not all(
            isinstance(item, dict)
            and isinstance(item.get('path'), str)
            and isinstance(item.get('uuid'), str)
            and _settings_are_valid(item.get('settings', {}))
            and ('ending' not in item or _ending_is_valid(item['ending']))
            for item in pools.values()
        ):
            raise exception.StateInvalid(
                path=self.path, reason='a pool in it has no path, no uuid or impossible settings'
            )
        return pools

    def _write(self, pools: dict[str, Any]) -> None:
        """Replace the file in one step, so that readers need no lock; durable on return."""
        try:
            durable.replace(
                self.path,
                json.dumps({'format': _STATE_FORMAT, 'pools': pools}, indent=2),
                mode=0o644,
            )
        except OSError as e:
            raise exception.StateInvalid(path=self.path, reason=str(e.strerror)) from None
