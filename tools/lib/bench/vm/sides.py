# SPDX-License-Identifier: Apache-2.0
"""The sides that are compared: checkpoints of pcow, and what QEMU has without it.

======== ========================================= ===============================================
side     where RAM is                              how its state is kept
======== ========================================= ===============================================
pcow     an image                                  pcow-checkpoint-create
savevm   memory of QEMU                            savevm, in the qcow2 disk
mapped   memory of QEMU                            migrated to a file, each page at its own place
                                                   (mapped-ram)
shared   a file                                    the devices are migrated to a file, RAM stays
                                                   where it is (x-ignore-shared): a restart, no
                                                   checkpoint
======== ========================================= ===============================================
"""

from __future__ import annotations

import abc
import dataclasses
from pathlib import Path
import time

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.copies import fork
from pcow_driver.images import image
from tools.lib.bench.guest import console
from tools.lib.bench.guest import disks
from tools.lib.quickstart import guest as quickstart_guest

MODULES = ('virtio_pci', 'virtio_blk')
_NAME = 'bench'
_MS = 1e-6  # of a nanosecond
_LOOKS = 0.0005  # seconds
_MIGRATION_SECONDS = 600.0


@dataclasses.dataclass(frozen=True)
class Case:
    memory: int  # MiB of RAM
    dirty: int  # MiB that the guest writes to before each checkpoint


class Side(abc.ABC):
    """A VM that runs, and what it has taken of the pool."""

    title: str
    words = ''  # for the guest's kernel
    files: tuple[Path, ...]  # what it stores to

    def __init__(self, directory: Path, guest: quickstart_guest.Guest, case: Case) -> None:
        self.directory, self.case = directory, case
        self._guest = guest
        directory.mkdir()

    def start(self, *more: str, files: tuple[Path, ...] = (), name: str = 'vm') -> console.Guest:
        """It does not run yet: a context manager.

        :param files: rather than those of this side; none: those
        """
        place = self.directory / name
        place.mkdir(exist_ok=True)
        return console.Guest(
            [
                tool.find('emulator', build_first=True),
                *('-name', f'guest=bench-{name}', '-nodefaults', '-no-user-config'),
                *('-display', 'none', '-accel', 'tcg', '-cpu', 'max'),
                *('-machine', 'q35,nvdimm=on,hpet=off,memory-backend=ram'),
                *('-m', f'{self.case.memory}M,slots=2,maxmem=70G'),
                *('-kernel', str(self._guest.kernel), '-initrd', str(self._guest.initrd)),
                '-append',
                'console=ttyS0 quiet panic=-1 rw no_timer_check tsc=reliable pcow.init=shell '
                f'pcow.modules={",".join(MODULES)}{self.words}',
                *self.devices(files),
                *more,
            ],
            place,
        )

    @abc.abstractmethod
    def devices(self, files: tuple[Path, ...]) -> list[str]:
        """Arguments of QEMU."""

    @abc.abstractmethod
    def checkpoint(self, vm: console.Guest) -> dict[str, float]:
        """ms that the guest stood, and until it was kept; bytes of it."""

    @abc.abstractmethod
    def restart(self) -> console.Guest:
        """A QEMU that goes on from the checkpoint, and has been entered."""

    @abc.abstractmethod
    def delete(self, vm: console.Guest) -> None:
        """The checkpoint."""


class InPlace(Side):
    """It goes back in the same process."""

    @abc.abstractmethod
    def revert(self, vm: console.Guest) -> None: ...


class Pcow(InPlace):
    title = 'pcow'

    def __init__(
        self, directory: Path, guest: quickstart_guest.Guest, case: Case, base: Path
    ) -> None:
        super().__init__(directory, guest, case)
        self.base = base
        self.files = (
            base.parent / f'{directory.name}.pcow',
            base.parent / f'{directory.name}.ram.pcow',
        )
        image.create_overlay(str(self.files[0]), str(base))
        image.create(str(self.files[1]), case.memory * units.MIB)

    def devices(self, files: tuple[Path, ...]) -> list[str]:
        root, ram = files or self.files
        return [
            '-object',
            f'memory-backend-file,id=ram,mem-path={ram},share=on,size={self.case.memory}M',
            *disks.nvdimm('root', root, image.info(str(self.base)).virtual_size),
        ]

    def checkpoint(self, vm: console.Guest) -> dict[str, float]:
        said = vm.qmp('pcow-checkpoint-create', {'name': _NAME})
        return {
            'pause': said['pause'] * _MS,
            'durable': said['durable'] * _MS,
            'bytes': float(said['state-size']),
        }

    def revert(self, vm: console.Guest) -> None:
        vm.qmp('pcow-checkpoint-revert', {'name': _NAME})

    def delete(self, vm: console.Guest) -> None:
        vm.qmp('pcow-checkpoint-delete', {'name': _NAME})

    def restart(self) -> console.Guest:
        vm = self.start('-S').__enter__()
        self.revert(vm)
        vm.qmp('cont', {})
        return vm

    def fork_images(self, name: str) -> tuple[Path, ...]:
        """Those of a child, on the checkpoint."""
        files = tuple(path.parent / f'{name}-{path.name}' for path in self.files)
        for child, path in zip(files, self.files, strict=True):
            image.create_overlay(
                str(child), str(path), base_snapshot=_NAME, cluster_size=fork.VM_CLUSTER_SIZE
            )
        return files

    def fork(self, name: str, files: tuple[Path, ...]) -> console.Guest:
        """A child that runs, and has been entered."""
        vm = self.start('-S', files=files, name=name).__enter__()
        try:
            vm.qmp('pcow-checkpoint-revert', {})
            vm.qmp('cont', {})
        except BaseException:
            vm.__exit__(None, None, None)
            raise
        return vm


