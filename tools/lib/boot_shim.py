# SPDX-License-Identifier: Apache-2.0
"""The boot shim: Debian's cloud kernel, and an initramfs with our two programs and a few modules.

python3 -m tools.lib.boot_shim PROGRAMS DIRECTORY: PROGRAMS has pcow-boot-shim and pcow-first-init;
DIRECTORY gets kernel, initrd and version.
"""

from __future__ import annotations

import lzma
import os
from pathlib import Path
import shutil
import subprocess
import sys
import tempfile

from tools.lib.quickstart import apt
from tools.lib.quickstart import cpio

_CACHE = Path(os.environ.get('PCOW_CACHE_DIR', '/var/cache/pcow')) / 'boot-shim'
# raise it when what is kept in the cache changes
_VERSION = '1'
# loaded in most guests
_MODULES = ('nfit', 'nd_pmem', 'virtio_pci', 'virtio_pmem', 'vfat', 'nls_cp437', 'nls_ascii')
# Compressed, as only guests with such a file system wait for it. ext4 is in the kernel.
_FILE_SYSTEMS = ('xfs', 'btrfs')
_NEEDED = ('nfit', 'nd_pmem', 'vfat', 'xfs')


def _name(path: str) -> str:
    return os.path.basename(path).split('.ko')[0].replace('-', '_')


def _closure(dependencies: dict[str, list[str]], names: tuple[str, ...]) -> set[str]:
    wanted = {name.replace('-', '_') for name in names}
    found: set[str] = set()
    for path, needs in dependencies.items():
        if _name(path) in wanted:
            found.update((path, *needs))
    return found


def _read_dependencies(base: Path) -> dict[str, list[str]]:
    """Of each module's path those that it needs, what is needed last first."""
    found = {}
    for line in (base / 'modules.dep').read_text().splitlines():
        path, _colon, needs = line.partition(':')
        found[path] = needs.split()
    return found


def _write_module(source: Path, target: Path, *, compress: bool) -> None:
    subprocess.run(['strip', '--strip-debug', '-o', target, source], check=True)
    if compress:
        # the kernel of a module cares for no name; the shim unpacks what ends so
        data = lzma.compress(target.read_bytes(), check=lzma.CHECK_CRC32, preset=9)
        target.with_name(f'{target.name}.xz').write_bytes(data)
        target.unlink()


def _take_modules(tree: Path, target: Path) -> None:
    """The modules that the shim may need, without folders, and their modules.dep."""
    base = next(
        path
        for root in ('lib/modules', 'usr/lib/modules')
        if (tree / root).is_dir()
        for path in (tree / root).iterdir()
    )
    if not (base / 'modules.dep').exists():
        subprocess.run(['/bin/busybox', 'depmod', '-b', tree, base.name], check=True)
    dependencies = _read_dependencies(base)
    always = _closure(dependencies, _MODULES)
    wanted = always | _closure(dependencies, _FILE_SYSTEMS)
    missing = set(_NEEDED) - {_name(path) for path in wanted}
    if missing:
        raise SystemExit(f'boot_shim: the kernel has no module {", ".join(sorted(missing))}')
    files = {path: _name(path) + ('.ko' if path in always else '.ko.xz') for path in wanted}
    target.mkdir()
    for path, file in files.items():
        _write_module(base / path, target / file.removesuffix('.xz'), compress=path not in always)
    (target / 'modules.dep').write_text(
        ''.join(
            f'{file}: {" ".join(files[need] for need in dependencies[path])}\n'
            for path, file in sorted(files.items())
        )
    )


def _kernel(name: str, version: str) -> Path:
    """A folder of the cache with vmlinuz and modules, complete or not at all."""
    entry = _CACHE / f'{name}_{version}_{_VERSION}'
    if entry.exists():
        return entry
    _CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_CACHE, prefix='.part-') as directory:
        tree, part, download = (Path(directory, part) for part in ('tree', 'part', 'download'))
        download.mkdir()
        part.mkdir(mode=0o755)
        package = apt.download(name, version, download)
        subprocess.run(['dpkg-deb', '-x', package, tree], check=True)
        _take_modules(tree, part / 'modules')
        shutil.copy(next((tree / 'boot').glob('vmlinuz-*')), part / 'vmlinuz')
        try:
            part.rename(entry)
        except OSError:
            if not entry.exists():  # another build was faster
                raise
    return entry


def _write(directory: Path, contents: dict[str, bytes]) -> None:
    """Replace files at once, whatever the umask is: a guest may be starting from them, as QEMU's
    user.
    """
    directory.chmod(0o755)
    parts = {}
    for name, data in contents.items():
        parts[name] = directory / f'.{name}.part'
        parts[name].write_bytes(data)
        parts[name].chmod(0o644)
    for name, part in parts.items():
        part.replace(directory / name)


def build(programs: Path, target: Path) -> None:
    """Write kernel, initrd and version into ``target``."""
    name, version = apt.kernel_package()
    kernel = _kernel(name, version)
    files = {f'modules/{path.name}': path for path in (kernel / 'modules').iterdir()}
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target, prefix='.part-') as directory:
        for program, place in (('pcow-boot-shim', 'init'), ('pcow-first-init', 'first-init')):
            stripped = Path(directory, place)
            subprocess.run(['strip', '-o', stripped, programs / program], check=True)
            files[place] = stripped
        initrd = cpio.archive(files)
    contents = {
        'initrd': initrd,
        'kernel': (kernel / 'vmlinuz').read_bytes(),
        'version': f'{name} {version}\n'.encode(),
    }
    _write(target, contents)


if __name__ == '__main__':
    build(Path(sys.argv[1]), Path(sys.argv[2]))
