# SPDX-License-Identifier: Apache-2.0
"""pcow's errors as those of Nova that put their words into the fault of the server."""

from collections.abc import Iterator
import contextlib
from typing import Any

from nova import exception as nova_exception
from nova.compute import utils as compute_utils
from nova.compute import vm_states
from nova.virt.libvirt import guest as libvirt_guest
from oslo_concurrency import processutils

from pcow_driver.common import exception


@contextlib.contextmanager
def build(context: Any, instance: Any, host: str) -> Iterator[None]:
    """Of a new server that another host may take, the reason is told in the events of its action.

    If no host takes it, its fault is Nova's, which says no more than that.

    :raises ComputeResourcesUnavailable: Nova tries another host then
    :raises BuildAbortException: Nova does not, and the fault of the server has the reason
    """
    try:
        yield
    except (
        exception.PcowError,
        nova_exception.HypervisorUnavailable,
        libvirt_guest.libvirt.libvirtError,
    ) as e:
        if instance.vm_state != vm_states.BUILDING or not getattr(e, 'is_of_host', True):
            raise nova_exception.BuildAbortException(
                instance_uuid=instance.uuid, reason=str(e)
            ) from e
        tell(context, instance, host, 'compute_pcow_build', e)
        raise nova_exception.ComputeResourcesUnavailable(reason=str(e)) from e


def tell(context: Any, instance: Any, host: str, event: str, error: Exception) -> None:
    """Say in the events of an action what its outcome does not say."""
    ignored = nova_exception.InternalError, nova_exception.InstanceActionNotFound
    with (
        contextlib.suppress(*ignored),
        compute_utils.EventReporter(context, event, host, instance.uuid, graceful_exit=True),
    ):
        raise nova_exception.InternalError(str(error)) from error


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
        raise nova_exception.InstanceFaultRollback(
            nova_exception.ResizeError(
                reason=(
                    f'the files of the server cannot be copied for its new host ({said}): make '
                    f'room in instances_path there, or see to '
                    'what is said here, and try again'
                )
            )
        ) from e


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
        raise nova_exception.InstanceFaultRollback(
            nova_exception.MigrationError(reason=str(e))
        ) from e


@contextlib.contextmanager
def refuse_rebuild(instance: Any) -> Iterator[None]:
    """The server goes on as it was: nothing has been changed, whoever says that it cannot be.

    :raises InstanceFaultRollback:
    """
    try:
        yield
    except (exception.PcowError, nova_exception.NovaException, OSError) as e:
        raise nova_exception.InstanceFaultRollback(
            nova_exception.BuildAbortException(instance_uuid=instance.uuid, reason=str(e))
        ) from e


@contextlib.contextmanager
def internal() -> Iterator[None]:
    """:raises InternalError:"""
    try:
        yield
    except exception.PcowError as e:
        raise nova_exception.InternalError(str(e)) from e
