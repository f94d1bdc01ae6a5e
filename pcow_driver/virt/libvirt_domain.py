# SPDX-License-Identifier: Apache-2.0
"""A domain of libvirt's, whatever it has: its definition, its states, and QMP to its QEMU."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import json
import time
from typing import Any
from typing import Self

from oslo_log import log as logging

from pcow_driver.common import exception
from pcow_driver.common import interrupt
from pcow_driver.images import model
from pcow_driver.virt import guest_agent
from pcow_driver.virt import guest_hook
from pcow_driver.virt import libvirt_call
from pcow_driver.virt import libvirt_host
from pcow_driver.virt import libvirt_xml
from pcow_driver.virt import qemu_process

LOG = logging.getLogger(__name__)

QEMU = 'QEMU'  # who answers
# QEMU's words while a checkpoint is taken, and seconds that it may take until it is durable, or in
# which the guest stands; a VM that was reverted and is paused may do so for good.
_WAITS = {'is being taken: wait': 30.0, 'is being taken, or': 1.0}
_RETRY = 0.05
# That write what the guest has stored to its storage, which may be slow, or free what it has.
_LONG_COMMANDS = frozenset(
    {
        'pcow-checkpoint-create',
        'pcow-checkpoint-delete',
        'pcow-checkpoint-revert',
        'pcow-snapshot-create',
        'pcow-snapshot-delete',
        'pcow-snapshot-revert',
    }
)

_UNDONE_BY = {
    'pcow-checkpoint-create': 'pcow-checkpoint-delete',
    'pcow-snapshot-create': 'pcow-snapshot-delete',
}


class LibvirtDomain:
    """One domain of an open connection.

    Methods raise LibvirtFailed (through :func:`.libvirt_host.connect`), QmpFailed and
    DomainInvalid. None of them waits for ever for a QEMU, nor for libvirt, whatever the connection
    is: LibvirtFailed is then NoAnswer.
    """

    def __init__(self, connection: Any, name: str) -> None:
        self.name = name
        found = libvirt_call.Proxy(connection, name).lookupByName(name)
        self._domain = libvirt_call.Proxy(found, name)

    @classmethod
    def by_uuid(cls, connection: Any, uuid: str) -> Self:
        found = libvirt_call.Proxy(connection).lookupByUUIDString(uuid)
        return cls(connection, str(found.name()))

    @classmethod
    def define(cls, connection: Any, xml: str) -> Self:
        """A new one, which does not run.

        :raises LibvirtFailed: also if there is one of that name
        """
        libvirt = libvirt_host.binding('libvirt')
        define = libvirt_call.Proxy(connection).defineXMLFlags
        found = define(xml, libvirt.VIR_DOMAIN_DEFINE_VALIDATE)
        return cls(connection, str(found.name()))

    def undefine(self) -> None:
        """It is no domain any more; its images stay."""
        if self.active():
            self._domain.destroy()
        self._domain.undefine()

    def definition(self) -> str:
        """XML of its next start, with the passwords that are in it."""
        libvirt = libvirt_host.binding('libvirt')
        flags = libvirt.VIR_DOMAIN_XML_INACTIVE | libvirt.VIR_DOMAIN_XML_SECURE
        return str(self._domain.XMLDesc(flags))

    def running_xml(self) -> str:
        """XML of what runs, without the passwords that are in it."""
        return str(self._domain.XMLDesc(0))

    def capabilities(self) -> str:
        """XML of what its host is, and can do."""
        return str(self._domain.connect().getCapabilities())

    def attach(self, xml: str) -> None:
        """Give it a device, which it has at its next start, too.

        :param xml: of the device
        """
        libvirt = libvirt_host.binding('libvirt')
        self._domain.attachDeviceFlags(
            xml, libvirt.VIR_DOMAIN_AFFECT_LIVE | libvirt.VIR_DOMAIN_AFFECT_CONFIG
        )

    def active(self) -> bool:
        """Whether a QEMU exists for it, running or paused."""
        return bool(self._domain.isActive())

    def saved(self) -> bool:
        """Whether its next start goes on with RAM that libvirt keeps (``virsh managedsave``)."""
        return bool(self._domain.hasManagedSaveImage(0))

    @property
    def uuid(self) -> str:
        return str(self._domain.UUIDString())

    def libvirt_id(self) -> int:
        """Of its run; libvirt begins anew with these when it is started."""
        return int(self._domain.ID())

    def process(self) -> str:
        """Which process its QEMU is, and since when: another one of each QEMU until the host boots.

        :raises DomainInvalid: it has none on this host
        """
        user = libvirt_xml.user(self._domain.XMLDesc(0))
        found = qemu_process.find(self.name, self.uuid, user)
        if found is None:
            raise exception.DomainInvalid(
                domain=self.name, reason='no process on this host has its UUID (-uuid)'
            )
        return found

    def autostart(self) -> bool:
        """Whether libvirt starts it when libvirt starts."""
        return bool(self._domain.autostart())

    def stopped_on_purpose(self) -> bool:
        """Of one that is off: whether its guest or somebody has ended it, saved it or sent it
        elsewhere. False: it was killed, has crashed, or libvirt has been started since.
        """
        libvirt = libvirt_host.binding('libvirt')
        _state, reason = self._domain.state()
        return reason in (
            libvirt.VIR_DOMAIN_SHUTOFF_SHUTDOWN,
            libvirt.VIR_DOMAIN_SHUTOFF_DESTROYED,
            libvirt.VIR_DOMAIN_SHUTOFF_MIGRATED,
            libvirt.VIR_DOMAIN_SHUTOFF_SAVED,
            libvirt.VIR_DOMAIN_SHUTOFF_FROM_SNAPSHOT,
        )

    def was_killed(self) -> bool:
        """Of one that is off: whether libvirt has seen its QEMU end by itself. False: also if it
        does not know, as one that was defined anew, or since libvirt was started.
        """
        libvirt = libvirt_host.binding('libvirt')
        _state, reason = self._domain.state()
        return bool(reason == libvirt.VIR_DOMAIN_SHUTOFF_CRASHED)

    def metadata(self, namespace: str, *, live: bool = False) -> str | None:
        """The element of this namespace in its definition, without that; None: there is none.

        :param live: in what runs
        """
        libvirt = libvirt_host.binding('libvirt')
        affect = libvirt.VIR_DOMAIN_AFFECT_LIVE if live else libvirt.VIR_DOMAIN_AFFECT_CONFIG
        try:
            return str(
                self._domain.metadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, namespace, affect)
            )
        except libvirt.libvirtError as e:
            # one without a definition (transient) has none, either
            if e.get_error_code() not in (
                libvirt.VIR_ERR_NO_DOMAIN_METADATA,
                libvirt.VIR_ERR_OPERATION_INVALID,
            ):
                raise
            return None

    def set_metadata(
        self, namespace: str, key: str, element: str | None, *, live: bool = False
    ) -> None:
        """Of its next starts; what runs goes on with what it has. Whoever listens gets the event
        *metadata-change*.

        :param key: short form of the namespace
        :param element: without namespace; None takes it away
        :param live: of what runs, until that ends
        """
        libvirt = libvirt_host.binding('libvirt')
        affect = libvirt.VIR_DOMAIN_AFFECT_LIVE if live else libvirt.VIR_DOMAIN_AFFECT_CONFIG
        self._domain.setMetadata(
            libvirt.VIR_DOMAIN_METADATA_ELEMENT, element, key, namespace, affect
        )

    def qmp(self, command: str, **arguments: str | int) -> Any:
        """Run a QMP command and return what it returns. One that has to wait for a checkpoint is
        given again: who takes that may be another user, whose lock keeps nobody out.

        :raises QmpFailed: QEMU refused it
        :raises NoAnswer: it may still be done
        :raises ToolOutputInvalid: that is no answer: its guest may have taken it over
        """
        if command in _LONG_COMMANDS:
            self.check_answers()
        begun = time.monotonic()
        while True:
            try:
                return self._qmp(command, **arguments)
            except exception.NoAnswer as e:
                if command in _UNDONE_BY:
                    self._undo_later(e, _UNDONE_BY[command], arguments)
                raise
            except exception.QmpFailed as e:
                waits = [seconds for words, seconds in _WAITS.items() if words in str(e)]
                if not waits or time.monotonic() >= begun + waits[0]:
                    raise
            time.sleep(_RETRY)

    def _undo_later(
        self, error: exception.NoAnswer, command: str, arguments: dict[str, str | int]
    ) -> None:
        """Of what QEMU may do after its caller has been told that it was not: nobody would know
        of it. Names are not used twice so soon.
        """
        monitor, bare = (
            libvirt_host.binding('libvirt_qemu').qemuMonitorCommand,
            libvirt_call.bare(self._domain),
        )
        named = {key: value for key, value in arguments.items() if key in ('id', 'name')}
        request = json.dumps({'execute': command, 'arguments': named})

        def undo(answer: str | None) -> None:
            if answer is not None and 'return' in json.loads(answer):
                monitor(bare, request, 0)

        libvirt_call.afterwards(error, undo)

    def _qmp(self, command: str, **arguments: str | int) -> Any:
        request: dict[str, Any] = {'execute': command}
        if arguments:
            request['arguments'] = arguments
        LOG.debug('%s: %s', self.name, request)
        text = libvirt_call.call(
            self.name,
            command,
            libvirt_host.binding('libvirt_qemu').qemuMonitorCommand,
            libvirt_call.bare(self._domain),
            json.dumps(request),
            0,
            seconds=libvirt_call.limit(long=command in _LONG_COMMANDS),
        )
        try:
            reply = model.Reader(json.loads(text), command, QEMU)
        except (ValueError, RecursionError) as e:
            raise exception.ToolOutputInvalid(tool=QEMU, reason=f'{command}: {e}') from None
        if 'error' in reply.fields:
            error = reply.object('error')
            error_class, description = error.string('class'), error.string('desc')
            if error_class == 'CommandNotFound':
                description = (
                    'this QEMU has no pcow backend, or an older one; let <emulator> in the domain '
                    'XML name the one that has'
                )
            raise exception.QmpFailed(
                command=command, error_class=error_class, description=description
            )
        return reply.fields.get('return')

    def check_answers(self) -> None:
        """Before something that may take long, for which a QEMU that stands would be waited as
        long.

        :raises NoAnswer:
        """
        with contextlib.suppress(exception.QmpFailed):  # which is an answer
            self._qmp('query-status')

    def query(self, command: str = 'query-pcow') -> list[dict[str, Any]]:
        """What QEMU says of its pcow backends, or of others of its things; only while active.

        :raises ToolOutputInvalid: that is no list of objects
        """
        answer = self.qmp(command)
        if not isinstance(answer, list):
            raise exception.ToolOutputInvalid(tool=QEMU, reason=f'{command}: not a list')
        return [model.Reader(item, command, QEMU).fields for item in answer]

    @contextlib.contextmanager
    def started(self, *, run: bool = True) -> Iterator[None]:
        """A QEMU exists for it afterwards, in which the guest has not run meanwhile, and does now.

        If what is done meanwhile fails, it is off again.

        :param run: False: it is paused afterwards
        """
        try:
            self._domain.createWithFlags(libvirt_host.binding('libvirt').VIR_DOMAIN_START_PAUSED)
        except exception.NoAnswer as e:
            bare = libvirt_call.bare(self._domain)
            # None: it has failed, and what runs is somebody else's
            libvirt_call.afterwards(e, lambda answer: None if answer is None else bare.destroy())
            raise
        try:
            yield
        except BaseException:
            with interrupt.clearing_up():
                self._domain.destroy()
            raise
        if run:
            self._domain.resume()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No vCPU runs meanwhile; one that did goes on afterwards whatever happens. Where its QEMU
        does not answer, that is when it does.
        """
        if not self.running():
            yield
            return
        try:
            self._domain.suspend()
        except exception.NoAnswer as e:
            self.resume_later(e)
            raise
        try:
            yield
        except BaseException as e:
            self._resume_after(e)
            raise
        self._domain.resume()

    def _resume_after(self, error: BaseException) -> None:
        """Where this is one of several, it may have given no answer before another one has failed
        to go on.
        """
        own = libvirt_call.unanswered(error, self.name)
        if own is not None:
            self.resume_later(own)
        else:
            self._domain.resume()

    def resume_later(self, error: exception.NoAnswer) -> None:
        """Have its vCPUs run when what it has not answered has ended."""
        bare = libvirt_call.bare(self._domain)
        libvirt_call.afterwards(error, lambda _answer: bare.resume())
        LOG.warning(
            'The domain %s was paused, and does not answer: it goes on when it does. If this '
            "process ends before: 'virsh resume %s'",
            self.name,
            self.name,
        )

    def running(self) -> bool:
        """Whether its vCPUs run."""
        state, _reason = self._domain.state()
        return bool(state == libvirt_host.binding('libvirt').VIR_DOMAIN_RUNNING)

    def paused_on_purpose(self) -> bool:
        """Whether somebody has stopped its vCPUs, and not a full pool, or a crash."""
        libvirt = libvirt_host.binding('libvirt')
        state, reason = self._domain.state()
        return state == libvirt.VIR_DOMAIN_PAUSED and reason in (
            libvirt.VIR_DOMAIN_PAUSED_USER,
            libvirt.VIR_DOMAIN_PAUSED_FROM_SNAPSHOT,
        )

    def has_failed(self) -> bool:
        """Of one that is active and does not run: whether an error has stopped it, or it has ended
        in all but its QEMU.
        """
        libvirt = libvirt_host.binding('libvirt')
        state, reason = self._domain.state()
        return state != libvirt.VIR_DOMAIN_PAUSED or reason in (
            libvirt.VIR_DOMAIN_PAUSED_IOERROR,
            libvirt.VIR_DOMAIN_PAUSED_WATCHDOG,
            libvirt.VIR_DOMAIN_PAUSED_SHUTTING_DOWN,
            libvirt.VIR_DOMAIN_PAUSED_CRASHED,
        )

    def is_busy(self) -> bool:
        """Whether libvirt has a job with it: saves it, starts it, reverts it, ..."""
        libvirt = libvirt_host.binding('libvirt')
        return self.is_starting() or self._domain.jobInfo()[0] != libvirt.VIR_DOMAIN_JOB_NONE

    def is_starting(self) -> bool:
        """Whether libvirt has begun to start it, and is not done with that."""
        libvirt = libvirt_host.binding('libvirt')
        state, reason = self._domain.state()
        return (state, reason) == (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_STARTING_UP)

    def is_whole(self) -> bool:
        """Whether its guest could go on: it has not crashed or powered off, and no store of a
        device was lost.
        """
        return self._status() in ('running', 'paused', 'prelaunch')

    def has_run(self) -> bool:
        """Whether its vCPUs have in this QEMU; that it went back to a checkpoint is no run."""
        return self._status() not in ('prelaunch', 'restore-vm')

    def _status(self) -> str:
        return model.Reader(self.qmp('query-status'), 'query-status', QEMU).string('status')

    def suspend(self) -> None:
        """Stop its vCPUs."""
        self._domain.suspend()

    def resume(self) -> None:
        """Have them run."""
        self._domain.resume()

    def destroy(self) -> None:
        """End its QEMU."""
        self._domain.destroy()

    def arrive(self) -> None:
        """Of a guest that goes on after a gap: switches learn where it is now; its clock is put
        right, if its agent answers, and stays behind otherwise.
        """
        try:
            self.qmp('announce-self', initial=50, max=550, rounds=5, step=100)
        except exception.QmpFailed as e:
            LOG.warning('%s: its network is not announced: %s', self.name, e)
        self.set_clock()

    def set_clock(self) -> bool:
        """Have its guest take the host's time; whether its agent has."""
        return guest_agent.set_clock(self.name, self._domain, libvirt_host.binding('libvirt'))

    def run_guest_hook(self, event: guest_hook.Event, *words: str, seconds: float) -> None:
        """As :func:`pcow_driver.virt.guest_hook.run`."""
        bindings = guest_hook.Bindings(
            libvirt_host.binding('libvirt'), libvirt_host.binding('libvirt_qemu')
        )
        guest_hook.run(self.name, self._domain, bindings, event, *words, seconds=seconds)
