# SPDX-License-Identifier: Apache-2.0
"""Kernels for the outer machine from other suites of Debian than that of the guests."""

from __future__ import annotations

import lzma
import os
from pathlib import Path
import re
import shutil

from pcow_driver.common import exception
from pcow_driver.common import tool
from tools.lib.quickstart import apt
from tools.lib.quickstart import guest
from tools.lib.quickstart import state

CLOUD = 'linux-image-cloud-amd64'
_KEYRING = '/usr/share/keyrings/debian-archive-keyring.gpg'
_BUSYBOX = Path('/bin/busybox')
# A kernel in several packages, as newer suites have it, is one of each of these, and all of one
# version.
_PACKAGE = re.compile(r'linux-(?:image|binary|modules|base)-[0-9]\S*')
_NAME = re.compile(r'[a-z0-9-]+')
# of what is made here: raise it when the result changes
_VERSION = '1'


class Unreachable(exception.PcowError):
    """No mirror has the suite, or none answers, and no kernel of it was kept."""

    msg_fmt = 'no kernel of another suite of Debian can be had, and none was kept: %(reason)s'


class _NoAnswer(exception.PcowError):
    """The mirror had the suite, and does not give the packages."""


class _Suite:
    """A state of apt that knows one suite only: the machine's own stays what it is."""

    def __init__(self, directory: Path, name: str) -> None:
        """:raises PcowError: the machine's apt knows no mirror of Debian, or it has no such suite,
        or does not answer
        """
        for path in ('lists/partial', 'cache/archives/partial'):
            (directory / path).mkdir(parents=True)
        mirror = apt.mirror(name)
        uri = os.environ.get('PCOW_DEBIAN_MIRROR') or mirror.uri
        sources = directory / 'sources.list'
        sources.write_text(f'deb [signed-by={mirror.keyring or _KEYRING}] {uri} {name} main\n')
        self._options = [
            word
            for option in (
                f'Dir::Etc::sourcelist={sources}',
                'Dir::Etc::sourceparts=/dev/null',
                f'Dir::State::lists={directory}/lists',
                f'Dir::Cache={directory}/cache',
                'Acquire::Languages=none',
                'APT::Update::Error-Mode=any',
                'APT::Sandbox::User=root',
                'Acquire::Retries=1',
                'Acquire::http::Timeout=30',
                'Acquire::https::Timeout=30',
            )
            for word in ('-o', option)
        ]
        self._run('apt-get', 'update')

    def _run(self, program: str, *arguments: str, directory: Path = Path('/')) -> str:
        return tool.run('/usr/bin/env', '-C', str(directory), program, *self._options, *arguments)

    def packages(self, meta: str) -> list[str]:
        """Names of the packages that a kernel consists of.

        :raises ToolFailed: there is no such package
        """
        text = self._run('apt-cache', 'depends', '--recurse', '--important', meta)
        return sorted({line for line in text.splitlines() if _PACKAGE.fullmatch(line)})

    def unpack(self, packages: list[str], target: Path) -> None:
        download = target.with_name('download')
        download.mkdir()
        try:
            self._run('apt-get', 'download', *packages, directory=download)
        except exception.PcowError as e:
            raise _NoAnswer(reason=e) from None
        for path in download.glob('*.deb'):
            tool.run('/usr/bin/dpkg-deb', '-x', str(path), str(target))


def modules_of(tree: Path) -> Path:
    """The directory of its modules in an unpacked kernel."""
    return next(
        path
        for root in ('lib/modules', 'usr/lib/modules')
        if (tree / root).is_dir()
        for path in (tree / root).iterdir()
    )


def kernel_of(tree: Path) -> Path:
    """The file that is booted, which newer suites have beside the modules."""
    return next(
        path
        for directory in (tree / 'boot', modules_of(tree))
        for path in directory.glob('vmlinuz*')
    )


def _make(suite: _Suite, packages: list[str], part: Path) -> None:
    suite.unpack(packages, part)
    modules = modules_of(part)
    # nobody who loads them here can take them as they are
    for path in modules.rglob('*.ko.xz'):
        path.with_suffix('').write_bytes(lzma.decompress(path.read_bytes()))
        path.unlink()
    if modules.parents[2] != part:  # busybox looks there only
        (part / 'lib').mkdir(exist_ok=True)
        (part / 'lib/modules').symlink_to('../usr/lib/modules')
    tool.run(str(_BUSYBOX), 'depmod', '-b', str(part), modules.name)


def _kept(cache: guest.Cache, prefix: str, reason: object) -> Path:
    """The newest one that was made before.

    :raises Unreachable: there is none
    """
    found = sorted(cache.directory.glob(f'{prefix}-*'), key=lambda path: path.stat().st_mtime)
    if not found:
        raise Unreachable(reason=reason)
    return found[-1]


def prepare(run: state.Run, suite: str, meta: str = CLOUD) -> Path:
    """The tree of a kernel: the newest of that suite or, without a mirror that answers, the one
    that was taken the last time.

    :param meta: package that depends on it
    :raises Unreachable: there is neither
    :raises PcowError: the suite has no such kernel, or it cannot be unpacked
    """
    cache, scratch = guest.Cache(run), run.directory / f'apt-{suite}-{meta}'
    prefix = f'kernel-{suite}-{meta}-{_VERSION}'
    try:
        source = _Suite(scratch, suite)
    except exception.PcowError as e:
        return _kept(cache, prefix, f'{suite}: {e}')
    packages = source.packages(meta)
    if not packages:
        raise exception.PcowError(reason=f'{meta} of {suite} depends on no kernel')
    try:
        tree = cache.get(f'{prefix}-{packages[-1]}', lambda part: _make(source, packages, part))
    except _NoAnswer as e:
        return _kept(cache, prefix, f'{suite}: {e}')
    shutil.rmtree(scratch)
    os.utime(tree)
    return tree


def is_suite(name: str) -> bool:
    """Whether a suite may have that name."""
    return _NAME.fullmatch(name) is not None
