# SPDX-License-Identifier: Apache-2.0
"""Memory that loses its content under a guest: pages of images that the host's kernel declares to
be lost, as it does after a machine check of its own (MADV_HWPOISON)."""

from __future__ import annotations

import os
from pathlib import Path
import signal
import time
from typing import Any

from tests.vm import failing
from tests.vm import full
from tests.vm import lose
from tests.vm import machine
from tests.vm import scenarios

_SNAPSHOTS = 4
# at once; QEMU notes 64 until its main loop has seen to them (backends/pcow/report.c)
_MANY = 70


def _accesses(guest: failing.Guest) -> int:
    """Loads and stores of the guest, copies by QEMU; returns a page of the active layer that is
    lost.
    """
    own, stored = guest.take_own(), guest.take_own()
    guest.lose(own)
    guest.check('error-load', own + 100, 'failed')
    guest.check('error-load', own + failing.PAGE, '')
    guest.lose(stored)
    guest.check('error-store', stored + 200, 'failed')
    guest.check('error-store', stored + failing.PAGE, '')
    # by an instruction that KVM emulates
    guest.check('error-output', stored + failing.PAGE, '')
    guest.check('error-output', stored + 200, 'failed')
    # a store that has to copy it, and one that has to copy its neighbour
    for depth in (0, 1, 2):
        page = guest.take(depth)
        guest.lose(page)
        guest.check('error-store', page + 300, 'failed')
        guest.check('error-store', page + failing.PAGE, '')
    # a slab that gets hot, so that the rest of it is copied, and mapped, with the page in it
    guest.check('error-slab', own, '1 of 256 failed')
    time.sleep(failing.QUIET_SECONDS)
    guest.check_running()
    return own


def _end(vm: machine.Machine, guest: failing.Guest) -> None:
    """Bad blocks stay bad when the VM is off, other memory when it is reset."""
    if guest.vm is vm:
        vm.run_qmp('system_reset')
    guest.vm = vm
    vm.wait_ready()
    guest.survey()  # all stores had the bytes of before
    vm.run_qmp('pcow-snapshot-delete', id='mem0', name='with-errors')
    vm.power_off()


def errors(context: scenarios.Context) -> dict[str, Any]:
    """Pages that are lost, in each layer of a chain: loads, stores, copies, disk requests, a
    snapshot, a reset.
    """
    context = failing.checked(context)
    image, disks = context.image(context.directory), failing.disks(context)
    with context.test_guest(*context.backend(image), *disks) as vm:
        vm.wait_ready()
        guest = failing.Guest(context, image, vm)
        guest.survey()  # which maps everything
        own = _accesses(guest)
        for command in ('error-disk-out', 'error-disk-in'):
            page = guest.take_own()
            guest.lose(page)
            guest.check(command, page, 'failed')
        guest.survey()
        # what is lost becomes a part of a snapshot, and is copied for nobody
        vm.run_qmp('pcow-snapshot-create', id='mem0', name='with-errors')
        guest.check('error-store', own + 400, 'failed')
        guest.check('error-store', own + failing.PAGE, '')
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
        context.tool(
            'pcow-img', 'convert', '-q', '-O', 'raw', image, context.directory / 'copy.raw'
        )
    except machine.Failure as e:
        if 'exit code 1' not in str(e):
            raise
        return
    raise machine.Failure('pcow-img copied an image that cannot be read')


