# SPDX-License-Identifier: Apache-2.0
"""What differs from Nova's libvirt driver for servers that go on where they were; see
:mod:`nova_pcow.servers.persistence`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import sys
import time
from typing import Any

from nova import context as nova_context
from nova import exception as nova_exception
from nova import objects
from nova.compute import power_state
from nova.compute import utils as compute_utils
from nova.compute import vm_states
import nova.conf
from nova.virt import driver as virt_driver
from nova.virt import event as virtevent
from nova.virt import hardware
from oslo_log import log as logging

from nova_pcow.common import errors
from nova_pcow.common import flavor as flavor_module
from nova_pcow.libvirt_driver import domains
from nova_pcow.servers import persistence
from nova_pcow.servers import storage
from nova_pcow.snapshots import suspension
from pcow_driver.common import exception
from pcow_driver.fixation import owned
from pcow_driver.fixation import records
from pcow_driver.virt import domain
from pcow_driver.virt import libvirt_host

LOG = logging.getLogger(__name__)
CONF = nova.conf.CONF

_ACTION = 'go_on'  # of a server, after a boot of its host
_EVENT = 'compute_pcow_go_on'
_BOOTS = 'compute_pcow_boots'  # of any action that boots it instead
_PATIENCE = 300.0  # seconds in which the loop has a killed one go on, or gives it up
_PAUSE = 0.3  # seconds that the guest stands for a checkpoint, at most
_LOOK = 0.02


class PersistenceLibvirtDriver(domains.DomainLibvirtDriver):
    """See :mod:`nova_pcow.libvirt_driver.persistent`."""

    def __init__(self, virtapi: Any, read_only: bool = False) -> None:
        super().__init__(virtapi, read_only)
        self._off_since: dict[str, float] = {}  # time.monotonic(), by UUID of a killed server
        self._ending: set[str] = set()  # UUIDs of those that Nova ends just now
        self._known: set[str] = set()  # UUIDs of servers that persist
        self._standing: set[str] = set()  # of those, which stood for a checkpoint
        self._has_warned = False

    # ---- what a server may have ------------------------------------------------------------------

    def attach_volume(
        self, context: Any, connection_info: Any, instance: Any, *more: Any, **later: Any
    ) -> None:
        if persistence.persists(instance):
            try:
                persistence.check_volumes([connection_info])
            except exception.PcowError as e:
                raise nova_exception.InvalidVolume(reason=str(e)) from None
        super().attach_volume(context, connection_info, instance, *more, **later)

    def attach_interface(self, context: Any, instance: Any, image_meta: Any, vif: Any) -> None:
        if persistence.persists(instance):
            with errors.internal():
                persistence.check_ports([vif])
        super().attach_interface(context, instance, image_meta, vif)

    # ---- starts and ends -------------------------------------------------------------------------

    def _create_guest(
        self,
        context: Any,
        xml: str,
        instance: Any,
        power_on: bool = True,
        pause: bool = False,
        post_xml_callback: Callable[[], None] | None = None,
    ) -> Any:
        if (power_on or pause) and persistence.persists(instance):
            self._warn_once()
            with errors.internal():
                xml = persistence.protected(xml, instance)
        return super()._create_guest(context, xml, instance, power_on, pause, post_xml_callback)

    def _warn_once(self) -> None:
        if not (CONF.resume_guests_state_on_host_boot or self._has_warned):
            self._has_warned = True
            LOG.warning(
                'Servers with %s boot after a boot of this host, when somebody starts them: set '
                '[DEFAULT] resume_guests_state_on_host_boot, and they go on',
                flavor_module.PERSIST_SPEC,
            )

    def power_off(self, instance: Any, timeout: int = 0, retry_interval: int = 0) -> None:
        words = self._kept_at(instance)
        super().power_off(instance, timeout, retry_interval)
        self._say_kept(nova_context.get_admin_context(), instance, words)

    def _destroy(self, instance: Any) -> None:
        """Whatever for: it has not to go on, and Nova waits until it sees it off."""
        if not persistence.persists(instance):
            super()._destroy(instance)
            return
        self._ending.add(instance.uuid)
        try:
            persistence.let_go(self._domain(instance))
            super()._destroy(instance)
        finally:
            self._ending.discard(instance.uuid)

    def _soft_reboot(self, instance: Any) -> bool:
        self._note_over(instance)
        return bool(super()._soft_reboot(instance))

    def resume(self, context: Any, instance: Any, *more: Any, **later: Any) -> None:
        with suspension.resume_errors():
            self._note_over(instance)
        super().resume(context, instance, *more, **later)

    def _note_over(self, instance: Any) -> None:
        """It is about to start by the definition that it has."""
        found = self._domain(instance) if persistence.persists(instance) else None
        if found is not None:
            with errors.internal():
                owned.note_over(found)

    def _hard_reboot(self, context: Any, instance: Any, *more: Any, **later: Any) -> None:
        words = self._kept_at(instance)
        super()._hard_reboot(context, instance, *more, **later)
        self._say_kept(context, instance, words)

    def _kept_at(self, instance: Any) -> str | None:
        if not persistence.persists(instance):
            return None
        return persistence.kept_at(self._domain(instance))

    def _say_kept(self, context: Any, instance: Any, words: str | None) -> None:
        if words is not None:
            LOG.warning('%s', words, instance=instance)
            error = exception.PcowError(reason=words)
            errors.tell(context, instance, self._service_host, _BOOTS, error)

    # ---- after a boot of the host ----------------------------------------------------------------

    def resume_state_on_host_boot(
        self, context: Any, instance: Any, network_info: Any, *more: Any, **later: Any
    ) -> None:
        """Where it was, or an error, which makes it one of the server.

        :raises InternalError: it cannot
        """
        volumes = later.get('block_device_info', more[-1] if more else None)
        if (
            persistence.persists(instance)
            and instance.vm_state != vm_states.SUSPENDED
            and instance.task_state not in suspension.TASKS
            and not self._is_up(instance)
        ):
            with self._action(context, instance):
                if self._has_gone_on(context, instance, network_info, volumes):
                    return
                super().resume_state_on_host_boot(context, instance, network_info, *more, **later)
            return
        super().resume_state_on_host_boot(context, instance, network_info, *more, **later)

    def _is_up(self, instance: Any) -> bool:
        """Whether it runs, or somebody else has it go on."""
        found = self._domain(instance)
        with errors.internal(), libvirt_host.errors():
            return found is not None and found.active() and not owned.is_left(found)

    @contextlib.contextmanager
    def _action(self, context: Any, instance: Any) -> Iterator[None]:
        """What nobody has asked for is among the actions of the server all the same."""
        objects.InstanceAction.action_start(context, instance.uuid, _ACTION, want_result=False)
        try:
            with compute_utils.EventReporter(
                context, _EVENT, self._service_host, instance.uuid, graceful_exit=True
            ):
                yield
        except Exception as e:
            compute_utils.add_instance_fault_from_exc(context, instance, e, sys.exc_info())
            raise
        finally:
            objects.InstanceAction.action_finish(context, instance.uuid, want_result=False)

    def _has_gone_on(
        self, context: Any, instance: Any, network_info: Any, block_device_info: Any
    ) -> bool:
        """False: there is nothing of its last run, and it boots.

        :raises InternalError: there is, and it cannot go on
        """
        found = self._domain(instance)
        try:
            with libvirt_host.errors():
                record = None if found is None else owned.pending(found)
                if found is None or record is None:
                    return self._has_been_cut_off(context, instance, found)
                self._check_images(instance)
                self._plug(context, instance, network_info, block_device_info)
                name = owned.start(found, record)
                owned.run(found, record)
        except Exception as e:  # of libvirt, Neutron, an image, ...
            # what is too long for an event of Nova's is cut off
            raise nova_exception.InternalError(
                f'it does not go on where it was (reboot it hard, and it boots): {e}'
            ) from e
        self._arrive(instance, name)
        return True

    def _has_been_cut_off(self, context: Any, instance: Any, found: domain.Domain | None) -> bool:
        """Whether it runs, as it was started and left paused by a service that was killed."""
        if found is not None and found.active():
            found.resume()
            return True
        words = 'nothing is known of its last run (pcow-protect.service sees to that), so it boots'
        if persistence.kept_at(found) is None:  # else that is told
            self._say_kept(context, instance, words)
        return False

    def _check_images(self, instance: Any) -> None:
        """:raises PcowError: they are not what it ran with"""
        self._settle_leaving(instance)
        wanted = flavor_module.of(instance)
        storage.check_not_sent(instance.uuid)
        storage.check_complete(instance.uuid, wanted)
        storage.check_sizes(instance.uuid, wanted)
        self._emulator.path()

    def _plug(self, context: Any, instance: Any, network_info: Any, block_device_info: Any) -> None:
        """What the boot of the host has taken away."""
        self.plug_vifs(instance, network_info)
        for item in virt_driver.block_device_info_get_mapping(block_device_info):
            self._connect_volume(context, item['connection_info'], instance)

    def _arrive(self, instance: Any, name: str) -> None:
        """It runs, whatever comes of this."""
        found = domain.Domain(self._host.get_connection(), instance.name)
        try:
            LOG.warning(
                'It goes on from %s, of %.0f s ago', name, owned.age(found, name), instance=instance
            )
            if found.running():
                found.arrive()
        except Exception as e:
            LOG.warning('Its network or its clock was not told: %s', e, instance=instance)

    # ---- what Nova sees of it --------------------------------------------------------------------

    def get_info(self, instance: Any, *more: Any, **later: Any) -> Any:
        """One that is about to go on without Nova is said to run: Nova would have it be stopped."""
        info = super().get_info(instance, *more, **later)
        if persistence.persists(instance):
            self._known.add(instance.uuid)
        if info.state == power_state.RUNNING:
            self._off_since.pop(instance.uuid, None)
        elif instance.vm_state in persistence.RUN and persistence.persists(instance):
            if instance.uuid not in self._ending and self._is_held(instance, info.state):
                return hardware.InstanceInfo(
                    state=power_state.RUNNING, internal_id=info.internal_id
                )
        return info

    def _is_held(self, instance: Any, state: int) -> bool:
        try:
            with libvirt_host.errors():
                found = self._domain(instance)
                if found is None:
                    return False
                if state == power_state.PAUSED and self._stands_for_a_moment(found):
                    return True
                if not owned.is_held(found):
                    return False
                record = records.read(found.uuid)
        except exception.PcowError as e:
            LOG.warning('Whether it goes on cannot be told: %s', e, instance=instance)
            return False
        if record is not None and record.state is records.State.FIXATED:
            return True
        since = self._off_since.setdefault(instance.uuid, time.monotonic())
        return time.monotonic() < since + _PATIENCE

    def emit_event(self, event: Any) -> None:
        """Not that a guest stands for a checkpoint and goes on: Nova would note both each time."""
        if not (isinstance(event, virtevent.LifecycleEvent) and event.uuid in self._known):
            super().emit_event(event)
        elif event.transition == virtevent.EVENT_LIFECYCLE_RESUMED and event.uuid in self._standing:
            self._standing.discard(event.uuid)
        elif event.transition == virtevent.EVENT_LIFECYCLE_PAUSED and self._has_stood(event.uuid):
            self._standing.add(event.uuid)
        else:
            super().emit_event(event)

    def _has_stood(self, uuid: str) -> bool:
        """Of one that has just stopped: whether it was for a checkpoint."""
        try:
            with libvirt_host.errors():
                found = domain.Domain.by_uuid(self._host.get_connection(), uuid)
                return self._stands_for_a_moment(found)
        except exception.PcowError as e:
            LOG.debug('Why the server %s stands cannot be told: %s', uuid, e)
            return False

    @staticmethod
    def _stands_for_a_moment(found: domain.Domain) -> bool:
        """Whether QEMU has stopped it for a checkpoint."""
        end = time.monotonic() + _PAUSE
        while not found.paused_on_purpose():
            if found.running():
                return True
            if time.monotonic() > end or found.has_failed():
                return False
            time.sleep(_LOOK)
        return False
