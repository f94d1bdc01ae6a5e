# SPDX-License-Identifier: Apache-2.0
"""The boot shim's kernel: Debian's source of Linux, in a configuration of ours.

The source that was fetched first is kept, and what is built of it, until somebody asks for a newer
one: nothing changes from build to build.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import fcntl
import hashlib
import os
from pathlib import Path
import re
import shutil
import subprocess
import tempfile
import time

from pcow_driver.common import exception
from tools.lib.quickstart import apt

_CACHE = Path(os.environ.get('PCOW_CACHE_DIR', '/var/cache/pcow'))
# of all versions in it; depends on the package with the source of the one that the release has
_META = 'linux-source'
_CONFIG = Path(__file__).parents[2] / 'qemu-backend/boot-shim/kernel.config'
_IMAGE = Path('arch/x86/boot/bzImage')
# raise it when what is kept in the cache changes
_VERSION = '1'
# A third of the source, which the configuration never reaches. Kconfig wants its own files.
_LEFT_OUT = (
    *(f'*/drivers/{name}/*.[chS]' for name in ('gpu', 'infiniband', 'media', 'net', 'staging')),
    *('*/Documentation/*/*', '*/sound/soc/*.[chS]', '*/tools/testing/*'),
)
_JOBS = 2
_KEPT_DAYS = 30


def _fail(text: str) -> SystemExit:
    return SystemExit(f'boot_kernel: {text}')


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One build at a time; what one has left that was killed goes away."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / 'lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for part in directory.glob('.part-*'):
            shutil.rmtree(part)
        yield


def _kept() -> Path | None:
    found = sorted(
        (_CACHE / 'downloads').glob(f'{_META}-*.deb'), key=lambda path: path.stat().st_mtime
    )
    return found[-1] if found else None


def _fetch() -> Path:
    """The package with the source, the newest that apt knows, in place of an older one."""
    downloads = _CACHE / 'downloads'
    downloads.mkdir(parents=True, exist_ok=True)
    try:
        name, version = apt.kernel_package(_META)
        before = _kept()
        with tempfile.TemporaryDirectory(dir=_CACHE / 'boot-shim', prefix='.part-') as part:
            package = apt.download(name, version, Path(part))
            target = downloads / package.name
            package.replace(target)
    except exception.PcowError as error:
        raise _fail(
            f"apt does not give the source of Debian's kernel ({_META}): {error}. Mend its "
            f'sources, or put the package {_META}-VERSION of Debian into {downloads}'
        ) from error
    if before and before != target:
        before.unlink()
    return target


def _label(package: Path) -> str:
    """Name and version of a package that apt has downloaded: 'linux-source-6.1 6.1.192-3'."""
    name, version = package.name.split('_')[:2]
    return f'{name} {version.replace("%3a", ":")}'


def _unpack(package: Path, tree: Path) -> None:
    """
    :param package: has the tree as usr/src/linux-source-VERSION.tar.xz
    """
    tree.mkdir()
    left_out = [f'--exclude={pattern}' for pattern in _LEFT_OUT]
    with (
        subprocess.Popen(['dpkg-deb', '--fsys-tarfile', package], stdout=subprocess.PIPE) as outer,
        subprocess.Popen(
            ['tar', '-xO', '--wildcards', f'./usr/src/{_META}-*.tar.xz'],
            stdin=outer.stdout,
            stdout=subprocess.PIPE,
        ) as middle,
    ):
        subprocess.run(
            ['tar', '-xJ', '-C', tree, '--strip-components=1', *left_out],
            stdin=middle.stdout,
            check=True,
        )


def _wanted(config: str) -> list[str]:
    return [line for line in config.splitlines() if re.match('CONFIG_|# CONFIG_', line)]


def _make(tree: Path, label: str, *targets: str) -> None:
    compiler = 'ccache gcc' if shutil.which('ccache') else 'gcc'
    # nothing of who builds, and when, is in it
    names = {
        'KBUILD_BUILD_USER': 'pcow',
        'KBUILD_BUILD_HOST': 'pcow',
        'KBUILD_BUILD_VERSION': '1',
        'KBUILD_BUILD_TIMESTAMP': label,
        'KCONFIG_ALLCONFIG': str(_CONFIG),
    }
    subprocess.run(
        ['nice', 'make', '-C', tree, f'-j{_JOBS}', f'CC={compiler}', 'HOSTCC=gcc', *targets],
        env={**os.environ, **names},
        check=True,
    )


def _build(package: Path, tree: Path) -> None:
    label = _label(package)
    _unpack(package, tree)
    _make(tree, label, 'allnoconfig')
    made = set((tree / '.config').read_text().splitlines())
    missing = [line for line in _wanted(_CONFIG.read_text()) if line not in made]
    if missing:
        raise _fail(f'{label} does not take these of {_CONFIG.name}: {", ".join(missing)}')
    _make(tree, label, 'bzImage')


def _forget(directory: Path) -> None:
    """What nobody has used for a month."""
    for entry in directory.glob(f'{_META}-*'):
        if entry.stat().st_mtime < time.time() - _KEPT_DAYS * 86400:
            shutil.rmtree(entry)


def kernel(*, update: bool = False) -> tuple[Path, str]:
    """A folder with vmlinuz and config, and the name and version of the package that they are of.

    :param update: look whether Debian has a newer source than the one that is kept
    """
    directory = _CACHE / 'boot-shim'
    with _locked(directory):
        package = None if update else _kept()
        package = package or _fetch()
        wanted = '\n'.join([_VERSION, *_wanted(_CONFIG.read_text())])
        key = hashlib.sha256(wanted.encode()).hexdigest()[:12]
        entry = directory / f'{package.stem}_{key}'
        if not entry.exists():
            with tempfile.TemporaryDirectory(dir=directory, prefix='.part-') as part:
                tree, result = Path(part, 'tree'), Path(part, 'result')
                _build(package, tree)
                result.mkdir(mode=0o755)
                shutil.copy(tree / _IMAGE, result / 'vmlinuz')
                shutil.copy(tree / '.config', result / 'config')
                result.rename(entry)
        os.utime(entry)
        _forget(directory)
    return entry, _label(package)
