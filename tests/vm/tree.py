# SPDX-License-Identifier: Apache-2.0
"""The root file system of the outer machine: programs of this machine with their libraries, and the
tests.
"""

from __future__ import annotations

from collections.abc import Iterable
import compileall
import contextlib
from importlib import metadata
from pathlib import Path
import py_compile
import re
import shutil

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units
from tools.lib.quickstart import cpio

TOP = Path(__file__).resolve().parents[2]
_PYTHON = Path('/usr/bin/python3')
_PACKAGES = ('collections', 'encodings', 'importlib', 'json', 're', 'urllib', 'lib-dynload')
_NOT_NEEDED = (
    '__pycache__',
    'ensurepip',
    'idlelib',
    'lib2to3',
    'pydoc_data',
    'test',
    'tkinter',
    'turtledemo',
    'venv',
)
_LIBVIRT = Path('/usr/lib/libvirt')
_DRIVERS = Path('/usr/lib/x86_64-linux-gnu/libvirt/connection-driver')
_CPU_MAP = Path('/usr/share/libvirt/cpu_map')
_NBDKIT = Path('/usr/lib/x86_64-linux-gnu/nbdkit')
_SYSTEMD = Path('/lib/systemd')
_UNITS = (
    'basic.target',
    'final.target',
    'local-fs.target',
    'local-fs-pre.target',
    'multi-user.target',
    'paths.target',
    'shutdown.target',
    'slices.target',
    'sockets.target',
    'swap.target',
    'sysinit.target',
    'timers.target',
    'umount.target',
)
_FIRMWARE = ('bios-256k.bin', 'linuxboot_dma.bin', 'kvmvapic.bin')
_FIRMWARE_DIRECTORIES = (Path('/usr/share/qemu'), Path('/usr/share/seabios'))
_LIBRARY = re.compile(r'(?:=> )?(/\S+) \(0x[0-9a-f]+\)')
_EMPTY = (
    'dev',
    'proc',
    'sys',
    'run',
    'tmp',
    'pool',
    'pmem',
    'var/lib',
    'var/tmp',
    'etc/systemd/system',
)
_ROOM = 1.3  # of the file system for what it needs itself


def _needed(name: str, found: dict[str, metadata.Distribution]) -> dict[str, metadata.Distribution]:
    """An installed package and all that it needs, by name."""
    key = re.sub(r'[-_.]+', '-', name).lower()
    if key not in found:
        found[key] = metadata.distribution(name)
        for requirement in found[key].requires or ():
            wanted, _semicolon, marker = requirement.partition(';')
            other = re.match(r'[A-Za-z0-9._-]+', wanted)
            if other and 'extra' not in marker:
                # one for other systems or other versions of Python is not installed
                with contextlib.suppress(metadata.PackageNotFoundError):
                    _needed(other[0], found)
    return found


def _unpacked(directory: Path, name: str) -> Path:
    """A file of a package, wherever this Debian has it since / and /usr are one."""
    return next(path for root in ('', 'usr') if (path := directory / root / name).exists())


