# SPDX-License-Identifier: Apache-2.0
"""A full pool whose policy is to fail (``pcow-full=fail``): a store that needs space is not made to
wait, but fails.
"""

from __future__ import annotations

from typing import Any

from tests.vm import failing
from tests.vm import machine
from tests.vm import scenarios
from tests.vm import space

_SIZE = 256 * scenarios.MIB  # of the pool
_AT = 100  # in a page
# Commands of the test guest that need space for a page, in each of the ways in which a guest
# stores.
_STORES = ('error-change', 'error-input')


def _refuse(guest: failing.Guest, command: str, page: int) -> None:
    """It fails, with a machine check for its address, and the host is told; the guest goes on, with
    the memory as it was.
    """
    guest.check(command, page + _AT, 'failed')
    event = guest.vm.wait_event('PCOW_POOL_FULL', failing.EVENT_SECONDS)
    if (event['id'], event['policy'], event['offset'] // failing.PAGE * failing.PAGE) != (
        'mem0',
        'fail',
        page,
    ):
        raise guest.vm.failure(f'{command} {page}: PCOW_POOL_FULL came with {event}')
    guest.check('error-load', page + _AT, '')
    guest.check_running()


def _stop_and_go(vm: machine.Machine) -> None:
    for command, status in (('stop', 'paused'), ('cont', 'running')):
        vm.run_qmp(command)
        found = vm.run_qmp('query-status')['status']
        if found != status:
            raise vm.failure(f'the VM is {found} after {command}')


def fails(context: scenarios.Context) -> dict[str, Any]:
    """Stores to pages of all origins fail, each with a machine check that the guest survives; when
    there is space they are made.
    """
    context = failing.checked(context)
    pool, model = context.directory / 'full', context.model_disk()
    disks = (*context.disk('source', context.source_disk()), *context.disk('model', model))
    pool.mkdir()
    space.mount(pool, f'size={_SIZE}')
    try:
        image = context.image(pool)
        with context.test_guest(*context.backend(image, more=space.FAIL), *disks) as vm:
            vm.wait_ready()
            if vm.pcow()['full-policy'] != 'fail':
                raise vm.failure(f'the policy is {vm.pcow()["full-policy"]}')
            guest = failing.Guest(context, image, vm)
            # a page of zeros that was a hole in its file has a block then
            guest.survey()
            vm.run_qmp('pcow-snapshot-create', id='mem0', name='frozen')
            # nobody has stored anything, so nothing was prepared that a store could have
            taken = space.take(pool)
            origins = (
                *((command, depth) for command in _STORES for depth in (0, 1, 2)),
                ('error-change', None),
            )
            pages = [(command, guest.take(depth)) for command, depth in origins]
            for command, page in pages:
                _refuse(guest, command, page)
            first = pages[0][1]
            guest.check('error-change', first + _AT, 'failed')
            guest.check('error-change', first + failing.PAGE + _AT, 'failed')
            read = guest.take(1)
            guest.check('error-disk-in', read, 'failed')
            _stop_and_go(vm)
            guest.survey()  # nothing was stored, and all can be read
            before = vm.pcow()['stats']
            if before['write-traps']:
                raise vm.failure(f'a store was made: {before}')
            taken.unlink()
            for command, page in pages:
                guest.check(command, page + _AT, '')
            guest.check('error-change', first + failing.PAGE + _AT, '')
            guest.check('error-disk-in', read, '')
            guest.survey()
            vm.command('read')
            vm.command('save')
            info = vm.power_off()
        context.check_image(image, model)
        if info['stats']['pool-full-waits']:
            raise machine.Failure(f'a store waited for space: {info["stats"]}')
        return scenarios.figures(info, refused=len(pages))
    finally:
        space.unmount(pool)
