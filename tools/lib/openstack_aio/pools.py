# SPDX-License-Identifier: Apache-2.0
"""The pools of the compute nodes, each registered with pcowctl on its node as an operator would do
it.
"""

from __future__ import annotations

import json
from pathlib import Path
import shlex

from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.common import tool
from pcow_driver.images import image
from tools.lib.openstack_aio import node as node_module
from tools.lib.openstack_aio import settings as settings_module
from tools.lib.quickstart import teardown

NOVA = 'nova'
CINDER = 'cinder'
_NAMES = (NOVA, CINDER)
_TMPFS = ('/dev/shm', '/run')  # noqa: S108 - the directory made there is the all-in-one's own
_VOLATILE = 'volatile'


def wanted(settings: settings_module.Settings) -> bool:
    """Whether anything of the all-in-one uses pools."""
    if settings_module.PCOW_BACKEND in settings.volume_backends:
        return True
    return settings.compute_driver == settings_module.PCOW_COMPUTE_DRIVER


def directory(settings: settings_module.Settings) -> Path:
    """The one with the pools; nobody else uses it.

    :raises PcowError: no tmpfs is there
    """
    parent = settings.pool
    if parent is None:
        parent = next(
            (
                Path(place)
                for place in _TMPFS
                if Path(place).is_dir() and image.probe(place) == _VOLATILE
            ),
            None,
        )
        if parent is None:
            raise exception.PcowError(
                reason=f'none of {", ".join(_TMPFS)} is a tmpfs: give --pool DIR'
            )
    return parent / f'pcow-openstack-{settings.id}'


def configuration(
    settings: settings_module.Settings, node: settings_module.Node
) -> dict[str, object]:
    """Group [pcow] of the services and of pcowctl on a node."""
    return {
        'state_path': settings.pcow_state,
        'conversion_dir': settings.data / 'conversion',
        'pcow_img': tool.find('pcow_img', build_first=True),
        'emulator': tool.find('emulator', build_first=True),
        'libvirt_uri': settings.libvirt_uri(node),
    }


def prepare(settings: settings_module.Settings) -> None:
    """Make the directories, before the nodes bind something else over them.

    :raises PcowError:
    """
    for name in _NAMES:
        (directory(settings) / name).mkdir(parents=True, exist_ok=True, mode=0o711)
        (directory(settings) / f'{settings_module.NODE2.name}-{name}').mkdir(
            exist_ok=True, mode=0o711
        )
    for place, name in (
        (settings.state, 'pcow.conf'),
        (settings.node(settings_module.NODE1), 'pcow.conf'),
        (settings.node(settings_module.NODE2), f'pcow-{settings_module.NODE2.name}.conf'),
    ):
        programs = place / 'bin'
        programs.mkdir(parents=True, exist_ok=True)
        words = (str(settings.venv / 'bin/pcowctl'), '--config-file', str(settings.etc / name))
        (programs / 'pcowctl').write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        (programs / 'pcowctl').chmod(0o755)


def places(settings: settings_module.Settings, node: settings_module.Node) -> dict[str, Path]:
    """What a node sees in place of the first one's pools."""
    if node == settings_module.NODE1 or settings.shared_pools or not wanted(settings):
        return {}
    base = directory(settings)
    return {str(base / name): base / f'{node.name}-{name}' for name in _NAMES}


def register(settings: settings_module.Settings, node: node_module.ComputeNode) -> None:
    """Make the pools of a node that are not there.

    :raises ToolFailed:
    """
    base = directory(settings)
    configuration_file = (
        '--config-file',
        str(
            settings.etc
            / ('pcow.conf' if node.node == settings_module.NODE1 else f'pcow-{node.node.name}.conf')
        ),
    )
    command = (str(settings.venv / 'bin/pcowctl'), *configuration_file, 'pool')
    known = {
        entry.get('name', entry.get('Name'))
        for entry in json.loads(node.run(*command, 'list', '-f', 'json'))
    }
    for name in _NAMES:
        own = places(settings, node.node).get(str(base / name), base / name)
        if (own / names.MARKER).exists() and name in known:
            continue
        if name in known:  # it was on a tmpfs, and the host was started again
            node.run(*command, 'remove', name)
        node.run(*command, 'create', name, str(base / name))


def purge(settings: settings_module.Settings) -> None:
    if wanted(settings):
        # its templates are immutable where the file system has that
        teardown.delete(directory(settings))
