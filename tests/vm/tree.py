# SPDX-License-Identifier: Apache-2.0
"""The root file system of the outer machine: programs of this machine with their libraries, and the tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
import re
import shutil

from pcow_driver import exception
from pcow_driver import tool
from pcow_driver import units

_TOP = Path(__file__).resolve().parents[2]
_PYTHON = Path('/usr/bin/python3')
_PACKAGES = ('collections', 'encodings', 'importlib', 'json', 're', 'urllib', 'lib-dynload')
_FIRMWARE = ('bios-256k.bin', 'linuxboot_dma.bin', 'kvmvapic.bin')
_FIRMWARE_DIRECTORIES = (Path('/usr/share/qemu'), Path('/usr/share/seabios'))
_LIBRARY = re.compile(r'(?:=> )?(/\S+) \(0x[0-9a-f]+\)')
_EMPTY = ('dev', 'proc', 'sys', 'run', 'tmp', 'pool', 'pmem')
_ROOM = 1.3                                    # of the file system for what it needs itself


class Tree:
    """A directory that becomes an ext4 image."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        for name in _EMPTY:
            (directory / name).mkdir()

    def add(self, source: Path, target: str) -> None:
        """:raises OSError:"""
        path = self.directory / target.lstrip('/')
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, path)             # with its time: compiled Python counts on it

    def add_program(self, source: Path, target: str) -> None:
        """A program with the shared libraries that it loads.

        :raises ToolFailed: it is not one
        """
        self.add(source, target)
        for match in _LIBRARY.finditer(tool.run('/usr/bin/ldd', str(source))):
            if not (self.directory / match[1].lstrip('/')).exists():
                self.add(Path(match[1]), match[1])

    def add_programs(self, names: Iterable[str]) -> None:
        """Programs of this machine's PATH.

        :raises PcowError: one is not installed
        """
        for name in names:
            found = shutil.which(name, path='/usr/sbin:/usr/bin:/sbin:/bin')
            if found is None:
                raise exception.PcowError(reason=f'{name} is missing: tools/vm-test installs it when it is run as root')
            self.add_program(Path(found).resolve(), f'/usr/bin/{name}')

    def add_firmware(self) -> None:
        """What QEMU needs to boot a kernel.

        :raises PcowError: it is not installed
        """
        for name in _FIRMWARE:
            found = next((path for place in _FIRMWARE_DIRECTORIES if (path := place / name).exists()), None)
            if found is None:
                raise exception.PcowError(reason=f'{name} is missing: install qemu-system-data and seabios')
            self.add(found, f'/usr/share/qemu/{name}')

    def add_python(self) -> None:
        """Python with as much of its library as the tests use."""
        interpreter = _PYTHON.resolve()
        self.add_program(interpreter, '/usr/bin/python3')
        library = Path('/usr/lib') / interpreter.name
        for path in (*library.glob('*.py'), *(library / '__pycache__').glob('*.pyc')):
            self.add(path, str(path))
        for name in _PACKAGES:
            shutil.copytree(library / name, self.directory / str(library).lstrip('/') / name, symlinks=True)

    def add_tests(self) -> None:
        """The modules that run inside."""
        for name in ('__init__', 'functional/__init__', 'functional/qmp', 'vm/__init__', 'vm/chain', 'vm/fsdax', 'vm/journal',
                     'vm/machine', 'vm/scenarios', 'vm/suite'):
            self.add(_TOP / 'tests' / f'{name}.py', f'/suite/tests/{name}.py')

    def make_image(self, path: Path) -> None:
        """:raises ToolFailed:"""
        used = sum(item.lstat().st_size for item in self.directory.rglob('*'))
        size = units.round_up(int(used * _ROOM) + 16 * units.MIB, units.MIB)
        tool.run('/sbin/mkfs.ext4', '-q', '-F', '-b', '4096', '-m', '0', '-O', '^has_journal', '-d', str(self.directory), str(path),
                 f'{size // units.MIB}M')
        shutil.rmtree(self.directory)
