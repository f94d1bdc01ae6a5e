# SPDX-License-Identifier: Apache-2.0
"""Pools on persistent memory, made and ended by pcowctl: what is tried inside the machine, over
several boots of it.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import hashlib
import json
import mmap
import os
from pathlib import Path
import re
import time
from typing import Any

from pcow_driver.common import exception
from pcow_driver.common import immutable
from pcow_driver.privileged import filesystems
from pcow_driver.privileged import namespaces
from tests.vm import command
from tests.vm import machine
from tests.vm import pool_kills

DISK = '/suite/disk.raw'  # a small system, the source of the template
KERNEL = '/boot/vmlinuz'
INITRD = '/boot/initrd.img'
SESSION_POOL = 'fast'
_POOLS = pool_kills.POOLS
_REGIONS = Path('/sys/bus/nd/devices')
_LARGE = 2 << 30  # bytes of the regions that are not odd
# of DRAM that the kernel was told to take for persistent memory (memmap=)
RESERVED = 192 << 20
_PATTERN = '0xa5'
_WRITTEN = b'written by the guest of vm1'
_MOUNT_SECONDS = 120.0
_UUIDS = Path('/var/lib/pcow/uuids.json')  # what the next boot must find again


def _json(*words: str) -> Any:
    return json.loads(command.must(*words, '-f', 'json', stdout_only=True).output)


def _expect(condition: object, what: object) -> None:
    if not condition:
        raise machine.Failure(str(what))


def _regions() -> tuple[str, str, str]:
    """Names of the first region, the second one, and the one of an odd size: the kernel numbers
    them as it finds them.
    """
    found = sorted(path.name for path in _REGIONS.glob('region[0-9]'))
    large = [name for name in found if int((_REGIONS / name / 'size').read_text()) == _LARGE]
    odd_ones = [name for name in found if name not in (*large, _reserved())]
    _expect(len(large) == 2 and len(odd_ones) == 1, f'regions {found}')
    return large[0], large[1], odd_ones[0]


def _reserved() -> str:
    found = [
        path.parent.name
        for path in _REGIONS.glob('region[0-9]/size')
        if int(path.read_text()) == RESERVED
    ]
    _expect(len(found) == 1, f'regions of {RESERVED} bytes: {found}')
    return found[0]


def _io(place: machine.Place, path: Path, *commands: str) -> str:
    return machine.run(
        place.binaries / 'pcow-io', *(word for item in commands for word in ('-c', item)), path
    )


def _doctor(*columns: str) -> command.Result:
    """What pcowctl doctor says of memory and pools: the rest depends on what is installed."""
    done = command.run(
        'doctor', '-f', 'value', *(word for column in columns for word in ('-c', column))
    )
    lines = [
        line
        for line in done.output.splitlines()
        if line.startswith(('region', 'namespace', 'mappings in pool'))
    ]
    return dataclasses.replace(done, output=''.join(f'{line}\n' for line in lines))


def _all_of_doctor() -> str:
    return _doctor('check', 'status', 'found', 'what to do').output


def _content(place: machine.Place, path: Path) -> bytes:
    """What a guest sees in an image."""
    whole = Path('/tmp/whole')
    machine.run(place.binaries / 'pcow-img', 'convert', '-f', 'pcow', '-O', 'raw', path, whole)
    data = whole.read_bytes()
    whole.unlink()
    return data


def _booted(path: Path) -> list[command.Result]:
    """A machine with its root file system on the image, by the QEMU that the domain's XML names: no
    libvirt is in this one.
    """
    started = command.shell(
        'qemu-system-x86_64',
        '-machine',
        'q35,nvdimm=on',
        '-accel',
        'kvm',
        '-cpu',
        'host,svm=off',
        '-m',
        '256M,slots=1,maxmem=1G',
        '-nodefaults',
        '-display',
        'none',
        '-serial',
        'stdio',
        '-no-reboot',
        '-kernel',
        KERNEL,
        '-initrd',
        INITRD,
        '-append',
        'root=/dev/pmem0 rootflags=dax=always rw console=ttyS0 quiet panic=-1 mitigations=off',
        '-object',
        f'memory-backend-file,id=mem0,mem-path={path},share=on',
        '-device',
        'nvdimm,memdev=mem0',
    )
    lines = [
        line for line in started.output.replace('\r', '').splitlines() if line.startswith('guest: ')
    ]
    _expect(
        re.search('^guest: / is /dev/pmem0, ext4, .*dax=always', '\n'.join(lines), re.MULTILINE),
        started.output[-3000:],
    )
    for wanted in (f'guest: {hashlib.sha256(_file()).hexdigest()}  /file', 'guest: done'):
        _expect(wanted in lines, f'the guest did not say {wanted!r}: {started.output[-3000:]}')
    return [dataclasses.replace(started, output='\n'.join(lines) + '\n')]


def _file() -> bytes:
    return Path('/suite/file').read_bytes()


def session(place: machine.Place, _pool: str) -> dict[str, Any]:
    """From a bare region to the image of a virtual machine: the commands of the operator guide."""
    region = _regions()[0]
    done = [_doctor('check', 'found')]
    _expect(region in done[0].output, done[0].output)
    create = ('pool', 'create', SESSION_POOL, '--region', region)
    done += [command.must(*create, '--dry-run')]
    _expect(
        'mkfs.xfs' in done[-1].output
        and not os.path.exists('/dev/pmem0.1')
        and not list(_POOLS.glob('*')),
        done[-1].output,
    )
    done += [command.must(*create)]
    _expect('MAP_SYNC' in done[-1].output, done[-1].output)
    done += [
        command.must('pool', 'list'),
        command.must('template', 'build', '--source-format', 'raw', DISK, f'{SESSION_POOL}/debian'),
        command.must('image', 'create', f'{SESSION_POOL}/vm1', '--template', 'debian'),
        command.must(
            'domain-xml',
            f'{SESSION_POOL}/vm1',
            '--kernel',
            KERNEL,
            '--initrd',
            INITRD,
            '--type',
            'kvm',
        ),
        command.must('pool', 'check', SESSION_POOL),
        _doctor('check', 'found'),
    ]
    path = _POOLS / SESSION_POOL / 'vm1.pcow'
    _expect(
        str(path) in done[6].output and "model='nvdimm'" in done[6].output.replace('"', "'"),
        done[6].output,
    )
    # what a guest would see: the template's file system behind the info block, its own stores above
    # it
    disk = Path(DISK).read_bytes()
    _expect(
        _content(place, path)[2 << 20 :][: len(disk)] == disk,
        'the image does not hold what the template was made of',
    )
    done += _booted(path)
    _expect(_WRITTEN in _content(place, path), 'what the guest wrote is not in its image')
    _expect(
        _WRITTEN not in _content(place, path.with_name('debian.pcow')),
        'what the guest wrote is in its template',
    )
    done += [command.must('pool', 'capacity', SESSION_POOL)]
    _io(
        place,
        path,
        f'write -P {_PATTERN} 4M 64k',
        'flush',
        'snapshot create one',
        'write -P 0x5a 4M 4k',
        'flush',
    )
    _expect('pmem' in json.dumps(_json('pool', 'show', SESSION_POOL)), 'the class is not pmem')
    return {
        'session': [item.dump() for item in done],
        'immutable': immutable.is_set(str(path.with_name('debian.pcow'))),
    }


def other(place: machine.Place, _pool: str) -> dict[str, Any]:
    """The second region: ext4, two pools on it, what pools can do besides."""
    command.must(
        'pool', 'create', 'slow', '--region', _regions()[1], '--size', '600M', '--fs', 'ext4'
    )
    command.must_fail(
        'XFS needs',
        'pool',
        'create',
        'spare',
        '--region',
        _regions()[1],
        '--size',
        '512M',
        '--fs',
        'xfs',
    )
    command.must(
        'pool', 'create', 'spare', '--region', _regions()[1], '--size', '640M', '--fs', 'xfs'
    )
    for name in ('slow', 'spare'):
        found = _json('pool', 'show', name)
        _expect(found['persistence'] == 'pmem' and 'ADR' in found['survives'], found)
        _expect(_json('pool', 'list')[0]['problem'] == '', 'pool list shows a problem')
    command.must_fail(
        '600 MiB|free and', 'pool', 'create', 'large', '--region', _regions()[1], '--size', '64G'
    )
    command.must('image', 'create', 'slow/vm2', '--size', '64M')
    _io(place, _POOLS / 'slow/vm2.pcow', f'write -P {_PATTERN} 0 1M', 'flush')
    command.must_fail('1 image|vm2', 'pool', 'remove', 'slow')
    command.must_fail('vm2', 'pool', 'remove', 'slow', '--destroy')
    command.must('pool', 'set', 'slow', '--overcommit', '1')
    command.must_fail(
        'over-commit|provisioned|limit', 'image', 'create', 'slow/huge', '--size', '8G'
    )
    command.must('pool', 'drain', 'slow')
    command.must_fail('drain', 'image', 'create', 'slow/vm3', '--size', '64M')
    command.must('pool', 'drain', 'slow', '--end')
    command.must('image', 'create', 'slow/vm3', '--size', '64M')
    command.must('image', 'delete', 'slow/vm3')
    command.must('pool', 'extend', 'slow')
    command.must('pool', 'check', 'slow', '--prometheus', '/tmp/pools.prom')
    _expect('slow' in Path('/tmp/pools.prom').read_text(), 'no figures for Prometheus')
    # another host's pool
    command.must('pool', 'remove', 'slow', '--forget')
    command.must_fail('slow', 'pool', 'show', 'slow')
    command.must('pool', 'import', str(_POOLS / 'slow'))
    _expect(
        _json('image', 'list', 'slow')[0]['virtual size'] == 64 << 20,
        'the image is not in the imported pool',
    )
    # an empty pool goes with all that is under it, and its space can be taken again without --force
    dry = command.must('pool', 'remove', 'spare', '--destroy', '--dry-run')
    _expect('destroy-namespace' in dry.output and os.path.ismount(_POOLS / 'spare'), dry.output)
    command.must('pool', 'remove', 'spare', '--destroy')
    _expect(
        not os.path.ismount(_POOLS / 'spare')
        and not list(Path('/etc/systemd/system').glob('*spare*')),
        'spare is still there',
    )
    command.must(
        'pool', 'create', 'spare', '--region', _regions()[1], '--size', '512M', '--fs', 'ext4'
    )
    command.must('pool', 'remove', 'spare', '--destroy')
    # DRAM that looks like persistent memory is told apart
    command.must('pool', 'create', 'reserved', '--region', _reserved(), '--fs', 'ext4')
    found = _json('pool', 'show', 'reserved')
    _expect(
        found['persistence'] == 'pmem'
        and 'kexec' in found['survives']
        and found['lost by'] == 'power loss',
        found,
    )
    command.must('pool', 'remove', 'reserved', '--destroy')
    # in DRAM
    command.must('pool', 'create', 'quick', '--memory', '--huge', '--size', '32M')
    command.must('pool', 'extend', 'quick', '--size', '64M')
    _expect(_json('pool', 'show', 'quick')['total'] == 64 << 20, 'the pool in DRAM did not grow')
    command.must('pool', 'remove', 'quick', '--destroy')
    _UUIDS.write_text(
        json.dumps({name: _json('pool', 'show', name)['uuid'] for name in (SESSION_POOL, 'slow')})
    )
    return {'doctor': _all_of_doctor()}


def refusals(_place: machine.Place, _pool: str) -> dict[str, Any]:
    """What must not be destroyed is not: a namespace with data, with something unknown, in use,
    disabled.
    """
    said: list[command.Result] = []

    def refuse(pattern: str, *words: str) -> None:
        said.append(command.must_fail(pattern, *words))

    # the pool of the session: mounted, and when it is not, full of data
    refuse('in use', 'pool', 'create', 'other', '--namespace', 'namespace0.0')
    refuse('in use', 'pool', 'create', 'other', '--namespace', 'namespace0.0', '--force')
    refuse('in use', 'pool', 'create', 'other', '--device', '/dev/pmem0')
    refuse('0 B of it are free|are free', 'pool', 'create', 'other', '--region', _regions()[0])
    machine.run('umount', _POOLS / SESSION_POOL)
    refuse('xfs', 'pool', 'create', 'other', '--namespace', 'namespace0.0')
    refuse('not mounted|mount it', 'pool', 'show', SESSION_POOL)
    _expect(
        'not mounted' in _json('pool', 'list')[0]['problem']
        or 'mount it' in _json('pool', 'list')[0]['problem'],
        'pool list does not say that the pool is not mounted',
    )
    machine.run(
        'mount', '-t', 'xfs', '-o', 'dax=always,noatime', '/dev/pmem0', _POOLS / SESSION_POOL
    )
    # one with something that no program knows, and one that nobody can look at
    made = json.loads(
        machine.run(
            'ndctl',
            'create-namespace',
            '--mode',
            'fsdax',
            '--region',
            _regions()[1],
            '--size',
            '256M',
        )
    )
    name, device = made['dev'], f'/dev/{made["blockdev"]}'
    machine.run(
        'dd', 'if=/dev/urandom', f'of={device}', 'bs=4096', 'count=1', 'seek=300', 'conv=fsync'
    )
    refuse('does not know', 'pool', 'create', 'other', '--namespace', name)
    machine.run('ndctl', 'disable-namespace', name)
    refuse('disabled', 'pool', 'create', 'other', '--namespace', name)
    machine.run('ndctl', 'enable-namespace', name)
    # what no label and no super block tells of
    machine.run(
        'dd', 'if=/dev/zero', f'of={device}', 'bs=4096', 'count=1', 'seek=300', 'conv=fsync'
    )
    machine.run(
        'dd', 'if=/dev/urandom', f'of={device}', 'bs=1M', 'count=1', 'seek=100', 'conv=fsync'
    )
    refuse('does not know', 'pool', 'create', 'other', '--namespace', name)
    _refuse_unit_of_somebody_else(refuse, name)
    _refuse_mapped(refuse)
    # with --force, and nothing else, it is taken
    refuse('XFS needs', 'pool', 'create', 'other', '--namespace', name, '--force')
    command.must('pool', 'create', 'other', '--namespace', name, '--fs', 'ext4', '--force')
    _refuse_busy(refuse)
    command.must('pool', 'remove', 'other', '--destroy')
    _refuse_as_root()
    _refuse_remains()
    refuse('no region', 'pool', 'create', 'other', '--region', 'region9')
    refuse('ndctl list', 'pool', 'create', 'other', '--region', 'region0; reboot')
    return {'session': [item.dump() for item in said]}


def _refuse_as_root() -> None:
    """What runs as root looks for itself, at a pool that is mounted and at the disk of this
    machine.
    """
    root = next(device for device in Path('/sys/block').glob('vd*'))
    command.must_fail(
        'has no DAX',
        'pool',
        'create',
        'other',
        '--device',
        f'/dev/{root.name}',
        '--force',
        '--dry-run',
    )
    dimm = (_REGIONS / _regions()[0] / 'mapping0').read_text().split(',')[0]
    for said, function, arguments in (
        ('in use', namespaces.check_unused, ('namespace0.0',)),
        ('in use', namespaces.destroy, ('namespace0.0',)),
        ('in use', namespaces.reconfigure, ('namespace0.0', 2 << 20, True)),
        ('in use', namespaces.disable_region, (_regions()[0],)),
        ('is active', namespaces.init_labels, ([dimm], True)),
        ('in use', filesystems.wipe, ('/dev/pmem0', '')),
        ('has no DAX', filesystems.make, ('ext4', f'/dev/{root.name}', 'l', filesystems.ANYTHING)),
    ):
        try:
            function(*arguments)
        except exception.DeviceRefused as e:
            _expect(said in str(e), f'{arguments}: {e}')
        else:
            raise machine.Failure(f'{arguments} was done')


def _refuse_remains() -> None:
    """Free by the labels, and a file system is there: what was made to look is ended, whatever it
    carries.
    """
    made = json.loads(
        machine.run(
            'ndctl',
            'create-namespace',
            '--mode',
            'fsdax',
            '--region',
            _regions()[1],
            '--size',
            '256M',
        )
    )
    machine.run('mkfs.ext4', '-q', '-F', f'/dev/{made["blockdev"]}')
    try:
        namespaces.destroy(made['dev'])
    except exception.DeviceRefused as e:
        _expect('carries ext4' in str(e), e)
    else:
        raise machine.Failure('a namespace with a file system was ended')
    machine.run('ndctl', 'destroy-namespace', '--force', made['dev'])
    before = machine.run('ndctl', 'list', '-N')
    command.must_fail(
        'is still there',
        'pool',
        'create',
        'other',
        '--region',
        _regions()[1],
        '--size',
        '256M',
        '--fs',
        'ext4',
    )
    _expect(
        machine.run('ndctl', 'list', '-N') == before,
        'the namespace that was made to look is still there',
    )


def _refuse_unit_of_somebody_else(refuse: Callable[..., None], namespace: str) -> None:
    unit = Path('/etc/systemd/system/var-lib-pcow-pools-other.mount')
    unit.write_text('# mine\n[Mount]\nWhat=LABEL=data\nWhere=/var/lib/pcow/pools/other\n')
    refuse(
        'did not write',
        'pool',
        'create',
        'other',
        '--namespace',
        namespace,
        '--fs',
        'ext4',
        '--force',
    )
    _expect(unit.read_text().startswith('# mine'), 'the unit of somebody else was replaced')
    unit.unlink()


def _refuse_mapped(refuse: Callable[..., None]) -> None:
    """A character device that somebody has mapped, as QEMU does, without a descriptor of it that is
    open.
    """
    made = json.loads(
        machine.run(
            'ndctl',
            'create-namespace',
            '--mode',
            'devdax',
            '--region',
            _regions()[1],
            '--size',
            '256M',
        )
    )
    devices = list(Path('/dev').glob('dax*'))
    _expect(len(devices) == 1, f'{made} is {devices}')
    descriptor = os.open(devices[0], os.O_RDWR)
    memory = mmap.mmap(descriptor, 2 << 20)
    os.close(descriptor)
    memory[:4] = b'mine'
    refuse(
        'in use by process',
        'pool',
        'create',
        'other',
        '--namespace',
        made['dev'],
        '--fs',
        'ext4',
        '--force',
    )
    _expect(memory[:4] == b'mine', 'what was mapped is gone')
    memory.close()
    refuse(
        'devdax, whose users', 'pool', 'create', 'other', '--namespace', made['dev'], '--fs', 'ext4'
    )
    machine.run('ndctl', 'destroy-namespace', '--force', made['dev'])


def _refuse_busy(refuse: Callable[..., None]) -> None:
    """The pool is there afterwards as it was, and at the next boot."""
    command.must('pool', 'set', 'other', '--overcommit', '3')
    before = _json('pool', 'show', 'other')
    directory = os.open(_POOLS / 'other', os.O_RDONLY)
    refuse('busy', 'pool', 'remove', 'other', '--destroy')
    os.close(directory)
    _expect(_json('pool', 'show', 'other')['uuid'] == before['uuid'], 'another pool is there')
    _expect(
        Path('/etc/systemd/system/var-lib-pcow-pools-other.mount').exists(),
        'nothing mounts it at boot any more',
    )
    command.must_fail(
        'over-commit|provisioned|limit', 'image', 'create', 'other/huge', '--size', '8G'
    )


def killed(_place: machine.Place, _pool: str) -> dict[str, Any]:
    """See :mod:`tests.vm.pool_kills`."""
    figures = pool_kills.scenario(_regions()[1])
    uuids = json.loads(_UUIDS.read_text())
    _UUIDS.write_text(
        json.dumps(uuids | {pool_kills.NAME: _json('pool', 'show', pool_kills.NAME)['uuid']})
    )
    return figures


def odd(_place: machine.Place, _pool: str) -> dict[str, Any]:
    """A region whose size is no multiple of its alignment."""
    doctor = _all_of_doctor()
    command.must('pool', 'create', 'odd', '--region', _regions()[2], '--fs', 'ext4')
    found = _json('pool', 'show', 'odd')
    _expect(found['persistence'] == 'pmem', found)
    return {'doctor': doctor, 'pool': found}


def rebooted(place: machine.Place, _pool: str) -> dict[str, Any]:
    """All pools are there again, mounted by their units, with what was flushed."""
    uuids = json.loads(_UUIDS.read_text())
    limit = time.monotonic() + _MOUNT_SECONDS
    while not all(os.path.ismount(_POOLS / name) for name in uuids) and time.monotonic() < limit:
        time.sleep(0.1)  # systemd is mounting them
    _expect('systemd' in Path('/proc/1/comm').read_text(), 'systemd is not the init of this boot')
    for name, uuid in uuids.items():
        found = _json('pool', 'show', name)
        _expect(found['uuid'] == uuid and found['persistence'] == 'pmem', found)
    _io(
        place,
        _POOLS / SESSION_POOL / 'vm1.pcow',
        'read -P 0x5a 4M 4k',
        f'read -P {_PATTERN} 4100k 60k',
    )
    _io(place, _POOLS / 'slow/vm2.pcow', f'read -P {_PATTERN} 0 1M')
    machine.run(place.binaries / 'pcow-img', 'check', _POOLS / SESSION_POOL / 'vm1.pcow')
    return {'pools': _json('pool', 'list')}


def damaged(_place: machine.Place, _pool: str) -> dict[str, Any]:
    """Somebody wrote over the label area of the odd region's DIMM: its namespace is out of sight,
    and nothing makes it worse.
    """
    said = [
        _doctor('check', 'status', 'found', 'what to do'),
        command.must_fail('damaged', 'pool', 'create', 'new', '--region', _regions()[2]),
        command.must_fail('mount|not there', 'pool', 'show', 'odd'),
    ]
    _expect('damaged' in said[0].output, said[0].output)
    command.must('pool', 'create', 'new', '--region', _regions()[2], '--fs', 'ext4', '--force')
    command.must('pool', 'remove', 'new', '--destroy')
    return {'session': [item.dump() for item in said]}


ALL: dict[str, Callable[[machine.Place, str], dict[str, Any]]] = {
    'session': session,
    'other': other,
    'refusals': refusals,
    'odd': odd,
    'killed': killed,
    'rebooted': rebooted,
    'damaged': damaged,
}
