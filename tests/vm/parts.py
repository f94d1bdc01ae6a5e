# SPDX-License-Identifier: Apache-2.0
"""What the machines are made of: the kernel and the Debian guest of the quickstart, and the test
guest.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
import uuid

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.images import info_block
from tests.vm import chain
from tests.vm import debian
from tests.vm import kernels
from tools.lib.quickstart import apt
from tools.lib.quickstart import cpio
from tools.lib.quickstart import guest as quickstart_guest
from tools.lib.quickstart import state

_SOURCES = Path(__file__).parent / 'guest'
_CFLAGS = ('-std=gnu11', '-static', '-O2', '-Wall', '-Wextra', '-Werror', '-pthread')
TEST_MODULES = (
    'virtio_pci',
    'virtio_console',
    'virtio_blk',
    'virtio_net',
    'af_packet',
    'vmw_vsock_virtio_transport',
    'nfit',
    'virtio_pmem',
    'nd_pmem',
    'dax_pmem',
    'device_dax',
)
_DEVDAX_SIGNATURE = b'NVDIMM_DAX_INFO\0'
_CHECKSUM_SIZE = 8


@dataclasses.dataclass(frozen=True)
class Parts:
    kernel: Path
    modules: Path  # directory of the kernel's modules, with modules.dep
    image: Path  # Debian's root file system, qcow2
    debian_initrd: Path
    guest: Path  # the test guest's program, which needs no library
    initrd: Path  # of the test guest
    info_block: Path


def modules_in_order(
    directory: Path, names: tuple[str, ...], optional: tuple[str, ...] = ()
) -> list[Path]:
    """Modules with those that they need, each after what it needs; what the kernel has built in is
    left out.

    :param optional: those of ``names`` that some kernels have not
    :raises PcowError: a module is not there
    """
    needs: dict[str, list[str]] = {}
    for line in (directory / 'modules.dep').read_text().splitlines():
        path, _colon, others = line.partition(':')
        needs[path] = others.split()
    builtin = {Path(line).name for line in (directory / 'modules.builtin').read_text().splitlines()}
    found: list[str] = []
    for name in names:
        if f'{name.replace("_", "-")}.ko' in builtin or f'{name}.ko' in builtin:
            continue
        match = next(
            (
                item
                for item in needs
                if Path(item).name in (f'{name}.ko', f'{name.replace("_", "-")}.ko')
            ),
            None,
        )
        if match is None:
            if name in optional:
                continue
            raise exception.PcowError(
                reason=f'{directory} has no module {name}: this kernel cannot run the tests'
            )
        found += [item for item in (*reversed(needs[match]), match) if item not in found]
    return [directory / item for item in found]


def devdax_block(size: int) -> bytes:
    """Info block that makes an NVDIMM without labels a character device /dev/dax0.0 in the guest.

    It differs from the one that pcow_driver.images.info_block makes for file systems by its name
    only.
    """
    block = info_block.info_block(
        size, info_block.PageMap.RAM, uuid.UUID(int=0x7063_6F77_0000_4000_8000_0000_0000_0001)
    )
    body = (_DEVDAX_SIGNATURE + block[len(_DEVDAX_SIGNATURE) :])[:-_CHECKSUM_SIZE]
    return body + info_block.fletcher64(body + bytes(_CHECKSUM_SIZE)).to_bytes(
        _CHECKSUM_SIZE, 'little'
    )


def compile_guest(target: Path) -> None:
    """:raises ToolFailed:"""
    sources = sorted(str(path) for path in _SOURCES.glob('*.c'))
    tool.run('/usr/bin/env', os.environ.get('CC', 'cc'), *_CFLAGS, '-o', str(target), *sources)


def udev(run: state.Run) -> Path:
    """Debian's package udev, unpacked: systemd finds file systems by their UUID with it.

    :raises PcowError:
    """
    version = apt.version('udev')

    def unpack(part: Path) -> None:
        download = part.with_name('download')
        download.mkdir()
        tool.run('/usr/bin/dpkg-deb', '-x', str(apt.download('udev', version, download)), str(part))

    return quickstart_guest.Cache(run).get(f'udev-{version}', unpack)


def _modules_of(kernel: Path) -> Path:
    return next((kernel.parents[1] / 'lib/modules').iterdir())


def _write_initrd(path: Path, program: Path, modules: Path) -> None:
    """Of the test guest."""
    files = {'init': program}
    for number, module in enumerate(modules_in_order(modules, TEST_MODULES)):
        files[f'modules/{number:02}-{module.name}'] = module
    path.write_bytes(cpio.archive(files))


def with_kernel(run: state.Run, parts: Parts, package: str) -> Parts:
    """The same with another kernel of Debian, outside and in test guests.

    :raises PcowError:
    """
    kernel, _files = quickstart_guest.prepare_kernel(
        quickstart_guest.Cache(run), quickstart_guest.MODULES, package
    )
    modules, initrd = _modules_of(kernel), run.directory / f'{package}.initrd'
    _write_initrd(initrd, parts.guest, modules)
    return dataclasses.replace(parts, kernel=kernel, modules=modules, initrd=initrd)


def with_host_kernel(run: state.Run, parts: Parts, suite: str, package: str) -> Parts:
    """The same with the kernel of another suite of Debian; for the outer machine, as the guests'
    modules are those of before.

    :raises PcowError:
    """
    tree = kernels.prepare(run, suite, package)
    return dataclasses.replace(
        parts, kernel=kernels.kernel_of(tree), modules=kernels.modules_of(tree)
    )


def prepare(run: state.Run) -> Parts:
    """Make what is not in the cache, in the run's directory.

    :raises PcowError:
    """
    guest, _cache = quickstart_guest.prepare(run, None, None, None, modules=debian.MODULES)
    modules = _modules_of(guest.kernel)
    program, initrd, block = (
        run.directory / name for name in ('guest', 'guest.initrd', 'info-block')
    )
    compile_guest(program)
    _write_initrd(initrd, program, modules)
    block.write_bytes(devdax_block(chain.SIZE))
    return Parts(
        kernel=guest.kernel,
        modules=modules,
        image=guest.image,
        debian_initrd=guest.initrd,
        guest=program,
        initrd=initrd,
        info_block=block,
    )
