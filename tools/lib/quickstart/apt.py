# SPDX-License-Identifier: Apache-2.0
"""What the machine's own apt knows: the mirror to take Debian from, and packages."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import os
from pathlib import Path
import re

from pcow_driver.common import exception
from pcow_driver.common import tool

_SOURCES = Path('/etc/apt')
_ONE_LINE = re.compile(
    r'deb\s+(?:\[(?P<options>[^]]*)\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)\s+(?P<components>.+)'
)


@dataclasses.dataclass(frozen=True)
class Mirror:
    uri: str
    suites: tuple[str, ...]
    # file of the keys that sign it; None: the distribution's own
    keyring: str | None = None


def _keyring(value: str) -> str | None:
    return value if value.startswith('/') and os.path.isfile(value) else None


def parse_list(text: str) -> Iterator[Mirror]:
    """Entries of a ``.list`` file (one line each)."""
    for line in text.splitlines():
        match = _ONE_LINE.fullmatch(line.partition('#')[0].strip())
        if match and 'main' in match['components'].split():
            options = dict(
                item.split('=', 1) for item in (match['options'] or '').split() if '=' in item
            )
            yield Mirror(match['uri'], (match['suite'],), _keyring(options.get('signed-by', '')))


def parse_deb822(text: str) -> Iterator[Mirror]:
    """Entries of a ``.sources`` file (stanzas of fields)."""
    lines = '\n'.join(line for line in text.splitlines() if not line.startswith('#'))
    for stanza in re.split(r'\n[ \t]*\n', lines):
        unfolded = re.sub(r'\n[ \t]+', ' ', stanza)
        fields = {
            key.strip().lower(): value.strip()
            for key, colon, value in (line.partition(':') for line in unfolded.splitlines())
            if colon
        }
        if (
            fields.get('enabled', 'yes').lower() in ('no', 'false', '0')
            or 'deb' not in fields.get('types', '').split()
        ):
            continue
        if 'main' in fields.get('components', '').split():
            for uri in fields.get('uris', '').split():
                yield Mirror(
                    uri,
                    tuple(fields.get('suites', '').split()),
                    _keyring(fields.get('signed-by', '')),
                )


def mirrors(directory: Path = _SOURCES) -> Iterator[Mirror]:
    """All binary sources with the component main."""
    for path in [directory / 'sources.list', *sorted((directory / 'sources.list.d').glob('*'))]:
        if path.is_file() and path.suffix in ('.list', '.sources'):
            text = path.read_text(encoding='utf-8', errors='replace')
            yield from parse_list(text) if path.suffix == '.list' else parse_deb822(text)


def mirror(suite: str, directory: Path = _SOURCES) -> Mirror:
    """The mirror that has a Debian suite, as apt is configured.

    :raises PcowError: there is none
    """
    found = [
        item for item in mirrors(directory) if item.uri.split(':')[0] in ('http', 'https', 'file')
    ]
    for item in found:
        if suite in item.suites:
            return item
    # a machine of another release: its mirror has this one as well
    for item in found:
        if item.uri.rstrip('/').endswith('/debian'):
            return item
    raise exception.PcowError(
        reason=f"{directory} names no mirror with Debian's {suite}: add one, or give --image FILE"
    )


def proxy_environment() -> dict[str, str]:
    """The proxies that apt is configured with, as environment variables for other programs."""
    text = tool.run('/usr/bin/apt-config', 'dump')
    found = {}
    for scheme in ('http', 'https'):
        match = re.search(
            rf'^Acquire::{scheme}::Proxy "([^"]+)";$', text, re.MULTILINE | re.IGNORECASE
        )
        if match and match[1].upper() != 'DIRECT':
            found[f'{scheme}_proxy'] = match[1]
    return found


def _show(package: str) -> str:
    return tool.run('/usr/bin/apt-cache', 'show', '--no-all-versions', package)


def _field(text: str, name: str) -> str:
    match = re.search(rf'^{name}: (.*)$', text, re.MULTILINE)
    if not match:
        raise exception.PcowError(reason=f'apt-cache tells no {name}: run apt-get update')
    return match[1]


def kernel_package(meta: str = 'linux-image-cloud-amd64') -> tuple[str, str]:
    """Name and version of the package with Debian's cloud kernel, or that of another meta package,
    as apt would install it.

    :raises ToolFailed: apt does not know it
    """
    try:
        text = _show(meta)
    except exception.ToolFailed:
        tool.run('/usr/bin/apt-get', 'update')
        text = _show(meta)
    name = _field(text, 'Depends').split()[0].rstrip(',')
    return name, _field(_show(name), 'Version')


def version(package: str) -> str:
    """The version of a package that apt would install.

    :raises ToolFailed: apt does not know it
    """
    try:
        text = _show(package)
    except exception.ToolFailed:
        tool.run('/usr/bin/apt-get', 'update')
        text = _show(package)
    return _field(text, 'Version')


def download(name: str, version: str, directory: Path) -> Path:
    """Download a package into an empty directory and return its file.

    :raises ToolFailed:
    """
    command = (
        '/usr/bin/env',
        '-C',
        str(directory),
        'apt-get',
        'download',
        '-o',
        'APT::Sandbox::User=root',
        f'{name}={version}',
    )
    try:
        tool.run(*command)
    except exception.ToolFailed:  # the lists are older than the mirror
        tool.run('/usr/bin/apt-get', 'update')
        tool.run(*command)
    return next(directory.glob('*.deb'))
