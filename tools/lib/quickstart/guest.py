# SPDX-License-Identifier: Apache-2.0
"""The guest: Debian's root file system as qcow2, its cloud kernel and an initramfs; kept in the
cache, keyed by inputs.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import dataclasses
import fcntl
import hashlib
import os
from pathlib import Path

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units
from tools.lib.quickstart import apt
from tools.lib.quickstart import cpio
from tools.lib.quickstart import state
from tools.lib.quickstart import teardown

SUITE = 'bookworm'
ROOT_SIZE = units.GIB
MODULES = ('nfit', 'nd_pmem', 'ext4', 'xfs')
# of what is made here: raise it when the result changes
_VERSION = '1'
_FILES = Path(__file__).parent / 'guest'
_BUSYBOX = Path('/bin/busybox')
_INDEXES = (
    'modules.dep',
    'modules.alias',
    'modules.symbols',
    'modules.builtin',
    'modules.builtin.modinfo',
    'modules.order',
)


@dataclasses.dataclass(frozen=True)
class Guest:
    image: Path  # qcow2
    kernel: Path
    initrd: Path


def _key(*inputs: str | bytes) -> str:
    digest = hashlib.sha256()
    for item in (_VERSION, *inputs):
        data = item.encode() if isinstance(item, str) else item
        digest.update(len(data).to_bytes(8, 'little') + data)
    return digest.hexdigest()[:16]


class Cache:
    """Files and trees that are there completely or not at all, also after an interruption."""

    def __init__(self, run: state.Run) -> None:
        self.directory = Path(os.environ.get('PCOW_CACHE_DIR', '/var/cache/pcow')) / 'quickstart'
        self.work = self.directory / f'.part-{run.id}'
        self._run = run
        self.made: list[str] = []  # names that were not there before

    def get(self, name: str, make: Callable[[Path], None]) -> Path:
        """The entry ``name``; ``make`` writes it to the path that it is given if it is
        not there.
        """
        path = self.directory / name
        if path.exists():
            return path
        self.directory.mkdir(parents=True, exist_ok=True)
        with open(self.directory / '.lock', 'wb') as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another run makes it: wait and take that
            if not path.exists():
                self._run.note(self.work)
                self.work.mkdir(mode=0o755)
                part = self.work / 'result'
                make(part)
                part.rename(path)
                teardown.delete(self.work)
                self._run.forget(self.work)
                self.made.append(name)
        return path


def debootstrap(mirror: apt.Mirror, packages: tuple[str, ...], tree: Path) -> None:
    """Make Debian's minimum and some packages in a directory.

    :raises ToolFailed:
    """
    tree.mkdir(mode=0o755)
    environment = [f'{key}={value}' for key, value in apt.proxy_environment().items()]
    # In namespaces of its own, debootstrap leaves no mount and no process whenever it is ended.
    tool.run(
        '/usr/bin/env',
        *environment,
        'unshare',
        '--mount',
        '--pid',
        '--fork',
        '--kill-child',
        '--mount-proc',
        'debootstrap',
        '--variant=minbase',
        *([f'--include={",".join(packages)}'] if packages else []),
        *([f'--keyring={mirror.keyring}'] if mirror.keyring else []),
        SUITE,
        str(tree),
        mirror.uri,
    )
    for package in (tree / 'var/cache/apt/archives').glob('*.deb'):
        package.unlink()


def _make_root(mirror: apt.Mirror, packages: tuple[str, ...], part: Path) -> None:
    tree, raw = part.with_name('root'), part.with_name('root.raw')
    debootstrap(mirror, packages, tree)
    (tree / 'etc/hostname').write_text('pcow-guest\n')
    # No lazy initialization: the kernel would finish it in the background of every guest, in the
    # guest's own layer.
    tool.run(
        '/sbin/mkfs.ext4',
        '-q',
        '-b',
        '4096',
        '-m',
        '0',
        '-L',
        'pcow-root',
        '-d',
        str(tree),
        '-E',
        'lazy_itable_init=0,lazy_journal_init=0,nodiscard,root_owner=0:0',
        str(raw),
        f'{ROOT_SIZE // units.MIB}M',
    )
    tool.run(tool.find('qemu_img'), 'convert', '-f', 'raw', '-O', 'qcow2', str(raw), str(part))


def _make_kernel(name: str, version: str, part: Path) -> None:
    download = part.with_name('download')
    download.mkdir()
    tool.run('/usr/bin/dpkg-deb', '-x', str(apt.download(name, version, download)), str(part))


def _needed_modules(directory: Path, modules: tuple[str, ...]) -> set[str]:
    """Paths in ``directory`` of the modules that the guest needs; what the kernel has built in has
    none.
    """
    wanted = {f'{name}.ko' for name in modules}
    found: set[str] = set()
    for line in (directory / 'modules.dep').read_text().splitlines():
        path, _colon, needs = line.partition(':')
        if os.path.basename(path).split('.ko')[0] + '.ko' in wanted:
            found.update((path, *needs.split()))
    if not any('nfit' in path for path in found):
        raise exception.PcowError(
            reason=f'{directory} has no module nfit: this kernel cannot boot from an NVDIMM'
        )
    return found


def _program_files() -> dict[str, Path]:
    if not _BUSYBOX.exists():
        raise exception.PcowError(reason=f'{_BUSYBOX} is missing: install busybox-static')
    files = {
        ('' if path.name == 'init' else 'pcow/') + path.name: path
        for path in _FILES.iterdir()
        if path.is_file()
    }
    return files | {'pcow/busybox': _BUSYBOX}


def _module_files(tree: Path, modules: tuple[str, ...] = MODULES) -> dict[str, Path]:
    """What the archive needs of a kernel package: modules with what they depend on, and modprobe's
    indexes.
    """
    base = next(
        path
        for root in ('lib/modules', 'usr/lib/modules')
        if (tree / root).is_dir()
        for path in (tree / root).iterdir()
    )
    if not (base / 'modules.dep').exists():
        tool.run(str(_BUSYBOX), 'depmod', '-b', str(tree), base.name)
    names = [
        *_needed_modules(base, modules),
        *(name for name in _INDEXES if (base / name).exists()),
    ]
    return {f'lib/modules/{base.name}/{name}': base / name for name in names}


def _write_initrd(part: Path, user: bytes, files: dict[str, Path]) -> None:
    part.write_bytes(user + bytes(-len(user) % 4) + cpio.archive(files))


def prepare_kernel(
    cache: Cache, modules: tuple[str, ...], *package: str
) -> tuple[Path, dict[str, Path]]:
    """Debian's cloud kernel, and for an initramfs some of its modules with what they depend on.

    :param package: meta package of another kernel
    :returns: the kernel, and the modules as for :func:`cpio.archive`
    :raises ToolFailed:
    """
    name, version = apt.kernel_package(*package)
    tree = cache.get(
        f'kernel-{_key(name, version)}', lambda part: _make_kernel(name, version, part)
    )
    return next((tree / 'boot').glob('vmlinuz-*')), _module_files(tree, modules)


def prepare(
    run: state.Run,
    image: Path | None,
    kernel: Path | None,
    initrd: Path | None,
    packages: tuple[str, ...] = (),
    modules: tuple[str, ...] = (),
) -> tuple[Guest, Cache]:
    """Make the guest, or what the user did not bring of it.

    :param image: the user's qcow2
    :param kernel: the user's kernel; its modules are then those of ``initrd`` or built in
    :param packages: what the root file system has beyond Debian's minimum
    :param modules: of the kernel, beyond what a root on an NVDIMM needs; loaded if the command line
    has ``pcow.modules=A,B`` :raises ToolFailed:
    """
    cache = Cache(run)
    if image is None:
        mirror = apt.mirror(SUITE)
        image = cache.get(
            f'root-{_key(mirror.uri, SUITE, str(ROOT_SIZE), *packages)}.qcow2',
            lambda part: _make_root(mirror, packages, part),
        )
    files, user = _program_files(), b''
    if kernel is None:
        kernel, module_files = prepare_kernel(cache, MODULES + modules)
        files |= module_files
    elif initrd is not None:
        user = initrd.read_bytes()
    key = _key(user, *(item for path in sorted(files) for item in (path, files[path].read_bytes())))
    archive = cache.get(f'initrd-{key}', lambda part: _write_initrd(part, user, files))
    with contextlib.suppress(OSError):
        os.utime(image if image.parent == cache.directory else archive)
    return Guest(image, kernel, archive), cache
