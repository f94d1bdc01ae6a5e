# SPDX-License-Identifier: Apache-2.0
"""Errors of pcow_driver as Cinder's: the same sentence, in the class to which the manager and the
API react.
"""

from collections.abc import Iterator
import contextlib

from cinder import exception as cinder_exception

from pcow_driver.common import exception


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raise VolumeBackendAPIException for every error of pcow_driver."""
    try:
        yield
    except exception.PcowError as e:
        raise cinder_exception.VolumeBackendAPIException(data=str(e)) from e


@contextlib.contextmanager
def volume_busy(name: str) -> Iterator[None]:
    """VolumeIsBusy, after which the volume is available again, if somebody uses the image, or the
    file that shows it; else as :func:`translated`.
    """
    try:
        yield
    except (exception.ImageInUse, exception.ExportFailed) as e:
        raise cinder_exception.VolumeIsBusy(message=f'{name}: {e}') from e
    except exception.PcowError as e:
        raise cinder_exception.VolumeBackendAPIException(data=str(e)) from e


@contextlib.contextmanager
def snapshot_busy(name: str) -> Iterator[None]:
    """SnapshotIsBusy, after which the snapshot is available again, if it cannot be deleted now;
    else as :func:`translated`.
    """
    try:
        yield
    except (
        exception.ToolFailed,
        exception.QmpFailed,
        exception.ExportFailed,
        exception.LibvirtFailed,  # QEMU does not answer now, for instance
    ) as e:
        raise cinder_exception.SnapshotIsBusy(message=f'{name}: {e}') from e
    except exception.PcowError as e:
        raise cinder_exception.VolumeBackendAPIException(data=str(e)) from e
