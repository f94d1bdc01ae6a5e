# SPDX-License-Identifier: Apache-2.0
"""What the outer machine is given: programs, images, NVDIMMs."""

from __future__ import annotations

from collections.abc import Collection
import dataclasses
import os
from pathlib import Path
import shutil
import uuid

from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.images import info_block
from tests.vm import caches as caches_module
from tests.vm import confinement
from tests.vm import disk_unit
from tests.vm import failing
from tests.vm import fsdax
from tests.vm import machine
from tests.vm import parts as parts_module
from tests.vm import pools
from tests.vm import reflink
from tests.vm import tree

_POOL_SIZE = 2 * units.GIB  # of the NVDIMM that holds the pool of KVM's tests
_MORE_SIZE = units.GIB  # of each other one
LABEL_SIZE = 256 * units.KIB
_SUITE = Path('/suite')
_BUSYBOX = Path('/bin/busybox')
_GUEST_MODULES = ('nfit', 'nd_pmem', 'ext4')
_USED_BY_TESTS = ('qemu-img', 'qemu-io', 'qemu-nbd', 'sh', 'dd', 'cp', 'rm', 'losetup', 'truncate')
_LIBNBD = Path('/usr/lib/x86_64-linux-gnu/libnbd.so.0')  # pcow-img loads it when it needs it
_OUTER = Path(__file__).parent / 'outer'
_GOLDEN = Path(__file__).parents[1] / 'unit/libpcow/golden'
_POOLS = {
    'tmpfs': Path('/pool'),
    'pmem': Path('/pmem'),
    'xfs': Path('/xfs'),
    'page-cache': Path('/disk'),
}
# With the tree of reverse mappings the kernel asks XFS, and not itself, who is concerned when
# memory is lost.
_MKFS_XFS = ('mkfs.xfs', '-q', '-K', '-m', 'reflink=0,rmapbt=1', '-d')


def _place(accel: str, pool: Path, cpus: int) -> machine.Place:
    """Where the suite finds things inside."""
    return machine.Place(
        accel=accel,
        binaries=_SUITE / 'bin',
        kernel=_SUITE / 'kernel',
        initrd=_SUITE / 'initrd',
        guest=_SUITE / 'bin/guest',
        info_block=_SUITE / 'info-block',
        debian_initrd=_SUITE / 'debian-initrd',
        template=Path('/pmem/template.pcow'),
        chain=Path('/pmem/chain'),
        pool=pool,
        logs=Path('/tmp'),
        cpus=cpus,
    )


def kvm_places(cpus: int) -> dict[str, machine.Place]:
    return {name: _place('kvm', pool, cpus) for name, pool in _POOLS.items()}


def fsdax_places() -> dict[str, machine.Place]:
    return {kind: _place('none', Path('/fs') / kind, 0) for kind in fsdax.REGIONS}


def kvm_tree(
    directory: Path, parts: parts_module.Parts, binaries: Path, checked: parts_module.Parts | None
) -> tree.Tree:
    """:param checked: with another kernel for guests (:mod:`tests.vm.failing`)"""
    made = tree.Tree(directory)
    if checked is not None:
        made.add(checked.kernel, str(_SUITE / failing.CHECKED / 'kernel'))
        made.add(checked.initrd, str(_SUITE / failing.CHECKED / 'initrd'))
    for name in ('qemu-system-x86_64', 'pcow-img', 'pcow-io'):
        made.add_program(binaries / name, f'/suite/bin/{name}')
    made.add_programs(('env', 'mount', 'umount'))
    for path in _POOLS.values():
        (made.directory / str(path).lstrip('/')).mkdir(exist_ok=True)
    made.add(parts.guest, '/suite/bin/guest')
    made.add(parts.kernel, '/suite/kernel')
    made.add(parts.initrd, '/suite/initrd')
    made.add(parts.debian_initrd, '/suite/debian-initrd')
    made.add(parts.info_block, '/suite/info-block')
    made.add_firmware()
    made.add_python()
    made.add_tests()
    return made


def fsdax_tree(directory: Path, binaries: Path, tests: Path) -> tree.Tree:
    made = tree.Tree(directory)
    for name in ('pcow-img', 'pcow-io', 'pcow-bench', 'qemu-system-x86_64'):
        made.add_program(binaries / name, f'/suite/bin/{name}')
    for name in (*fsdax.UNIT_TESTS, fsdax.RANDOM_TEST):
        made.add_program(tests / 'unit/libpcow' / name, f'/suite/bin/{name}')
    for path in _GOLDEN.iterdir():
        made.add(path, str(fsdax.GOLDEN / path.name))
    for name in ('dax_stores', 'snapshot_compare'):
        made.add_program(tests / 'vm/outer' / name, f'/suite/bin/{name}')
    made.add_programs(
        ('env', 'mount', 'umount', 'ndctl', 'mkfs.ext4', 'mkfs.xfs', 'xfs_fsr', *_USED_BY_TESTS)
    )
    made.add_program(_LIBNBD, str(_LIBNBD))
    made.add(Path('/etc/passwd'), '/etc/passwd')  # a test names it as a base
    for path in (*(Path('/fs') / kind for kind in fsdax.REGIONS), reflink.POOL, fsdax.RANDOM_POOL):
        (made.directory / str(path).lstrip('/')).mkdir(parents=True)
    made.add_python()
    made.add_firmware()
    made.add_packages('testtools')
    made.add_tests(
        'functional/images',
        'functional/format1',
        *(f'functional/{name}' for name in fsdax.FUNCTIONAL_TESTS),
    )
    return made


