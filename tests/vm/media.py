# SPDX-License-Identifier: Apache-2.0
"""Memory that loses its content under a guest: pages of images that the host's kernel declares to be lost, as it does after a
machine check of its own (MADV_HWPOISON).  The host, and guests that are to be told, need a kernel with machine checks."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
import subprocess
import sys
import time
from typing import Any

from tests.vm import chain
from tests.vm import lose
from tests.vm import machine
from tests.vm import scenarios

PAGE = 4096
_DATA_OFFSET = 2 * chain.MIB                   # of the image: what the guest's device begins with
_AROUND_PAGES = 16                             # that a load's fault maps, from the first one on; a multiple of the images' cluster
_EVENT_SECONDS = 60.0
_QUIET_SECONDS = 2.0
_SETTLE_SECONDS = 0.5
_SNAPSHOTS = 4
KERNEL = 'linux-image-amd64'                   # Debian's kernel for clouds is built without machine checks
# For the host: QEMU 10.0's SVM does not intercept loads of CR4, so a guest's kernel would see, and keep, that the host takes them.
OUTER_OPTIONS = 'mce=off'
CHECKED = 'checked'                            # where that is, for guests, beside the other one


class _Guest:
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

    def take(self, depth: int) -> int:
        """A page with data in a slab that no other one was taken from, the first of what a fault maps around it, which is what
        is touched before somebody needs it.

        :param depth: 0: in the image itself, 1: its base, ...
        :raises Failure: there is none
        """
        for extent in self._extents:
            if not extent['present'] or not extent['data'] or extent['depth'] != depth:
                continue
            for start in range(max(extent['start'], _DATA_OFFSET), extent['start'] + extent['length'], PAGE):
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

        :param access: just before; after stores QEMU prepares slabs, which has the file written and mapped anew
        """
        extent = self._map('-s', page, '-l', PAGE)[0]
        command = [sys.executable, '-B', '-m', 'tests.vm.lose', extent['filename'], str(extent['offset'])]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            if access:
                time.sleep(self._settle)
                self.check(access, page, '')
            _output, errors = process.communicate('\n', machine.COMMAND_SECONDS)
        if process.returncode:
            raise machine.Failure(f'{" ".join(command)}: {errors[-2000:]}')

    def lose(self, page: int, dirty: bool = False) -> None:
        """The same, and QEMU hears of it, which has it mapped.

        :param dirty: the disk does not have it
        """
        self.drop(page, 'error-store' if dirty else 'error-load')
        self.lost.append(page)
        limit = time.monotonic() + _EVENT_SECONDS
        while time.monotonic() < limit:
            # others may come again, as the guest meets them
            event = self.vm.wait_event('PCOW_ERROR', _EVENT_SECONDS)
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


def _checked(context: scenarios.Context) -> scenarios.Context:
    """With the kernel that takes machine checks."""
    kernel, initrd = (context.place.kernel.with_name(CHECKED) / name for name in ('kernel', 'initrd'))
    return scenarios.Context(dataclasses.replace(context.place, kernel=kernel, initrd=initrd), context.name, context.directory)


def _disks(context: scenarios.Context) -> tuple[str, ...]:
    return context.disk('source', context.source_disk()) + context.disk('model', context.model_disk())


def _accesses(guest: _Guest) -> int:
    """Loads and stores of the guest, copies by QEMU; returns a page of the active layer that is lost."""
    own, stored = guest.take_own(), guest.take_own()
    guest.lose(own)
    guest.check('error-load', own + 100, 'failed')
    guest.check('error-load', own + PAGE, '')
    guest.lose(stored)
    guest.check('error-store', stored + 200, 'failed')
    guest.check('error-store', stored + PAGE, '')
    # by an instruction that KVM emulates
    guest.check('error-output', stored + PAGE, '')
    guest.check('error-output', stored + 200, 'failed')
    # a store that has to copy it, and one that has to copy its neighbour
    for depth in (0, 1, 2):
        page = guest.take(depth)
        guest.lose(page)
        guest.check('error-store', page + 300, 'failed')
        guest.check('error-store', page + PAGE, '')
    # a slab that gets hot, so that the rest of it is copied, and mapped, with the page in it
    guest.check('error-slab', own, '1 of 256 failed')
    time.sleep(_QUIET_SECONDS)
    guest.check_running()
    return own


def _end(vm: machine.Machine, guest: _Guest) -> None:
    """Bad blocks stay bad when the VM is off, other memory when it is reset."""
    if guest.vm is vm:
        vm.run_qmp('system_reset')
    guest.vm = vm
    vm.wait_ready()
    guest.survey()                             # all stores had the bytes of before
    vm.run_qmp('pcow-snapshot-delete', id='mem0', name='with-errors')
    vm.power_off()


