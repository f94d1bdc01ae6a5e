# SPDX-License-Identifier: Apache-2.0
"""A test guest whose accesses to the image may fail, and what it is told then. It needs a kernel
with machine checks, and so does its host."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import json
from pathlib import Path
import subprocess
import sys
import time
from typing import Any

from tests.vm import chain
from tests.vm import machine
from tests.vm import scenarios

PAGE = 4096
QUIET_SECONDS = 2.0
EVENT_SECONDS = 60.0
# Debian's kernel for clouds is built without machine checks
KERNEL = 'linux-image-amd64'
# For the host: QEMU 10.0's SVM does not intercept loads of CR4, so a guest's kernel would see, and
# keep, that the host takes them.
OUTER_OPTIONS = 'mce=off'
CHECKED = 'checked'  # where that is, for guests, beside the other one
_DATA_OFFSET = 2 * chain.MIB  # of the image: what the guest's device begins with
# that a load's fault maps, from the first one on; a multiple of the images' cluster
_AROUND_PAGES = 16
_SETTLE_SECONDS = 0.5


class Guest:
    """A test guest, and the image that it has; pages are named by their offset in it."""

    def __init__(self, context: scenarios.Context, image: Path, vm: machine.Machine) -> None:
        self._context = context
        self._image = image
        self.vm = vm
        self._extents = self._map()
        self._taken: set[int] = set()
        self._settle = 0.0 if vm.pcow()['persistence'] == 'volatile' else _SETTLE_SECONDS
        self.lost: list[int] = []

    def _map(self, *more: object) -> list[dict[str, Any]]:
        text = self._context.tool('pcow-img', 'map', '-U', '--output', 'json', *more, self._image)
        found: list[dict[str, Any]] = json.loads(text)
        return found

    def take(self, depth: int | None) -> int:
        """A page with data in a slab that no other one was taken from, the first of what a fault
        maps around it, which is what is touched before somebody needs it.

        :param depth: 0: in the image itself, 1: its base, ...; None: in no file, so without data
        :raises Failure: there is none
        """
        for extent in self._extents:
            if (extent['depth'] if extent['present'] and extent['data'] else None) != depth:
                continue
            for start in range(
                max(extent['start'], _DATA_OFFSET), extent['start'] + extent['length'], PAGE
            ):
                slab = start // (2 * chain.MIB)
                if start // PAGE % _AROUND_PAGES == 0 and slab not in self._taken:
                    self._taken.add(slab)
                    return int(start)
        raise machine.Failure(f'no page of depth {depth} is left')

    def take_own(self) -> int:
        """One that the guest has stored to: it belongs to no snapshot, and is mapped for stores."""
        page = self.take(0)
        self.check('error-store', page, '')
        return page

    def drop(self, page: int, access: str = '') -> None:
        """The host's kernel finds out that a page is lost, before anybody accesses it.

        :param access: just before; after stores QEMU prepares slabs, which has the file written and
            mapped anew
        """
        extent = self._map('-s', page, '-l', PAGE)[0]
        with self._losing(extent['filename'], [extent['offset']]):
            if access:
                time.sleep(self._settle)
                self.check(access, page, '')

    @contextlib.contextmanager
    def _losing(self, path: str, offsets: list[int]) -> Iterator[None]:
        """Pages of a file are lost when this is left."""
        command = [sys.executable, '-B', '-m', 'tests.vm.lose', path, *map(str, offsets)]
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            yield
            _output, errors = process.communicate('\n', machine.COMMAND_SECONDS)
        if process.returncode:
            raise machine.Failure(f'{command[:5]}: {errors[-2000:]}')

    def take_many(self, count: int) -> list[int]:
        """Pages of the image itself, none of them beside another one.

        :raises Failure: there are not so many
        """
        found = [
            int(page)
            for extent in self._extents
            if extent['present'] and extent['data'] and extent['depth'] == 0
            for page in range(
                max(extent['start'], _DATA_OFFSET), extent['start'] + extent['length'], 2 * PAGE
            )
            if page // (2 * chain.MIB) not in self._taken
        ]
        if len(found) < count:
            raise machine.Failure(f'the image has {len(found)} pages of its own, not {count}')
        self._taken.update(page // (2 * chain.MIB) for page in found[:count])
        return found[:count]

    @contextlib.contextmanager
    def losing_many(self, pages: list[int]) -> Iterator[None]:
        """All are lost at once when this is left, while QEMU maps them; how many of them it is told
        of is the kernel's doing.
        """
        places = {
            extent['start'] + at: extent['offset'] + at
            for extent in self._map()
            if extent['present'] and extent['data'] and extent['depth'] == 0
            for at in range(0, extent['length'], PAGE)
        }
        with self._losing(str(self._image), [places[page] for page in pages]):
            for page in pages:
                self.check('error-load', page, '')
            yield
        self.lost += pages

    def lose(self, page: int, dirty: bool = False) -> None:
        """The same, and QEMU hears of it, which has it mapped.

        :param dirty: the disk does not have it
        """
        self.drop(page, 'error-store' if dirty else 'error-load')
        self.lost.append(page)
        limit = time.monotonic() + EVENT_SECONDS
        while time.monotonic() < limit:
            # others may come again, as the guest meets them
            event = self.vm.wait_event('PCOW_ERROR', EVENT_SECONDS)
            if event['id'] == 'mem0' and event['offset'] // PAGE * PAGE == page:
                self.check_running()
                return
        raise self.vm.failure(f'no PCOW_ERROR tells of page {page}')

    def check(self, command: str, offset: int, expected: str) -> None:
        said = self.vm.command(f'{command} {offset}')
        if said != expected:
            raise self.vm.failure(f'{command} {offset}: {said!r}, not {expected!r}')

    def check_running(self) -> None:
        status = self.vm.run_qmp('query-status')['status']
        if status != 'running':
            raise self.vm.failure(f'the VM is {status}')

    def survey(self) -> None:
        """What is lost cannot be read, and all other pages have their bytes."""
        found = sorted(int(word) for word in self.vm.command('error-survey').split())
        if found != sorted(self.lost):
            raise self.vm.failure(f'the pages {found} cannot be read, not {sorted(self.lost)}')
        self.check_running()


def checked(context: scenarios.Context) -> scenarios.Context:
    """With the kernel that takes machine checks."""
    kernel, initrd = (
        context.place.kernel.with_name(CHECKED) / name for name in ('kernel', 'initrd')
    )
    return scenarios.Context(
        dataclasses.replace(context.place, kernel=kernel, initrd=initrd),
        context.name,
        context.directory,
    )


def disks(context: scenarios.Context) -> tuple[str, ...]:
    return context.disk('source', context.source_disk()) + context.disk(
        'model', context.model_disk()
    )
