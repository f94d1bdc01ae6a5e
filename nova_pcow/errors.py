# SPDX-License-Identifier: Apache-2.0
"""pcow's errors as those of Nova that put their words into the fault of the server."""

from collections.abc import Iterator
import contextlib
from typing import Any

from nova import exception as nova_exception
from nova.virt.libvirt import guest as libvirt_guest
from oslo_concurrency import processutils

from pcow_driver import exception


@contextlib.contextmanager
def abort_build(instance: Any) -> Iterator[None]:
    """The reason, from pcow or libvirt, goes into the server's fault: tried on other hosts, it would only be "no valid host".

    :raises BuildAbortException: Nova does not try another host then
    """
    try:
        yield
    except (exception.PcowError, nova_exception.HypervisorUnavailable, libvirt_guest.libvirt.libvirtError) as e:
        raise nova_exception.BuildAbortException(instance_uuid=instance.uuid, reason=str(e)) from e


@contextlib.contextmanager
def fail_migration() -> Iterator[None]:
    """:raises MigrationError:"""
    try:
        yield
    except exception.PcowError as e:
        raise nova_exception.MigrationError(reason=str(e)) from e
    except processutils.ProcessExecutionError as e:
        raise nova_exception.MigrationError(reason=' '.join(str(e.stderr or e).split())) from e


@contextlib.contextmanager
def roll_back_resize() -> Iterator[None]:
    """The server goes on as it was.

    :raises InstanceFaultRollback:
    """
    try:
        yield
    except exception.PcowError as e:
        raise nova_exception.InstanceFaultRollback(nova_exception.ResizeError(reason=str(e))) from e
    except processutils.ProcessExecutionError as e:
        said = ' '.join(str(e.stderr or e).split())
        raise nova_exception.InstanceFaultRollback(nova_exception.ResizeError(reason=(
            f'the files of the server cannot be copied for its new host ({said}): make room in instances_path there, or see to '
            'what is said here, and try again'))) from e


@contextlib.contextmanager
def refuse_live_migration() -> Iterator[None]:
    """Nothing has changed.

    :raises MigrationPreCheckError:
    """
    try:
        yield
    except exception.PcowError as e:
        raise nova_exception.MigrationPreCheckError(reason=str(e)) from e


@contextlib.contextmanager
def refuse_evacuation() -> Iterator[None]:
    """The server stays what it is, and where it is.

    :raises InstanceFaultRollback:
    """
    try:
        yield
    except exception.PcowError as e:
        raise nova_exception.InstanceFaultRollback(nova_exception.MigrationError(reason=str(e))) from e


@contextlib.contextmanager
def refuse_rebuild(instance: Any) -> Iterator[None]:
    """The server goes on as it was: nothing has been changed, whoever says that it cannot be.

    :raises InstanceFaultRollback:
    """
    try:
        yield
    except (exception.PcowError, nova_exception.NovaException, OSError) as e:
        raise nova_exception.InstanceFaultRollback(
            nova_exception.BuildAbortException(instance_uuid=instance.uuid, reason=str(e))) from e


@contextlib.contextmanager
def internal() -> Iterator[None]:
    """:raises InternalError:"""
    try:
        yield
    except exception.PcowError as e:
        raise nova_exception.InternalError(str(e)) from e
