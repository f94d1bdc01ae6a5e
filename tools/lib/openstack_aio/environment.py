# SPDX-License-Identifier: Apache-2.0
"""The Python environments: OpenStack's in the cache, keyed by what is in it; the drivers of this
checkout on top of it.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import fcntl
import hashlib
import os
from pathlib import Path
import shutil
import sys

from pcow_driver.common import tool
from tools.lib.openstack_aio import settings as settings_module

_VERSION = '1'  # of how they are made: raise it when that changes
_PYTHON = '/usr/bin/python3'
_REQUIREMENTS = Path(__file__).parent / 'requirements'
CHECKOUT = Path(__file__).resolve().parents[3]
# installs some hundred packages in seconds, from where pip would
_INSTALLER = 'uv>=0.8'


@dataclasses.dataclass(frozen=True)
class Base:
    """Directories of the environments, shared by all checkouts and never changed once made."""

    openstack: Path
    neutron: Path

    def program(self, name: str) -> Path:
        """A program of OpenStack's that does not use the drivers."""
        return self.openstack / 'bin' / name

    def overlaid(self, settings: settings_module.Settings, name: str) -> tuple[str, str]:
        """Command of a program of OpenStack's that finds the drivers of this checkout."""
        return str(settings.venv / 'bin/python'), str(self.program(name))


def _cache() -> Path:
    return Path(os.environ.get('PCOW_CACHE_DIR', '/var/cache/pcow'))


def _requirements(name: str) -> Path:
    return _REQUIREMENTS / f'{name}.txt'


def key() -> str:
    """Of the environments' inputs."""
    digest = hashlib.sha256(f'{_VERSION} {sys.version_info[:2]} {_INSTALLER}'.encode())
    for name in ('openstack', 'neutron'):
        digest.update(_requirements(name).read_bytes() + b'\0')
    return digest.hexdigest()[:16]


def base() -> Base:
    """Where they are, made or not."""
    directory = _cache() / f'openstack-{key()}'
    return Base(directory / 'openstack', directory / 'neutron')


def prepare_base(say: Callable[[str], None]) -> Base:
    """Make what is not there.  Another process that makes the same is waited for.

    :raises ToolFailed: a package cannot be installed
    """
    found = base()
    directory = found.openstack.parent
    complete = directory / 'complete'
    if complete.exists():
        return found
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / 'lock', 'wb') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():  # what an interrupted one left is made anew
            say('installing OpenStack (once; about a minute)')
            installer = directory / 'installer'
            tool.run(_PYTHON, '-m', 'venv', '--clear', str(installer))
            tool.run(str(installer / 'bin/pip'), 'install', '--quiet', _INSTALLER)
            for name, path in (('openstack', found.openstack), ('neutron', found.neutron)):
                _install(installer, path, name)
            complete.touch()
    return found


def prepare_tempest(say: Callable[[str], None]) -> Path:
    """Make the environment of OpenStack's integration tests, which is apart from that of its
    services.

    :raises ToolFailed: a package cannot be installed
    """
    name = 'tempest'
    installer = prepare_base(say).openstack.parent / 'installer'
    digest = hashlib.sha256(
        f'{_VERSION} {sys.version_info[:2]}'.encode() + _requirements(name).read_bytes()
    ).hexdigest()[:16]
    path = _cache() / f'{name}-{digest}'
    complete = path / 'complete'
    path.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f'{path.name}.lock'), 'wb') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            say('installing tempest (once)')
            _install(installer, path, name)
            complete.touch()
    return path


def _install(installer: Path, path: Path, name: str) -> None:
    """An environment with the packages of a list."""
    tool.run(_PYTHON, '-m', 'venv', '--clear', '--without-pip', str(path))
    tool.run(
        '/usr/bin/env',
        *_installer_settings(installer),
        str(installer / 'bin/uv'),
        'pip',
        'install',
        '--quiet',
        '--compile-bytecode',
        '--python',
        str(path / 'bin/python'),
        '-r',
        str(_requirements(name)),
    )


def _installer_settings(installer: Path) -> list[str]:
    """What the machine configured for pip, as variables for the installer, which does not read
    pip's files.
    """
    names = {
        'index-url': 'UV_DEFAULT_INDEX',
        'extra-index-url': 'UV_INDEX',
        'find-links': 'UV_FIND_LINKS',
        'cert': 'SSL_CERT_FILE',
        'trusted-host': 'UV_INSECURE_HOST',
    }
    found = {}
    for line in tool.run(str(installer / 'bin/pip'), 'config', 'list').splitlines():
        name, _equals, value = line.partition('=')
        option = name.rpartition('.')[2]
        if option in names:
            found[names[option]] = value.strip("'")
    return [f'{name}={value}' for name, value in found.items()] + [
        f'UV_CACHE_DIR={_cache() / "uv"}'
    ]


def prepare_overlay(settings: settings_module.Settings, found: Base) -> None:
    """Make an environment that has OpenStack's packages and those of this checkout.

    :raises ToolFailed: the checkout cannot be installed
    """
    inputs = hashlib.sha256(str(found.openstack).encode())
    for name in (
        'setup.cfg',
        'setup.py',
        'pyproject.toml',
        'requirements.txt',
        'nova_pcow/nova_pcow.pth',
    ):
        inputs.update((CHECKOUT / name).read_bytes())
    stamp = settings.venv / 'inputs'
    if stamp.exists() and stamp.read_text() == inputs.hexdigest():
        return
    shutil.rmtree(settings.venv, ignore_errors=True)
    tool.run(_PYTHON, '-m', 'venv', '--without-pip', str(settings.venv))
    site = next((settings.venv / 'lib').glob('python3*/site-packages'))
    packages = next((found.openstack / 'lib').glob('python3*/site-packages'))
    # addsitedir, unlike a plain path, also reads the .pth files there
    (site / 'openstack.pth').write_text(f'import site; site.addsitedir({str(packages)!r})\n')
    installer = found.openstack.parent / 'installer'
    version = () if (CHECKOUT / '.git').exists() else ('PBR_VERSION=0.1.0',)
    tool.run(
        '/usr/bin/env',
        *_installer_settings(installer),
        *version,
        str(installer / 'bin/uv'),
        'pip',
        'install',
        '--quiet',
        '--no-deps',
        '--no-build-isolation',
        '--python',
        str(settings.venv / 'bin/python'),
        '--editable',
        str(CHECKOUT),
    )
    stamp.write_text(inputs.hexdigest())