def pools_tree(directory: Path, parts: parts_module.Parts, binaries: Path, udev: Path) -> tree.Tree:
    """A host with pcowctl and systemd, and a small disk to make a template of."""
    made = tree.Tree(directory)
    for name in ('pcow-img', 'pcow-io', 'qemu-system-x86_64'):
        made.add_program(binaries / name, f'/usr/bin/{name}')
    made.add_programs(
        (
            'env',
            'sh',
            'mount',
            'umount',
            'blkid',
            'wipefs',
            'dd',
            'prlimit',
            'qemu-img',
            'ndctl',
            'mkfs.ext4',
            'resize2fs',
            'mkfs.xfs',
            'xfs_io',
            'xfs_growfs',
            'systemctl',
        )
    )
    made.add(Path('/etc/passwd'), '/etc/passwd')
    made.add(Path('/etc/group'), '/etc/group')
    made.add(parts.kernel, pools.KERNEL)
    made.add(
        parts.kernel.with_name(parts.kernel.name.replace('vmlinuz', 'config')),
        f'/boot/{parts.kernel.name.replace("vmlinuz", "config")}',
    )
    made.add_firmware()
    content = directory.with_name('disk-content')
    for name in ('bin', 'sbin', 'proc', 'dev'):
        (content / name).mkdir(parents=True)
    (content / 'file').write_bytes(os.urandom(units.MIB))
    made.add(content / 'file', '/suite/file')
    shutil.copy(_BUSYBOX, content / 'bin/busybox')
    shutil.copy(_OUTER / 'session-guest', content / 'sbin/init')
    made.add_initrd(
        pools.INITRD,
        _OUTER / 'session-initrd',
        parts_module.modules_in_order(parts.modules, _GUEST_MODULES),
    )
    tool.run(
        '/sbin/mkfs.ext4',
        '-q',
        '-F',
        '-b',
        '4096',
        '-E',
        'lazy_itable_init=0',
        '-d',
        str(content),
        str(made.directory / pools.DISK.lstrip('/')),
        '16M',
    )
    shutil.rmtree(content)
    made.add(_BUSYBOX, '/suite/busybox')
    for name in ('boot-suite', 'vm-test.service'):
        made.add(_OUTER / name, f'/suite/{name}')
    made.add_systemd(udev)
    made.add_python()
    made.add_pcowctl()
    made.add_tests('vm/command', 'vm/pools', 'vm/pool_kills')
    return made


def confinement_tree(
    directory: Path, parts: parts_module.Parts, binaries: Path, udev: Path
) -> tree.Tree:
    """A host with AppArmor, libvirt and nbdkit as Debian has them, and pcow's rules, hook and units
    as they are installed.
    """
    made = tree.Tree(directory)
    for name in ('pcow-img', 'qemu-system-x86_64'):
        made.add_program(binaries / name, f'/usr/local/bin/{name}')
    made.add_programs(
        (
            'env',
            'sh',
            'mount',
            'umount',
            'systemctl',
            'unshare',
            'qemu-img',
            'libvirtd',
            'virsh',
            'apparmor_parser',
            'nbdkit',
        )
    )
    made.add_libvirt()
    for source, target in ((confinement.HOOK, confinement.HOOK_TARGET), *disk_unit.UNITS.items()):
        made.add(tree.TOP / source, target)
    for source, target in confinement.RULES.items():
        with open(made.directory / target.lstrip('/'), 'a') as file:
            file.write((tree.TOP / source).read_text())
    made.add_program((binaries / 'nbdkit-pcow-plugin.so').resolve(), confinement.PLUGIN)
    program = made.directory / disk_unit.PROGRAM.lstrip('/')
    program.write_text(disk_unit.PROGRAM_TEXT)
    program.chmod(0o755)
    with open(made.directory / 'etc/group', 'a') as file:
        file.write('pcow:x:990:\n')
    made.add(_BUSYBOX, '/suite/busybox')
    for name in ('boot-suite', 'vm-test.service'):
        made.add(_OUTER / name, f'/suite/{name}')
    made.add_systemd(udev)
    made.add_firmware()
    made.add_python()
    made.add_pcowctl()
    made.add_tests('vm/confinement', 'vm/disk_unit')
    return made