class Tree:
    """A directory that becomes an ext4 image."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        for name in _EMPTY:
            (directory / name).mkdir(parents=True)

    def add(self, source: Path, target: str) -> None:
        """:raises OSError:"""
        path = self.directory / target.lstrip('/')
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, path)  # with its time: compiled Python counts on it

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
                raise exception.PcowError(
                    reason=f'{name} is missing: tools/vm-test installs it when it is run as root'
                )
            self.add_program(Path(found).resolve(), f'/usr/bin/{name}')

    def add_firmware(self) -> None:
        """What QEMU needs to boot a kernel.

        :raises PcowError: it is not installed
        """
        for name in _FIRMWARE:
            found = next(
                (path for place in _FIRMWARE_DIRECTORIES if (path := place / name).exists()), None
            )
            if found is None:
                raise exception.PcowError(
                    reason=f'{name} is missing: install qemu-system-data and seabios'
                )
            self.add(found, f'/usr/share/qemu/{name}')

    def add_python(self) -> None:
        """Python with as much of its library as the tests use."""
        interpreter = _PYTHON.resolve()
        self.add_program(interpreter, '/usr/bin/python3')
        library = Path('/usr/lib') / interpreter.name
        for path in (*library.glob('*.py'), *(library / '__pycache__').glob('*.pyc')):
            self.add(path, str(path))
        for name in _PACKAGES:
            shutil.copytree(
                library / name, self.directory / str(library).lstrip('/') / name, symlinks=True
            )

    def add_packages(self, name: str) -> None:
        """A package of Python with those that it needs, as they are installed, and Python's whole
        library.

        :raises PackageNotFoundError: it was not installed: run tools/build
        """
        library = Path('/usr/lib') / _PYTHON.resolve().name
        for path in library.iterdir():
            target = self.directory / str(path).lstrip('/')
            if path.is_dir() and path.name not in _NOT_NEEDED and not target.exists():
                shutil.copytree(path, target, symlinks=True)
        for path in (library / 'lib-dynload').glob('*.so'):
            self.add_program(path, str(path))
        for distribution in _needed(name, {}).values():
            for file in distribution.files or ():
                path = Path(str(file.locate()))
                editable = file.name.startswith('__editable__')
                if (
                    path.exists()
                    and not editable
                    and '..' not in file.parts
                    and 'tests' not in file.parts
                ):
                    self.add(path, f'/suite/site/{file}')
                    if path.suffix == '.so':
                        self.add_program(path, f'/suite/site/{file}')

    def add_pcowctl(self) -> None:
        """pcow_driver of this checkout with the packages that it needs."""
        self.add_packages('pcow')
        shutil.copytree(
            TOP / 'pcow_driver',
            self.directory / 'suite/pcow_driver',
            ignore=shutil.ignore_patterns('__pycache__'),
        )
        # in an emulator it would take long, and be done anew every time
        compileall.compile_dir(
            str(self.directory / 'suite/pcow_driver'),
            quiet=1,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )

    def add_libvirt(self) -> None:
        """libvirt's parts beside its programs, its users, and AppArmor's profiles of
        this machine.
        """
        for name in ('passwd', 'group', 'nsswitch.conf'):
            self.add(Path('/etc') / name, f'/etc/{name}')
        for name in ('apparmor.d', 'libvirt'):
            shutil.copytree(Path('/etc') / name, self.directory / 'etc' / name, symlinks=True)
        programs = [path for path in _LIBVIRT.iterdir() if path.suffix != '.sh']
        for path in (
            *programs,
            _DRIVERS / 'libvirt_driver_qemu.so',
            _NBDKIT / 'filters/nbdkit-offset-filter.so',
        ):
            self.add_program(path, str(path))
        shutil.copytree(_CPU_MAP, self.directory / str(_CPU_MAP).lstrip('/'))
        (self.directory / 'var/run').symlink_to('/run')
        # where libvirtd's profile knows it
        for name in ('libvirtd', 'apparmor_parser'):
            shutil.move(self.directory / 'usr/bin' / name, self._made('usr/sbin') / name)
        (self.directory / 'sbin').symlink_to('usr/sbin')

    def _made(self, name: str) -> Path:
        path = self.directory / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def add_systemd(self, udev: Path, *units: str) -> None:
        """The init system of this machine, as far as it takes to mount file systems at boot.

        :param udev: where Debian's package udev was unpacked
        :param units: of systemd, beside those that it needs for that
        """
        for name in ('bin', 'sbin'):
            if not (self.directory / name).is_symlink():
                (self.directory / name).symlink_to('usr/bin')
        for name in ('systemd', 'systemd-shutdown'):
            self.add_program(_SYSTEMD / name, str(_SYSTEMD / name))
        self.add_program(_unpacked(udev, 'bin/udevadm'), '/usr/bin/udevadm')
        (self.directory / str(_SYSTEMD / 'systemd-udevd').lstrip('/')).symlink_to(
            '/usr/bin/udevadm'
        )
        for item in (*_UNITS, *units):
            shutil.copy2(_SYSTEMD / 'system' / item, self._units() / item)
        shutil.copytree(
            _unpacked(udev, 'lib/systemd/system'), self._units(), symlinks=True, dirs_exist_ok=True
        )
        shutil.copytree(_unpacked(udev, 'lib/udev/rules.d'), self.directory / 'lib/udev/rules.d')
        (self.directory / 'etc/machine-id').write_text('7063' * 8 + '\n')

    def _units(self) -> Path:
        path = self.directory / str(_SYSTEMD / 'system').lstrip('/')
        path.mkdir(parents=True, exist_ok=True)
        return path

    def add_initrd(self, target: str, script: Path, modules: Iterable[Path]) -> None:
        """An initramfs of busybox, a script as its init, and modules that it loads in
        this order.
        """
        files = {'init': script, 'bin/busybox': Path('/bin/busybox')}
        for number, path in enumerate(modules):
            files[f'modules/{number:02}-{path.name}'] = path
        (self.directory / target.lstrip('/')).write_bytes(cpio.archive(files))

    def add_tests(self, *more: str) -> None:
        """The modules that run inside."""
        for name in (
            '__init__',
            'functional/__init__',
            'functional/qmp',
            'vm/__init__',
            'vm/chain',
            'vm/checkpoints',
            'vm/debian',
            'vm/failing',
            'vm/fsdax',
            'vm/full',
            'vm/journal',
            'vm/lose',
            'vm/machine',
            'vm/media',
            'vm/migration',
            'vm/net',
            'vm/power',
            'vm/ram',
            'vm/reflink',
            'vm/scenarios',
            'vm/silence',
            'vm/space',
            'vm/suite',
            'vm/vsock',
            *more,
        ):
            self.add(TOP / 'tests' / f'{name}.py', f'/suite/tests/{name}.py')

    def make_image(self, path: Path, room: int = 0) -> None:
        """:param room: bytes for what is written to it; it gets a journal then
        :raises ToolFailed:
        """
        used = sum(item.lstat().st_size for item in self.directory.rglob('*'))
        size = units.round_up(int(used * _ROOM) + 16 * units.MIB + room, units.MIB)
        tool.run(
            '/sbin/mkfs.ext4',
            '-q',
            '-F',
            '-b',
            '4096',
            '-m',
            '0',
            *(() if room else ('-O', '^has_journal')),
            '-E',
            'lazy_itable_init=0',
            '-d',
            str(self.directory),
            str(path),
            f'{size // units.MIB}M',
        )
        shutil.rmtree(self.directory)
