# SPDX-License-Identifier: Apache-2.0
"""A Debian guest with its root on an image under DAX."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from typing import Any

from tests.vm import chain
from tests.vm import machine

if TYPE_CHECKING:
    from pathlib import Path

    from tests.vm import scenarios

MODULES = ('virtio_pci', 'virtio_blk')         # beyond what a root on an NVDIMM needs
_SHELL = re.compile(rb'pcow-guest: root: ([^\r\n]*)\r?\npcow-guest: ready')
_TARGET = 4 * chain.MIB                        # of what is written to a disk
# Files under DAX in which disk I/O ends: blocks of the template, blocks that are frozen in a snapshot, and new ones.
_BASE, _FROZEN, _FRESH = '/usr/bin/perl', '/root/t/4', '/root/fresh'
# All that the guest has on its disk, but the lists themselves.
_LIST = 'find /root /usr/bin /usr/lib /etc /var -xdev -type f ! -name "sums-*" -print0 | sort -z | xargs -0 sha256sum'


def _boot(vm: machine.Machine) -> None:
    root = vm.wait_console(_SHELL, machine.BOOT_SECONDS)[1].decode(errors='replace')
    if not re.match(r'/dev/pmem0 / ext4 \S*\bdax=always\b', root):
        raise vm.failure(f'the root file system is {root}')


def _note(vm: machine.Machine, name: str) -> str:
    """List the checksums of all files, in /root/sums-NAME, which is on stable storage then; returns its checksum."""
    vm.shell(f'{_LIST} >/root/sums-{name} && sync')
    return vm.shell(f'sha256sum </root/sums-{name}')


def _check(vm: machine.Machine, name: str, sums: str) -> None:
    """Every file is what it was."""
    if vm.shell(f'sha256sum </root/sums-{name}') != sums:
        raise vm.failure(f'the list of checksums {name} is not the one that was written')
    vm.shell(f'{_LIST} | cmp - /root/sums-{name}')


def _disks(context: scenarios.Context) -> tuple[str, ...]:
    """/dev/vda with known content, /dev/vdb to write to, /dev/vdc with the program that does it."""
    target, program = (context.place.logs / f'{context.name}.{name}' for name in ('target', 'program'))
    target.write_bytes(bytes(_TARGET))
    content = context.place.guest.read_bytes()
    program.write_bytes(content + bytes(-len(content) % chain.MIB))
    return (*context.disk('source', context.source_disk()), *context.disk('target', target, 'io_uring'),
            *context.disk('program', program))


def _guest(context: scenarios.Context, image: Path, number: int, *disks: str) -> machine.Machine:
    append = f'console=ttyS0 quiet panic=-1 mitigations=off rw pcow.init=shell pcow.modules={",".join(MODULES)}'
    return machine.Machine(context.place, f'{context.name}-{number}', '-initrd', str(context.place.debian_initrd),
                           '-append', append, *context.backend(image), *disks, command_port=False)


def debian(context: scenarios.Context) -> dict[str, Any]:
    """Files by several writers, disk I/O straight into them, live snapshots; a revert to each, and all files compared."""
    template, image = context.directory / 'template.pcow', context.directory / 'vm.pcow'
    chain.copy_sparse(context.place.template, template)
    context.tool('pcow-img', 'create', '-q', '-b', template, image)
    with _guest(context, image, 1, *_disks(context)) as vm:
        _boot(vm)
        vm.shell('dpkg --verify libc6 perl-base bash coreutils dpkg')
        vm.shell('mkdir /root/t && cd /root/t && '
                 'for i in 1 2 3 4; do (head -c 3000000 /dev/urandom >$i; cp $i $i-copy) & done; wait')
        vm.shell('cat /dev/vdc >/root/transfer; chmod +x /root/transfer')
        first = _note(vm, 'first')
        vm.run_qmp('pcow-snapshot-create', id='mem0', name='first')
        vm.shell('cd /root/t; for i in 1 2 3; do cat $i-copy >>$i & done; wait; cp -a /usr/bin .')
        vm.shell('head -c 3000000 /dev/zero >/root/fresh')
        for path in (_BASE, _FROZEN, _FRESH):
            vm.shell(f'/root/transfer transfers 4 {path}')
        vm.shell('cd /root/t && cmp bin/bash /usr/bin/bash && ! cmp -s bin/perl /usr/bin/perl')
        second = _note(vm, 'second')
        vm.run_qmp('pcow-snapshot-create', id='mem0', name='second')
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
        vm.shell('dpkg --verify libc6 perl-base bash coreutils dpkg && test ! -e /root/fresh')
        vm.run_qmp('quit')
        vm.wait_end()
    context.check_image(image)
    context.tool('pcow-img', 'snapshot', '-a', 'second', image)
    with _guest(context, image, 2) as vm:
        _boot(vm)
        _check(vm, 'second', second)
        vm.run_qmp('quit')
        vm.wait_end()
    context.check_image(image)
    if not info['stats']['write-traps']:
        raise machine.Failure(f'no store was trapped, so nothing was shown: {info}')
    return {'engine': info['engine'], 'persistence': info['persistence'], 'stats': info['stats'], 'times': info['times']}
