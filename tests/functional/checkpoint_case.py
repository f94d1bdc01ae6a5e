# SPDX-License-Identifier: Apache-2.0
"""What the tests of checkpoints share: a QEMU without a guest whose RAM is an image, and an NVDIMM
on another one.
"""

from pathlib import Path
from typing import Any
from typing import TypeVar
from typing import overload

from tests.functional import images
from tests.functional import test_qemu_backend
from tests.functional import vm_state

SIZE = test_qemu_backend.SIZE
RAM_SIZE = '128M'


class Vm(vm_state.Vm):
    """With checkpoints in place of snapshots on a disk."""

    def save(self, tag: str) -> str:
        return self._said('pcow-checkpoint-create', tag)

    def load(self, tag: str) -> str:
        return self._said('pcow-checkpoint-revert', tag)

    def delete(self, tag: str) -> str:
        return self._said('pcow-checkpoint-delete', tag)

    def _said(self, command: str, name: str) -> str:
        """The error, '' if there was none."""
        self.begin_qmp(command, name=name)
        return str(self.end_qmp(command).get('error', {}).get('desc', ''))

    def checkpoints(self) -> dict[str, dict[str, Any]]:
        return {entry['name']: entry for entry in self.qmp('query-pcow-checkpoints')}

    def parts(self) -> dict[str, list[str]]:
        """Names of the snapshots of each image."""
        return {
            info['id']: sorted(snapshot['name'] for snapshot in info['snapshots'])
            for info in self.qmp('query-pcow')
        }


_Kind = TypeVar('_Kind', bound=Vm)


@overload
def start(directory: Path, ram: Path, image: Path, *more: str) -> Vm: ...
@overload
def start(directory: Path, ram: Path, image: Path, *more: str, kind: type[_Kind]) -> _Kind: ...
def start(directory: Path, ram: Path, image: Path, *more: str, kind: type[Vm] = Vm) -> Vm:
    return kind(
        directory,
        '-object',
        f'memory-backend-file,id=ram0,mem-path={ram},share=on,size={RAM_SIZE}',
        '-machine',
        'memory-backend=ram0',
        *test_qemu_backend.backend(image),
        *more,
    )


class CheckpointTestCase(test_qemu_backend.QemuTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.ram = self.directory / 'ram.pcow'
        vm_state.run('pcow-img', 'create', '-q', self.image, SIZE)
        vm_state.run('pcow-img', 'create', '-q', self.ram, RAM_SIZE)

    def start(self, *more: str) -> Vm:
        return start(self.directory, self.ram, self.image, *more)

    def make(self, path: Path, base: Path, name: str) -> None:
        """A new image on a snapshot of another one."""
        vm_state.run('pcow-img', 'create', '-q', '-b', base, '-o', f'base_snapshot={name}', path)

    def of(self, image: Path, number: int) -> Path:
        """The image of a child; it lies beside what it stands on."""
        return self.directory / f'child{number}-{image.name}'

    def fork(self, name: str, number: int, *more: str) -> Vm:
        """A child of checkpoint ``name``, which has not begun to run."""
        for image in (self.image, self.ram):
            self.make(self.of(image, number), image, name)
        return self.child(number, *more)

    def child(self, number: int, *more: str) -> Vm:
        sockets = self.directory / f'child{number}'
        sockets.mkdir(exist_ok=True)
        return start(sockets, self.of(self.ram, number), self.of(self.image, number), '-S', *more)

    def write(self, vm: vm_state.Vm, text: bytes) -> None:
        """To both images, which have to stay together."""
        for address in self.addresses(vm):
            vm.write(address, text)

    def assert_reads(self, vm: vm_state.Vm, text: bytes) -> None:
        self.assertEqual(
            [text] * 4, [vm.read(address, len(text)) for address in self.addresses(vm)]
        )

    def addresses(self, vm: vm_state.Vm) -> tuple[int, ...]:
        nvdimm = vm.address('nv0')
        return nvdimm, nvdimm + 9 * images.MIB, vm_state.RAM, vm_state.RAM + 9 * images.MIB

    def assert_files_clean(self) -> None:
        for path in (self.image, self.ram):
            vm_state.run('pcow-img', 'check', path)
