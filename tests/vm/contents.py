# SPDX-License-Identifier: Apache-2.0
"""What the outer machine is given: programs, images, NVDIMMs."""

from __future__ import annotations

import os
from pathlib import Path
import shutil
import uuid

from pcow_driver import dax
from pcow_driver import tool
from pcow_driver import units
from tests.vm import fsdax
from tests.vm import machine
from tests.vm import parts as parts_module
from tests.vm import tree

_POOL_SIZE = 2 * units.GIB                     # of the NVDIMM that holds the pool of KVM's tests
_REGION_SIZE = 2 * units.GIB                   # of each NVDIMM with labels
_LABEL_SIZE = 256 * units.KIB
_SUITE = Path('/suite')
_POOLS = {'tmpfs': Path('/pool'), 'pmem': Path('/pmem')}


def _place(accel: str, pool: Path, cpus: int) -> machine.Place:
    """Where the suite finds things inside."""
    return machine.Place(
        accel=accel, binaries=_SUITE / 'bin', kernel=_SUITE / 'kernel', initrd=_SUITE / 'initrd', guest=_SUITE / 'bin/guest',
        info_block=_SUITE / 'info-block', debian_initrd=_SUITE / 'debian-initrd', template=Path('/pmem/template.pcow'),
        chain=Path('/pmem/chain'), pool=pool, logs=Path('/tmp'), cpus=cpus)


def kvm_places(cpus: int) -> dict[str, machine.Place]:
    return {name: _place('kvm', pool, cpus) for name, pool in _POOLS.items()}


def fsdax_places() -> dict[str, machine.Place]:
    return {kind: _place('none', Path('/fs') / kind, 0) for kind in fsdax.REGIONS}


def kvm_tree(directory: Path, parts: parts_module.Parts, binaries: Path) -> tree.Tree:
    made = tree.Tree(directory)
    for name in ('qemu-system-x86_64', 'pcow-img', 'pcow-io'):
        made.add_program(binaries / name, f'/suite/bin/{name}')
    made.add_programs(('env', 'mount', 'umount'))
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
    for name in ('pcow-img', 'pcow-io', 'pcow-bench'):
        made.add_program(binaries / name, f'/suite/bin/{name}')
    for name in fsdax.UNIT_TESTS:
        made.add_program(tests / 'unit/libpcow' / name, f'/suite/bin/{name}')
    made.add_program(tests / 'vm/outer/dax_stores', '/suite/bin/dax_stores')
    made.add_programs(('env', 'mount', 'umount', 'ndctl', 'mkfs.ext4', 'mkfs.xfs'))
    made.add(Path('/etc/passwd'), '/etc/passwd')                # a test names it as a base
    for kind in fsdax.REGIONS:
        (made.directory / 'fs' / kind).mkdir(parents=True)
    made.add_python()
    made.add_tests()
    return made


def pool_nvdimm(scratch: Path, template: Path | None, chain: Path) -> tuple[str, ...]:
    """An NVDIMM without labels, in fsdax mode, with a file system that holds the images to begin with."""
    path, content = scratch / 'pmem', scratch / 'pmem-content'
    content.mkdir()
    if template is not None:
        os.link(template, content / 'template.pcow')
    (content / 'chain').mkdir()
    for item in chain.iterdir():
        os.link(item, content / 'chain' / item.name)
    with open(path, 'wb') as file:
        file.truncate(_POOL_SIZE)
        file.seek(dax.BLOCK_OFFSET)
        file.write(dax.info_block(_POOL_SIZE, dax.PageMap.RAM, uuid.uuid4()))
    offset = dax.data_offset(_POOL_SIZE, dax.PageMap.RAM)
    tool.run('/sbin/mkfs.ext4', '-q', '-F', '-b', '4096', '-m', '0', '-E', f'offset={offset},lazy_itable_init=0,nodiscard',
             '-d', str(content), str(path), f'{(_POOL_SIZE - offset) // units.MIB}M')
    shutil.rmtree(content)
    return ('-object', f'memory-backend-file,id=pmem,mem-path={path},size={_POOL_SIZE},share=on', '-device', 'nvdimm,memdev=pmem')


def labelled_nvdimms(scratch: Path) -> tuple[str, ...]:
    """An empty NVDIMM with a label area for each kind of file system."""
    arguments: list[str] = []
    for number, kind in enumerate(fsdax.REGIONS):
        path = scratch / f'nvdimm-{kind}'
        with open(path, 'wb') as file:
            file.truncate(_REGION_SIZE + _LABEL_SIZE)     # the label area is the end of it
        arguments += ['-object', f'memory-backend-file,id=pmem{number},mem-path={path},size={_REGION_SIZE + _LABEL_SIZE},share=on',
                      '-device', f'nvdimm,memdev=pmem{number},id=nvdimm{number},label-size={_LABEL_SIZE}']
    return tuple(arguments)
