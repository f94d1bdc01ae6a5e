# SPDX-License-Identifier: Apache-2.0
"""What is tried with each accelerator.  A scenario returns figures, or raises Failure."""

from __future__ import annotations

from collections.abc import Callable
import json
from pathlib import Path
import time
from typing import Any

from tests.vm import chain
from tests.vm import debian
from tests.vm import machine
from tests.vm import migration
from tests.vm import net
from tests.vm import ram
from tests.vm import space
from tests.vm import vsock

MIB = chain.MIB
# bytes of one thread's, between those of others: they meet in every slab
_GRANULE_SHARED = 8192
_GRANULE_OWN = 2 * MIB
_DISK = 16 * MIB


class Context:
    """What a scenario works with: a directory of its own in the pool, and images."""

    def __init__(self, place: machine.Place, name: str, directory: Path) -> None:
        self.place = place
        self.name = name
        self.directory = directory
        self.device = 'nvdimm'  # that shows the image to the guest

    def image(self, directory: Path) -> Path:
        """A chain of images for the test guest."""
        return chain.copy(self.place.chain, directory)

    def tool(self, name: str, *arguments: object) -> str:
        return machine.run(self.place.binaries / name, *arguments)

    def backend(self, image: Path, size: int = 0, more: str = '') -> tuple[str, ...]:
        """Arguments for QEMU.

        :param size: of a raw file
        :param more: properties of the backend, with a comma in front
        """
        more += f',size={size}' if size else ''
        # the pool may be page cache
        volatile = ',pcow-volatile=on' if self.device == 'nvdimm' else ''
        return (
            '-object',
            f'memory-backend-file,id=mem0,mem-path={image},share=on{more}',
            '-device',
            f'{self.device},memdev=mem0,id=nv0{volatile}',
        )

    def disk(self, name: str, path: Path, aio: str = 'threads') -> tuple[str, ...]:
        return (
            '-blockdev',
            f'driver=raw,node-name={name},file.driver=file,file.filename={path},file.aio={aio}',
            '-device',
            f'virtio-blk-pci,drive={name}',
        )

    def test_guest(self, *arguments: str, name: str = '') -> machine.Machine:
        return machine.Machine(
            self.place,
            name or self.name,
            '-initrd',
            str(self.place.initrd),
            '-append',
            'console=ttyS0 quiet panic=-1 mitigations=off',
            *arguments,
        )

    def model_disk(self) -> Path:
        """Where the test guest saves what must be in the image."""
        path = self.place.logs / f'{self.name}.model'
        with open(path, 'wb') as file:
            file.truncate(chain.SIZE)
            file.seek(4096)
            file.write(self.place.info_block.read_bytes())
        return path

    def source_disk(self) -> Path:
        path = self.place.logs / f'{self.name}.disk'
        machine.run(self.place.guest, 'disk', _DISK, path)
        return path

    def check_image(self, image: Path, model: Path | None = None) -> None:
        """The image is without fault, and every byte is what the guest says that it must be."""
        self.tool('pcow-img', 'check', image)
        if model is not None:
            self.tool('pcow-img', 'compare', '-f', 'pcow', '-F', 'raw', image, model)
            model.unlink()


