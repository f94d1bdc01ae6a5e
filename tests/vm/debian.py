# SPDX-License-Identifier: Apache-2.0
"""A Debian guest with its root on an image under DAX."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING
from typing import Any

from tests.vm import chain
from tests.vm import machine
from tests.vm import space

if TYPE_CHECKING:
    from pathlib import Path

    from tests.vm import scenarios

# beyond what a root on an NVDIMM needs
MODULES = ('virtio_pci', 'virtio_blk', 'virtio_pmem')
_SHELL = re.compile(rb'pcow-guest: root: ([^\r\n]*)\r?\npcow-guest: ready')
_TARGET = 4 * chain.MIB  # of what is written to a disk
# Files under DAX in which disk I/O ends: blocks of the template, blocks that are frozen in a
# snapshot, and new ones.
_BASE, _FROZEN, _FRESH = '/usr/bin/perl', '/root/t/4', '/root/fresh'
# All that the guest has on its disk, but the lists themselves, and what changes all the time.
_LIST = (
    'find /root /usr/bin /usr/lib /etc /var -xdev -path /root/w -prune -o -type f ! -name "sums-*" '
    '-print0 | sort -z | '
    'xargs -0 sha256sum'
)
_WRITERS = 3
_SLOTS = 6  # files of each writer, in turns
# A writer: its number in front of random data, over what is there, then the checksum, then the
# number; each on stable storage before the next. So a snapshot of one moment has the file of every
# number but the next one.
_WRITE = (
    'save() { cat >$1.new && sync $1.new && mv $1.new $1 && sync /root/w; }',
    'write() { n=0; while true; do n=$((n+1)); f=/root/w/$1-$((n%SLOTS)); m=/run/w-$1; '
    '(echo $n; head -c 60000 /dev/urandom) >$m; s=$(sha256sum <$m); rm -f $f.sum; sync /root/w; '
    'dd if=$m of=$f bs=70000 conv=notrunc,fsync status=none; echo "${s%-}$f" | save $f.sum; '
    'echo $n | save /root/w/number-$1; if test -e /run/slow; then sleep 1; fi; done; }'.replace(
        'SLOTS', str(_SLOTS)
    ),
)
_FILLERS = 2
_NO_LIMIT = 1 << 31


def _boot(vm: machine.Machine) -> None:
    root = vm.wait_console(_SHELL, machine.BOOT_SECONDS)[1].decode(errors='replace')
    if not re.match(r'/dev/pmem0 / ext4 \S*\bdax=always\b', root):
        raise vm.failure(f'the root file system is {root}')


def _note(vm: machine.Machine, name: str) -> str:
    """List the checksums of all files, in /root/sums-NAME, which is on stable storage then; returns
    its checksum.
    """
    vm.shell(f'{_LIST} >/root/sums-{name} && sync')
    return vm.shell(f'sha256sum </root/sums-{name}')


def _check(vm: machine.Machine, name: str, sums: str) -> None:
    """Every file is what it was."""
    if vm.shell(f'sha256sum </root/sums-{name}') != sums:
        raise vm.failure(f'the list of checksums {name} is not the one that was written')
    vm.shell(f'{_LIST} | cmp - /root/sums-{name}')


def _numbers(vm: machine.Machine) -> list[int]:
    """How far the writers are."""
    files = ' '.join(f'/root/w/number-{writer}' for writer in range(_WRITERS))
    return [int(word) for word in vm.shell(f'cat {files} 2>/dev/null || true').split()]


def _wait_writers(vm: machine.Machine, more: int) -> list[int]:
    """Until each of them has written so many files more; returns how far they are."""
    limit = time.monotonic() + machine.COMMAND_SECONDS
    first = numbers = _numbers(vm)
    while len(numbers) < _WRITERS or any(
        number < (first[writer] if len(first) == _WRITERS else 0) + more
        for writer, number in enumerate(numbers)
    ):
        if time.monotonic() > limit:
            raise vm.failure(f'the writers went from {first} to {numbers} only')
        time.sleep(0.2)
        numbers = _numbers(vm)
    return numbers


def _start_writers(vm: machine.Machine) -> None:
    vm.shell('mkdir -p /root/w')
    for function in _WRITE:
        vm.shell(function)
    # in a shell of their own, or this one would tell of jobs; they end with the machine
    vm.shell(
        f'(for i in {" ".join(str(writer) for writer in range(_WRITERS))}; do write $i & done) '
        f'</dev/null'
    )


def _snapshot(vm: machine.Machine, name: str) -> tuple[list[int], list[int]]:
    """A live snapshot in the middle of what the writers do; returns how far they were before it,
    and after it.
    """
    vm.shell('rm -f /run/slow')
    before = _wait_writers(vm, 1)
    vm.run_qmp('pcow-snapshot-create', id='mem0', name=name)
    after = _wait_writers(vm, 1)
    vm.shell('touch /run/slow')  # and leave the processors to others
    return before, after


def _check_writers(vm: machine.Machine, limits: tuple[list[int], list[int]]) -> None:
    """All that a writer had closed at the moment of a snapshot is there, in the version of that
    moment.
    """
    found = _numbers(vm)
    for writer, (before, number, after) in enumerate(zip(limits[0], found, limits[1], strict=True)):
        # who asked may have seen a number before the journal had it
        if not before - 1 <= number <= after:
            raise vm.failure(
                f'writer {writer} was between {before} and {after}, and is at {number}'
            )
    for writer, number in enumerate(found):
        # the oldest may have been in the making
        numbers = range(max(1, number - _SLOTS + 2), number + 1)
        files = ' '.join(f'{writer}-{item % _SLOTS}' for item in numbers)
        heads = vm.shell(
            f'cd /root/w && for f in {files}; do sha256sum -c --quiet $f.sum && head -n 1 $f; done'
        )
        if heads.split() != [str(item) for item in numbers]:
            raise vm.failure(
                f'writer {writer} is at {number}, and its files have the numbers {heads.split()}'
            )


def _fill(vm: machine.Machine, pool: space.Pool) -> float:
    """The pool is full while the guest copies files: it waits, goes on when there is space, and
    every byte is right.
    """
    pool.take()
    copies = ' '.join(str(number) for number in range(_FILLERS))
    begin, end = vm.send_shell(
        f'mkdir -p /root/w; for i in {copies}; do cp -a /usr/lib /root/w/copy-$i & done; wait; sync'
    )
    event = vm.wait_event('PCOW_POOL_FULL', machine.COMMAND_SECONDS)
    if (event['id'], event['policy']) != ('mem0', 'wait'):
        raise vm.failure(f'PCOW_POOL_FULL came with {event}')
    answered = space.check_answers(vm)
    time.sleep(1)
    vm.run_qmp('query-status')
    if vm.qmp.take_event('PCOW_POOL_RESUMED'):
        raise vm.failure('a store was made although the pool is full')
    pool.give_back()
    vm.wait_event('PCOW_POOL_RESUMED', machine.COMMAND_SECONDS)
    vm.wait_console(
        re.compile(rf'vm-{begin}\r?\n.*?vm-{end}-0\r?\n'.encode(), re.DOTALL),
        machine.COMMAND_SECONDS,
    )
    # and not what the guest's kernel believes to have written
    for number in range(_FILLERS):
        vm.shell(f'diff -r /usr/lib /root/w/copy-{number}')
    return answered


def _disks(context: scenarios.Context) -> tuple[str, ...]:
    """/dev/vda with known content, /dev/vdb to write to, /dev/vdc with the program that does it."""
    target, program = (
        context.place.logs / f'{context.name}.{name}' for name in ('target', 'program')
    )
    target.write_bytes(bytes(_TARGET))
    content = context.place.guest.read_bytes()
    program.write_bytes(content + bytes(-len(content) % chain.MIB))
    return (
        *context.disk('source', context.source_disk()),
        *context.disk('target', target, 'io_uring'),
        *context.disk('program', program),
    )


def _guest(context: scenarios.Context, image: Path, number: int, *disks: str) -> machine.Machine:
    append = (
        f'console=ttyS0 quiet panic=-1 mitigations=off rw pcow.init=shell '
        f'pcow.modules={",".join(MODULES)}'
    )
    return machine.Machine(
        context.place,
        f'{context.name}-{number}',
        '-initrd',
        str(context.place.debian_initrd),
        '-append',
        append,
        *context.backend(image),
        *disks,
        command_port=False,
    )


def debian(context: scenarios.Context) -> dict[str, Any]:
    """Files by several writers, live snapshots meanwhile, disk I/O straight into files; a revert to
    each; a full pool.
    """
    with space.Pool(context.directory) as pool:
        return _in_pool(context, pool)


def _create(context: scenarios.Context, directory: Path) -> Path:
    """An image on a copy of the template."""
    template, image = directory / 'template.pcow', directory / 'vm.pcow'
    chain.copy_sparse(context.place.template, template)
    context.tool('pcow-img', 'create', '-q', '-b', template, image)
    return image


def _in_pool(context: scenarios.Context, pool: space.Pool) -> dict[str, Any]:
    image = _create(context, pool.directory)
    with _guest(context, image, 1, *_disks(context)) as vm:
        _boot(vm)
        vm.shell('dpkg --verify libc6 perl-base bash coreutils dpkg')
        vm.shell(
            'mkdir /root/t && cd /root/t && '
            'for i in 1 2 3 4; do (head -c 3000000 /dev/urandom >$i; cp $i $i-copy) & done; wait'
        )
        vm.shell('cat /dev/vdc >/root/transfer; chmod +x /root/transfer')
        first = _note(vm, 'first')
        _start_writers(vm)
        at_first = _snapshot(vm, 'first')
        vm.shell('cd /root/t; for i in 1 2 3; do cat $i-copy >>$i & done; wait; cp -a /usr/bin .')
        vm.shell('head -c 3000000 /dev/zero >/root/fresh')
        for path in (_BASE, _FROZEN, _FRESH):
            vm.shell(f'/root/transfer transfers 4 {path}')
        vm.shell('cd /root/t && cmp bin/bash /usr/bin/bash && ! cmp -s bin/perl /usr/bin/perl')
        second = _note(vm, 'second')
        at_second = _snapshot(vm, 'second')
        # lost with the revert, which takes a machine that has read half of it
        begin, _end = vm.send_shell('rm -r /root/t/bin; head -c 20000000 /dev/urandom >/root/lost')
        vm.wait_console(re.compile(rf'vm-{begin}\r?\n'.encode()), machine.COMMAND_SECONDS)
        info = vm.pcow()
        vm.run_qmp('stop')
        vm.run_qmp('pcow-snapshot-revert', id='mem0', name='first')
        vm.run_qmp('system_reset')
        vm.run_qmp('cont')
        _boot(vm)
        _check(vm, 'first', first)
        _check_writers(vm, at_first)
        vm.shell('dpkg --verify libc6 perl-base bash coreutils dpkg && test ! -e /root/fresh')
        vm.run_qmp('quit')
        vm.wait_end()
    context.check_image(image)
    context.tool('pcow-img', 'snapshot', '-a', 'second', image)
    with _guest(context, image, 2) as vm:
        _boot(vm)
        answered = _fill(vm, pool)  # which leaves what was there alone
        _check(vm, 'second', second)
        _check_writers(vm, at_second)
        waits = vm.pcow()['stats']['pool-full-waits']
        vm.run_qmp('quit')
        vm.wait_end()
    context.check_image(image)
    if not info['stats']['write-traps']:
        raise machine.Failure(f'no store was trapped, so nothing was shown: {info}')
    if not waits:
        raise machine.Failure('no store waited for space')
    return {
        'engine': info['engine'],
        'persistence': info['persistence'],
        'stats': info['stats'],
        'times': info['times'],
        'written': at_second[1],
        'pool-full-waits': waits,
        'control_seconds': answered,
    }


def debian_flush(context: scenarios.Context) -> dict[str, Any]:
    """With flushes that are requests: QEMU is killed in the middle of what the writers do, and what
    they have synced is there.
    """
    context.device = 'virtio-pmem-pci'
    image = _create(context, context.directory)
    with _guest(context, image, 1) as vm:
        _boot(vm)
        _start_writers(vm)
        at_first = _snapshot(vm, 'first')
        vm.shell('rm -f /run/slow')
        synced = _wait_writers(vm, 2)
        info = vm.pcow()
        vm.process.kill()
        vm.process.wait()
    with _guest(context, image, 2) as vm:
        _boot(vm)
        _check_writers(vm, (synced, [_NO_LIMIT] * _WRITERS))
        vm.run_qmp('stop')
        vm.run_qmp('pcow-snapshot-revert', id='mem0', name='first')
        vm.run_qmp('system_reset')
        vm.run_qmp('cont')
        _boot(vm)
        _check_writers(vm, at_first)
        vm.run_qmp('quit')
        vm.wait_end()
    context.check_image(image)
    if not info['stats']['flushes']:
        raise machine.Failure(f'nothing was flushed: {info}')
    return {
        'engine': info['engine'],
        'persistence': info['persistence'],
        'stats': info['stats'],
        'times': info['times'],
        'written': synced,
    }