def deaf(context: scenarios.Context) -> dict[str, Any]:
    """A guest that takes no machine checks: what it does not access does not matter; when it does,
    it is stopped and not reset.
    """
    image = context.image(context.directory)
    with context.test_guest(*context.backend(image)) as vm:
        vm.wait_ready()
        guest = failing.Guest(context, image, vm)
        guest.survey()
        page = guest.take_own()
        guest.lose(page)
        guest.check('error-load', page + failing.PAGE, '')
        time.sleep(failing.QUIET_SECONDS)
        guest.check_running()
        vm.send(f'error-load {page}')
        vm.wait_event('STOP', failing.EVENT_SECONDS)
        status = vm.run_qmp('query-status')['status']
        if status != 'io-error':
            raise vm.failure(f'the VM is {status}')
        # going on without a cure stops it again
        vm.run_qmp('cont')
        vm.wait_event('STOP', failing.EVENT_SECONDS)
        if not vm.busy():
            raise vm.failure(f'the guest has read what is lost: {vm.read_line(1)}')
        info = vm.pcow()
        vm.run_qmp('quit')
        vm.wait_end()
    context.check_image(image)
    return scenarios.figures(info)


def many(context: scenarios.Context) -> dict[str, Any]:
    """More pages are lost at once than QEMU can note, and again while it stands: at most the VM is
    stopped. Each of them fails when the guest loads it, and no other one.
    """
    context = failing.checked(context)
    image = context.image(context.directory)
    stops = 0
    with context.test_guest(*context.backend(image)) as vm:
        vm.wait_ready()
        guest = failing.Guest(context, image, vm)
        guest.survey()
        pages = guest.take_many(2 * _MANY)
        with guest.losing_many(pages[:_MANY]):
            pass
        stops += _go_on(vm)
        with guest.losing_many(pages[_MANY:]):
            vm.process.send_signal(signal.SIGSTOP)
        vm.process.send_signal(signal.SIGCONT)
        stops += _go_on(vm)
        guest.survey()
        info = vm.pcow()
        vm.run_qmp('quit')
        vm.wait_end()
    context.check_image(image)
    return scenarios.figures(info, lost=len(guest.lost), stops=stops)


def _go_on(vm: machine.Machine) -> int:
    """How often the VM had been stopped, when it stays running.

    :raises Failure: it does not
    """
    for stops in range(_MANY):
        time.sleep(failing.QUIET_SECONDS)
        status = vm.run_qmp('query-status')['status']
        if status == 'running':
            return stops
        if status != 'io-error':
            break
        vm.run_qmp('cont')
    raise vm.failure(f'the VM is {status}')


def _snapshot(vm: machine.Machine) -> int:
    """Until one is made; how often it could not be, as the kernel tells each file description of
    lost data once.
    """
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
    """In the page cache a page that is lost is dropped: what the disk has as well is read again,
    what it has not is lost.
    """
    context = failing.checked(context)
    image = context.image(context.directory)
    os.sync()
    with context.test_guest(*context.backend(image), *failing.disks(context)) as vm:
        vm.wait_ready()
        if vm.pcow()['persistence'] != 'page-cache':
            raise vm.failure(f'{context.directory} is not in the page cache')
        guest = failing.Guest(context, image, vm)
        guest.survey()
        for depth in (0, 1, 2):
            page = guest.take(depth)
            guest.drop(page)
            guest.check('error-load', page + 100, '')
            page = guest.take(depth)
            guest.drop(page)
            guest.check('error-store', page + 300, '')
            guest.check('error-store', page + failing.PAGE, '')
        guest.survey()
        own, stored = guest.take_own(), guest.take_own()
        guest.lose(own, dirty=True)
        guest.check('error-load', own + 100, 'failed')
        guest.check('error-load', own + failing.PAGE, '')
        guest.lose(stored, dirty=True)
        guest.check('error-store', stored + 200, 'failed')
        guest.check('error-store', stored + failing.PAGE, '')
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
        guest.check('error-store', stored + failing.PAGE, '')
        guest.check('error-store', stored + 200, 'failed')
        guest.check('error-slab', stored, '1 of 256 failed')
        time.sleep(failing.QUIET_SECONDS)
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


# Those for which the host, and guests, have the kernel with machine checks.
ALL: dict[str, scenarios.Scenario] = {
    'media-errors': _keeping(errors),
    'media-deaf': _keeping(deaf),
    'media-many': _keeping(many),
    'media-dropped': dropped,
    'full-fails': full.fails,
}