class _Disk(Side):
    """Of QEMU without pcow: its root is on qcow2."""

    words = ' pcow.disk=/dev/vda'

    def __init__(self, directory: Path, guest: quickstart_guest.Guest, case: Case) -> None:
        super().__init__(directory, guest, case)
        self.disk = directory / 'top.qcow2'
        self.files = (self.disk,)
        options = ('-q', '-f', 'qcow2', '-F', 'qcow2', '-b', str(guest.image), str(self.disk))
        tool.run(tool.find('qemu_img'), 'create', *options)

    def devices(self, files: tuple[Path, ...]) -> list[str]:
        return [
            *self.memory(),
            *('-drive', f'if=none,id=root,file={self.disk},format=qcow2'),
            *('-device', 'virtio-blk-pci,drive=root'),
        ]

    def memory(self) -> tuple[str, ...]:
        return ('-object', f'memory-backend-memfd,id=ram,share=on,size={self.case.memory}M')


class Savevm(_Disk, InPlace):
    title = 'savevm'

    def _monitor(self, vm: console.Guest, line: str) -> None:
        said = vm.qmp('human-monitor-command', {'command-line': line})
        if said:
            raise exception.PcowError(reason=f'{line}: {said}')

    def checkpoint(self, vm: console.Guest) -> dict[str, float]:
        begun = time.monotonic()
        self._monitor(vm, f'savevm {_NAME}')
        took = (time.monotonic() - begun) * 1e3
        (kept,) = (
            snapshot['vm-state-size']
            for node in vm.qmp('query-named-block-nodes', {})
            for snapshot in node['image'].get('snapshots', ())
            if snapshot['name'] == _NAME
        )
        return {'pause': took, 'durable': took, 'bytes': float(kept)}

    def revert(self, vm: console.Guest) -> None:
        self._monitor(vm, f'loadvm {_NAME}')

    def delete(self, vm: console.Guest) -> None:
        self._monitor(vm, f'delvm {_NAME}')

    def restart(self) -> console.Guest:
        return self.start('-loadvm', _NAME).__enter__()


class _Migrated(_Disk):
    """Migrated to a file; the disk is of the same moment by an internal snapshot."""

    capability: str

    def __init__(self, directory: Path, guest: quickstart_guest.Guest, case: Case) -> None:
        super().__init__(directory, guest, case)
        self.state = directory / 'state'
        self.files = (*self.files, self.state)

    def _allow(self, vm: console.Guest) -> None:
        capabilities = [{'capability': self.capability, 'state': True}]
        vm.qmp('migrate-set-capabilities', {'capabilities': capabilities})

    def _wait(self, vm: console.Guest) -> None:
        limit = time.monotonic() + _MIGRATION_SECONDS
        while time.monotonic() < limit:
            status = vm.qmp('query-migrate', {}).get('status')
            if status == 'completed':
                return
            if status in ('failed', 'cancelled'):
                break
            time.sleep(_LOOKS)
        raise exception.PcowError(reason=f'the state of {self.directory.name}: {status}')

    def checkpoint(self, vm: console.Guest) -> dict[str, float]:
        self._allow(vm)
        begun = time.monotonic()
        vm.qmp('stop', {})
        vm.qmp('blockdev-snapshot-internal-sync', {'device': 'root', 'name': _NAME})
        vm.qmp('migrate', {'uri': f'file:{self.state}'})
        self._wait(vm)
        self.go_on(vm)
        took = (time.monotonic() - begun) * 1e3
        return {'pause': took, 'durable': took, 'bytes': float(self.state.stat().st_blocks * 512)}

    def go_on(self, vm: console.Guest) -> None:
        """The guest that was migrated to a file runs on."""
        vm.qmp('cont', {})

    def restart(self) -> console.Guest:
        tool.run(tool.find('qemu_img'), 'snapshot', '-a', _NAME, str(self.disk))
        vm = self.start('-incoming', 'defer').__enter__()
        self._allow(vm)
        vm.qmp('migrate-incoming', {'uri': f'file:{self.state}'})
        self._wait(vm)
        vm.qmp('cont', {})
        return vm

    def delete(self, vm: console.Guest) -> None:
        vm.qmp('blockdev-snapshot-delete-internal-sync', {'device': 'root', 'name': _NAME})
        self.state.unlink()


class MappedRam(_Migrated):
    title = 'mapped-ram'
    capability = 'mapped-ram'


class IgnoreShared(_Migrated):
    title = 'x-ignore-shared'
    capability = 'x-ignore-shared'

    def __init__(self, directory: Path, guest: quickstart_guest.Guest, case: Case) -> None:
        super().__init__(directory, guest, case)
        self.ram = directory / 'ram'
        self.files = (*self.files, self.ram)

    def memory(self) -> tuple[str, ...]:
        return (
            '-object',
            f'memory-backend-file,id=ram,mem-path={self.ram},share=on,size={self.case.memory}M',
        )

    def go_on(self, vm: console.Guest) -> None:
        """It may not: what it stored would be in the RAM that is kept."""