def errors(context: scenarios.Context) -> dict[str, Any]:
    """Pages that are lost, in each layer of a chain: loads, stores, copies, disk requests, a snapshot, a reset."""
    context = _checked(context)
    image, disks = context.image(context.directory), _disks(context)
    with context.test_guest(*context.backend(image), *disks) as vm:
        vm.wait_ready()
        guest = _Guest(context, image, vm)
        guest.survey()                         # which maps everything
        own = _accesses(guest)
        for command in ('error-disk-out', 'error-disk-in'):
            page = guest.take_own()
            guest.lose(page)
            guest.check(command, page, 'failed')
        guest.survey()
        # what is lost becomes a part of a snapshot, and is copied for nobody
        vm.run_qmp('pcow-snapshot-create', id='mem0', name='with-errors')
        guest.check('error-store', own + 400, 'failed')
        guest.check('error-store', own + PAGE, '')
        guest.survey()
        info = vm.pcow()
        if info['persistence'] == 'pmem':
            vm.power_off()
        else:
            _end(vm, guest)
    if info['persistence'] == 'pmem':
        with context.test_guest(*context.backend(image), *disks) as vm:
            _end(vm, guest)
    context.check_image(image)
    _check_unreadable(context, image)
    return scenarios.figures(info, lost=len(guest.lost))


def _check_unreadable(context: scenarios.Context, image: Path) -> None:
    """A tool says that it cannot read all of the image, rather than to make zeros of it."""
    try:
        context.tool('pcow-img', 'convert', '-q', '-O', 'raw', image, context.directory / 'copy.raw')
    except machine.Failure as e:
        if 'exit code 1' not in str(e):
            raise
        return
    raise machine.Failure('pcow-img copied an image that cannot be read')


def deaf(context: scenarios.Context) -> dict[str, Any]:
    """A guest that takes no machine checks: what it does not access does not matter; when it does, it is stopped and not reset."""
    image = context.image(context.directory)
    with context.test_guest(*context.backend(image)) as vm:
        vm.wait_ready()
        guest = _Guest(context, image, vm)
        guest.survey()
        page = guest.take_own()
        guest.lose(page)
        guest.check('error-load', page + PAGE, '')
        time.sleep(_QUIET_SECONDS)
        guest.check_running()
        vm.send(f'error-load {page}')
        vm.wait_event('STOP', _EVENT_SECONDS)
        status = vm.run_qmp('query-status')['status']
        if status != 'io-error':
            raise vm.failure(f'the VM is {status}')
        # going on without a cure stops it again
        vm.run_qmp('cont')
        vm.wait_event('STOP', _EVENT_SECONDS)
        if not vm.busy():
            raise vm.failure(f'the guest has read what is lost: {vm.read_line(1)}')
        info = vm.pcow()
        vm.run_qmp('quit')
        vm.wait_end()
    context.check_image(image)
    return scenarios.figures(info)


def _snapshot(vm: machine.Machine) -> int:
    """Until one is made; how often it could not be, as the kernel tells each file description of lost data once."""
    for failed in range(_SNAPSHOTS):
        try:
            vm.run_qmp('pcow-snapshot-create', id='mem0', name='with-errors')
        except machine.Failure as e:
            if 'Input/output error' not in str(e):
                raise
        else:
            return failed
    raise vm.failure(f'no snapshot could be made in {_SNAPSHOTS} tries')


def dropped(context: scenarios.Context) -> dict[str, Any]:
    """In the page cache a page that is lost is dropped: what the disk has as well is read again, what it has not is lost."""
    context = _checked(context)
    image = context.image(context.directory)
    os.sync()
    with context.test_guest(*context.backend(image), *_disks(context)) as vm:
        vm.wait_ready()
        if vm.pcow()['persistence'] != 'page-cache':
            raise vm.failure(f'{context.directory} is not in the page cache')
        guest = _Guest(context, image, vm)
        guest.survey()
        for depth in (0, 1, 2):
            page = guest.take(depth)
            guest.drop(page)
            guest.check('error-load', page + 100, '')
            page = guest.take(depth)
            guest.drop(page)
            guest.check('error-store', page + 300, '')
            guest.check('error-store', page + PAGE, '')
        guest.survey()
        own, stored = guest.take_own(), guest.take_own()
        guest.lose(own, dirty=True)
        guest.check('error-load', own + 100, 'failed')
        guest.check('error-load', own + PAGE, '')
        guest.lose(stored, dirty=True)
        guest.check('error-store', stored + 200, 'failed')
        guest.check('error-store', stored + PAGE, '')
        for command in ('error-disk-out', 'error-disk-in'):
            page = guest.take_own()
            guest.lose(page, dirty=True)
            guest.check(command, page, 'failed')
        guest.survey()
        failed = _snapshot(vm)
        if not failed:
            raise vm.failure('the file could not be written, and nobody has been told')
        # what is around it is copied
        guest.check('error-load', own + 100, 'failed')
        guest.check('error-store', own + 100, 'failed')
        guest.check('error-store', stored + PAGE, '')
        guest.check('error-store', stored + 200, 'failed')
        guest.check('error-slab', stored, '1 of 256 failed')
        time.sleep(_QUIET_SECONDS)
        guest.survey()
        info = vm.power_off()
    context.check_image(image)
    return scenarios.figures(info, lost=len(guest.lost), failed_snapshots=failed)


def _keeping(scenario: scenarios.Scenario) -> scenarios.Scenario:
    """Bad blocks stay bad, as an emulated NVDIMM mends none: nobody else may get them."""
    def run(context: scenarios.Context) -> dict[str, Any]:
        try:
            return scenario(context)
        finally:
            if lose.uses_dax(context.directory):
                for path in context.directory.glob('*.pcow'):
                    os.link(path, context.place.pool / f'bad-{context.name}-{path.name}')
    return run


ALL: dict[str, scenarios.Scenario] = {'media-errors': _keeping(errors), 'media-deaf': _keeping(deaf), 'media-dropped': dropped}