def more_options(wanted: Collection[str]) -> list[str]:
    """For the kernel of a machine that has more_pools()."""
    return [f'vm-test.{pool}' for pool in ('xfs', 'page-cache') if pool in wanted]


def pools_places() -> dict[str, machine.Place]:
    return {
        'pmem': dataclasses.replace(_place('none', Path('/pool'), 0), binaries=Path('/usr/bin'))
    }


def _write_nvdimm(scratch: Path, name: str, size: int) -> tuple[Path, int]:
    """A file for an NVDIMM in fsdax mode, and where a file system begins in it."""
    path = scratch / name
    with open(path, 'wb') as file:
        file.truncate(size)
        file.seek(info_block.BLOCK_OFFSET)
        file.write(info_block.info_block(size, info_block.PageMap.RAM, uuid.uuid4()))
    return path, info_block.data_offset(size, info_block.PageMap.RAM)


def _nvdimm(path: Path, size: int) -> tuple[str, ...]:
    """Arguments for QEMU."""
    return (
        '-object',
        f'memory-backend-file,id={path.name},mem-path={path},size={size},share=on',
        '-device',
        f'nvdimm,memdev={path.name}',
    )


def pool_nvdimm(scratch: Path, template: Path | None, chain: Path) -> tuple[str, ...]:
    """An NVDIMM without labels, in fsdax mode, with a file system that holds the images to begin
    with.
    """
    content = scratch / 'pmem-content'
    content.mkdir()
    if template is not None:
        os.link(template, content / 'template.pcow')
    (content / 'chain').mkdir()
    for item in chain.iterdir():
        os.link(item, content / 'chain' / item.name)
    path, offset = _write_nvdimm(scratch, 'pmem', _POOL_SIZE)
    tool.run(
        '/sbin/mkfs.ext4',
        '-q',
        '-F',
        '-b',
        '4096',
        '-m',
        '0',
        '-E',
        f'offset={offset},lazy_itable_init=0,nodiscard',
        '-d',
        str(content),
        str(path),
        f'{(_POOL_SIZE - offset) // units.MIB}M',
    )
    shutil.rmtree(content)
    return _nvdimm(path, _POOL_SIZE)


def more_pools(scratch: Path, wanted: Collection[str]) -> tuple[str, ...]:
    """Those of KVM's tests that few scenarios want: XFS on another NVDIMM, ext4 on a disk.
    Arguments for QEMU.
    """
    arguments: tuple[str, ...] = ()
    if 'xfs' in wanted:
        path, offset = _write_nvdimm(scratch, 'xfs', _MORE_SIZE)
        content = scratch / 'xfs-content'
        content.unlink(missing_ok=True)
        tool.run('/usr/bin/env', *_MKFS_XFS, f'file,name={content},size={_MORE_SIZE - offset}')
        tool.run(
            '/bin/dd',
            f'if={content}',
            f'of={path}',
            'bs=1M',
            f'seek={offset // units.MIB}',
            'conv=sparse,notrunc',
            'status=none',
        )
        content.unlink()
        arguments += _nvdimm(path, _MORE_SIZE)
    if 'page-cache' in wanted:
        path = scratch / 'page-cache'
        path.unlink(missing_ok=True)
        tool.run(
            '/sbin/mkfs.ext4',
            '-q',
            '-F',
            '-b',
            '4096',
            '-m',
            '0',
            '-E',
            'lazy_itable_init=0,nodiscard',
            str(path),
            f'{_MORE_SIZE // units.MIB}M',
        )
        arguments += (
            '-blockdev',
            f'driver=raw,node-name=pool,file.driver=file,file.filename={path}',
            '-device',
            'virtio-blk-pci,drive=pool',
        )
    return arguments


def nvdimm_files(scratch: Path, count: int) -> list[Path]:
    return [scratch / f'nvdimm-{number}' for number in range(count)]


def labelled_nvdimms(
    scratch: Path, sizes: tuple[int, ...], caches: bool = False
) -> tuple[str, ...]:
    """NVDIMMs with a label area each, empty at first: region0, region1, ...

    :param caches: what leaves the caches is written to files of its own, which exist
        (:mod:`tests.vm.caches`)
    """
    arguments: list[str] = []
    for number, (path, size) in enumerate(
        zip(nvdimm_files(scratch, len(sizes)), sizes, strict=True)
    ):
        if not path.exists():
            with open(path, 'wb') as file:
                file.truncate(size + LABEL_SIZE)  # the label area is the end of it
        media = f',x-media={caches_module.media_of(path)}' if caches else ''
        arguments += [
            '-object',
            f'memory-backend-file,id=pmem{number},mem-path={path},'
            f'size={size + LABEL_SIZE},share=on',
            '-device',
            f'nvdimm,memdev=pmem{number},id=nvdimm{number},label-size={LABEL_SIZE}{media}',
        ]
    return tuple(arguments)
