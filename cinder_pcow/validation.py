# SPDX-License-Identifier: Apache-2.0
"""What a volume in memory cannot be, refused in words before anything is made.

A guest's loads and stores go to the memory directly: nothing stands between that could encrypt, or
count and delay them; and two guests on one device would each trust what is in its own CPU caches.
"""

import functools
from typing import Any

from cinder import exception as cinder_exception

from pcow_driver.common import units
from pcow_driver.copies import view
from pcow_driver.pools import device

_MULTIATTACH = '<is> True'


def check_volume(volume: Any) -> None:
    """Refuse a new volume that is encrypted, may be attached twice, or has QoS limits.

    :raises InvalidVolume:
    """
    if volume.encryption_key_id:
        _refuse(
            f'{volume.name} would be encrypted',
            'a guest stores to it directly, so nothing could encrypt; encrypt in the '
            'guest (LUKS), or choose another volume type',
        )
    if getattr(volume, 'multiattach', False):
        _refuse_multiattach(volume.name)
    if volume.volume_type_id:
        check_type(volume.volume_type)


def check_type(volume_type: Any) -> None:
    """Refuse a volume type that asks for what :func:`check_volume` refuses.

    :raises InvalidVolume:
    """
    if volume_type is None:
        return
    extra_specs = volume_type['extra_specs'] or {}
    if extra_specs.get('multiattach') == _MULTIATTACH:
        _refuse_multiattach(f'the volume type {volume_type["name"]}')
    check_qos(volume_type)


def check_qos(volume_type: Any) -> None:
    """Refuse a volume type with QoS specs, which it may have got when it had volumes.

    :raises InvalidVolume:
    """
    if volume_type is not None and volume_type['qos_specs_id']:
        _refuse(
            f'the volume type {volume_type["name"]} has QoS specs',
            'loads and stores of a guest cannot be counted or delayed; remove the QoS specs',
        )


def check_size(path: str, volume: Any, size: int | None = None) -> None:
    """Make sure that the image of a volume has no more data than the volume: who has broken out of
    the QEMU of its guest could write that.

    :param size: in GiB, if the volume is to have another one
    :raises DeviceTooLarge:
    """
    device.check_size(path, *_of_volume(volume, volume.size if size is None else size))


def look(volume: Any) -> view.Look:
    """How to find out where the data of a volume are, of which no more is read than that: what
    :func:`check_size` has seen may be another size by then.
    """
    return _checked(*_of_volume(volume, volume.size))


def check_snapshot_size(path: str, snapshot: Any) -> None:
    """The same of a snapshot of a volume.

    :raises DeviceTooLarge:
    """
    device.check_size(path, *_of_snapshot(snapshot), snapshot=snapshot.name)


def look_at_snapshot(snapshot: Any) -> view.Look:
    """The same."""
    return _checked(*_of_snapshot(snapshot))


def _of_volume(volume: Any, size: int) -> tuple[int, str, str]:
    return size * units.GIB, f'the volume {volume.id}', 'Extend the volume to as much'


def _of_snapshot(snapshot: Any) -> tuple[int, str, str]:
    volume = snapshot.volume
    return (
        max(snapshot.volume_size, volume.size) * units.GIB,
        f'the volume {volume.id}',
        f'Delete the snapshot {snapshot.name}',
    )


def _checked(size: int, owner: str, way_out: str) -> view.Look:
    return functools.partial(device.checked_window, data_size=size, owner=owner, way_out=way_out)


def _refuse_multiattach(what: str) -> None:
    _refuse(
        f'{what} asks for multi-attach',
        'a volume of this backend is the memory of one guest; remove the property multiattach',
    )


def _refuse(what: str, why: str) -> None:
    raise cinder_exception.InvalidVolume(reason=f'{what}, which volumes on pcow cannot be: {why}')