def figures(info: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What is reported of query-pcow's answer."""
    return {
        'engine': info['engine'],
        'persistence': info['persistence'],
        'stats': info['stats'],
        'times': info['times'],
    } | more


def _check_traps(info: dict[str, Any]) -> None:
    if not info['stats']['write-traps']:
        raise machine.Failure(f'no store was trapped, so nothing was shown: {info}')


def _disks(context: Context, model: Path) -> tuple[str, ...]:
    source = context.source_disk()
    return context.disk('source', source) + context.disk('model', model, 'io_uring')


def _all_stores(vm: machine.Machine) -> str:
    kinds = vm.command('stores-each')
    vm.command(f'stores 1 4000 {_GRANULE_SHARED}')
    vm.command(f'stores 2 4000 {_GRANULE_OWN}')
    vm.command('lines 3')
    vm.command('counters')
    vm.command('read')
    return kinds


def plain_file(context: Context) -> dict[str, Any]:
    """The same guest on a raw file: what fails here is not pcow's fault."""
    image = context.directory / 'plain.raw'
    chain.copy_sparse(context.place.chain / chain.RAW, image)
    with context.test_guest(
        *context.backend(image, chain.SIZE), *_disks(context, context.model_disk())
    ) as vm:
        vm.wait_ready()
        kinds = _all_stores(vm)
        vm.command('transfers 4 100')
        info = vm.power_off()
    return {'kinds': kinds, 'times': info['times']}


def stores(context: Context) -> dict[str, Any]:
    """All kinds of stores, from several CPUs, to base-backed, frozen and absent memory; then all
    bytes.
    """
    image, model = context.image(context.directory), context.model_disk()
    with context.test_guest(*context.backend(image), *_disks(context, model)) as vm:
        vm.wait_ready()
        kinds = _all_stores(vm)
        vm.command('save')
        info = vm.power_off()
    context.check_image(image, model)
    _check_traps(info)
    return figures(info, kinds=kinds)


def transfers(context: Context) -> dict[str, Any]:
    """Disk I/O straight into and out of the memory, by a thread pool and by io_uring; loads come
    first.
    """
    image, model = context.image(context.directory), context.model_disk()
    with context.test_guest(*context.backend(image), *_disks(context, model)) as vm:
        vm.wait_ready()
        vm.command('read')
        vm.command('transfers 1 400')
        vm.command('load-start')
        vm.command('transfers 2 100')
        vm.command('load-stop')
        vm.command('load-adopt')
        vm.command('read')
        vm.command('save')
        info = vm.power_off()
    context.check_image(image, model)
    return figures(info)


def virtio_pmem(context: Context) -> dict[str, Any]:
    """The same with the other front end."""
    context.device = 'virtio-pmem-pci'
    return stores(context)


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def _check_order(earlier: list[int], later: list[int], what: str) -> None:
    if any(first > second for first, second in zip(earlier, later, strict=True)):
        raise machine.Failure(
            f'{what}: the earlier snapshot is at {earlier}, the later one at {later}'
        )


def _revert(vm: machine.Machine, name: str) -> None:
    vm.run_qmp('stop')
    vm.run_qmp('pcow-snapshot-revert', id='mem0', name=name)
    vm.run_qmp('cont')
    vm.wait_ready()


def _check_snapshots(
    context: Context, image: Path, names: list[str], before: list[int]
) -> list[int]:
    """Each shows one moment, and each a later one than those before; returns the last one's."""
    raw = context.directory / 'snapshot.raw'
    for name in names:
        context.tool('pcow-img', 'convert', '-q', '-l', name, '-O', 'raw', image, raw)
        numbers = _numbers(machine.run(context.place.guest, 'load-check', len(before), raw))
        _check_order(before, numbers, f'snapshot {name}')
        before = numbers
    return before


def snapshots(context: Context) -> dict[str, Any]:
    """Live snapshots while all CPUs write, reverts to some of them: each must show one moment of
    every writer.
    """
    image, model = context.image(context.directory), context.model_disk()
    pauses: list[int] = []
    names = [f'live-{number}' for number in range(1, 7)]
    with context.test_guest(*context.backend(image), *_disks(context, model)) as vm:
        vm.wait_ready()
        vm.command('load-start')
        for name in names:
            vm.send(f'stores {len(pauses)} 1000 {_GRANULE_SHARED}')
            time.sleep(0.3)
            pauses.append(int(vm.run_qmp('pcow-snapshot-create', id='mem0', name=name)['pause']))
            vm.result('stores')
        vm.run_qmp('pcow-snapshot-delete', id='mem0', name=names[1])
        last = _numbers(vm.command('load-stop'))
        vm.command('load-adopt')
        vm.command('read')
        info = vm.pcow()
        _revert(vm, names[4])
        fifth = _numbers(vm.command('load-check'))
        _check_order(fifth, last, 'reverted to the fifth')
        vm.command('load-start')
        time.sleep(0.3)
        vm.run_qmp('pcow-snapshot-create', id='mem0', name='branch')
        branch_end = _numbers(vm.command('load-stop'))
        # one that was made before the VM, whose content is known to the byte
        _revert(vm, 'second')
        vm.command('level 4')
        vm.command('read')
        vm.command('stores 9 2000 8192')
        vm.command('read')
        vm.command('save')
        vm.power_off()
    context.check_image(image, model)
    _check_order(
        _check_snapshots(context, image, [names[0], *names[2:]], [0] * len(last)),
        last,
        'the last snapshot',
    )
    # its first write was the last one of the snapshot once more
    begin = [number - 1 for number in fifth]
    _check_order(_check_snapshots(context, image, ['branch'], begin), branch_end, 'the branch')
    listed = [
        item['name']
        for item in json.loads(
            context.tool('pcow-img', 'snapshot', '-l', '--output', 'json', image)
        )
    ]
    wanted = {'first', 'second', *names, 'branch'} - {names[1]}
    if set(listed) != wanted:
        raise machine.Failure(f'the image has the snapshots {listed}, not {sorted(wanted)}')
    _check_traps(info)
    return figures(info, pause_ns=pauses, writes=sum(last))


def pool_full(context: Context) -> dict[str, Any]:
    """A pool that fills up while all CPUs write: the VM can be stopped and goes on when there is
    space.
    """
    return _fill_pool(context, 'fill 5')


def full_emulated(context: Context) -> dict[str, Any]:
    """The same with stores that the accelerator makes: of instructions that KVM emulates, by a
    pointer in a helper of TCG.
    """
    return _fill_pool(context, 'device-copy' if context.place.accel == 'kvm' else 'fpu-store')


def _fill_pool(context: Context, command: str) -> dict[str, Any]:
    pool, model = context.directory / 'full', context.model_disk()
    pool.mkdir()
    space.mount(pool, f'size={256 * MIB}')
    try:
        image = context.image(pool)
        used = sum(path.stat().st_blocks for path in pool.iterdir()) * 512
        space.mount(pool, f'remount,size={used + 12 * MIB}')
        with context.test_guest(*context.backend(image), *_disks(context, model)) as vm:
            vm.wait_ready()
            vm.send(command)
            event = vm.wait_event('PCOW_POOL_FULL', machine.COMMAND_SECONDS)
            if event['id'] != 'mem0' or not 0 < event['offset'] < chain.SIZE:
                raise machine.Failure(f'PCOW_POOL_FULL came with {event}')
            answered = space.check_answers(vm)
            time.sleep(1)
            if not vm.busy():
                raise vm.failure('the guest went on although the pool is full')
            space.mount(pool, f'remount,size={256 * MIB}')
            vm.result(command.split()[0])
            vm.wait_event('PCOW_POOL_RESUMED', 60)
            vm.command('read')
            vm.command('save')
            info = vm.power_off()
        context.check_image(image, model)
        if not info['stats']['pool-full-waits']:
            raise machine.Failure(f'no store waited for space: {info["stats"]}')
        return figures(info, control_seconds=answered)
    finally:
        space.unmount(pool)


def _job(vm: machine.Machine, command: str, job: str, **arguments: Any) -> None:
    vm.run_qmp(command, job_id=job, **arguments)
    limit = time.monotonic() + machine.COMMAND_SECONDS
    while time.monotonic() < limit:
        found = next(item for item in vm.run_qmp('query-jobs') if item['id'] == job)
        if found['status'] == 'concluded':
            if 'error' in found:
                raise vm.failure(f'{command}: {found["error"]}')
            vm.run_qmp('job-dismiss', id=job)
            return
        time.sleep(0.05)
    raise vm.failure(f'{command} did not end')


def saved_state(context: Context) -> dict[str, Any]:
    """snapshot-save while all CPUs write, and snapshot-load: RAM and image go back together."""
    image = context.image(context.directory)
    carrier = context.directory / chain.CARRIER
    chain.copy_sparse(context.place.chain / chain.CARRIER, carrier)
    disk = (
        '-blockdev',
        f'driver=qcow2,node-name=carrier,file.driver=file,file.filename={carrier}',
        '-device',
        'virtio-blk-pci,drive=carrier',
    )
    with context.test_guest(*context.backend(image), *disk) as vm:
        vm.wait_ready()
        vm.command(f'stores 1 2000 {_GRANULE_SHARED}')
        vm.command('load-start')
        time.sleep(0.3)
        _job(vm, 'snapshot-save', 'save', tag='state', vmstate='carrier', devices=['carrier'])
        time.sleep(0.3)
        vm.command(f'stores 2 2000 {_GRANULE_SHARED}')
        last = _numbers(vm.command('load-stop'))
        vm.command('load-adopt')
        vm.command('read')
        _job(vm, 'snapshot-load', 'load', tag='state', vmstate='carrier', devices=['carrier'])
        time.sleep(0.3)
        # the threads run again, and each knows what it has written
        vm.command('load-stop')
        vm.command('load-adopt')
        vm.command('read')
        vm.command(f'stores 3 2000 {_GRANULE_SHARED}')
        vm.command('read')
        info = vm.power_off()
    context.check_image(image)
    return figures(info, writes=sum(last))


Scenario = Callable[[Context], dict[str, Any]]

ALL: dict[str, Scenario] = {
    'plain-file': plain_file,
    'stores': stores,
    'transfers': transfers,
    'virtio-pmem': virtio_pmem,
    'snapshots': snapshots,
    'pool-full': pool_full,
    'full-emulated': full_emulated,
    'saved-state': saved_state,
    'live-migration': migration.live_migration,
    'guest-ram': ram.guest_ram,
    'vhost': net.vhost,
    'vhost-full': net.vhost_full,
    'vhost-vsock': vsock.vhost_vsock,
    'ram-full': ram.ram_full,
    'debian': debian.debian,
    'debian-flush': debian.debian_flush,
}
