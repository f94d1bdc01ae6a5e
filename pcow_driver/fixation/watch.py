# SPDX-License-Identifier: Apache-2.0
"""The loop that keeps protected VMs: it takes their checkpoints, and has those go on that were
killed.

Each second it asks libvirt of each domain. What it does then is done by a thread of the domain, so
that one that hangs keeps no other one waiting, nor the loop from its end. It may be ended and
started at any time: all that it has to know is in the records.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Container
import dataclasses
import math
import threading
import time

from oslo_log import log as logging

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.fixation import at_signal
from pcow_driver.fixation import automatic
from pcow_driver.fixation import due
from pcow_driver.fixation import fixate
from pcow_driver.fixation import policy
from pcow_driver.fixation import records
from pcow_driver.fixation import recover
from pcow_driver.fixation import runs
from pcow_driver.virt import domain
from pcow_driver.virt import libvirt_host

LOG = logging.getLogger(__name__)

PERIOD = 1.0  # seconds
_THREADS = 16  # domains at once, without those that hang
_HANGS = 30.0  # seconds after which one is among these
_END = 15.0  # seconds in which what is under way may come to its end
_RETRY = 60.0  # seconds after a recovery that failed
_GONE = 10.0  # seconds after which a domain that its owner has undefined has nothing to go on with
_LONG = 600.0  # seconds after which a VM that ends did not do so for what it went on from
_STAYS_UP = 1800.0  # seconds after a fixation, if systemd does not end the host then
_TURN = 0.001  # seconds after which one may have come to its end
_STEP = 0.1  # seconds in which the loop learns that it has to end


def _host_goes_down() -> bool:
    """Whether systemd ends its services."""
    try:
        program = tool.find_system('systemctl', 'systemd')
        # 1: degraded, starting, ...
        return tool.run(program, 'is-system-running', ok_exit_codes=(0, 1)).strip() == 'stopping'
    except exception.PcowError:  # it is not the one that runs here
        return False


@dataclasses.dataclass(frozen=True)
class _Job:
    thread: threading.Thread
    begun: float  # time.monotonic()

    def is_done(self) -> bool:
        return not self.thread.is_alive()

    def hangs(self) -> bool:
        return time.monotonic() >= self.begun + _HANGS


class Watch:
    """Of all domains of the host. :meth:`run` is one thread's, :meth:`end` any's, and that of a
    handler of signals.
    """

    def __init__(self) -> None:
        self._ended = False
        self._until = math.inf  # time.monotonic() until which something may begin
        self._jobs: dict[str, _Job] = {}  # by name, or the UUID of one that is gone
        self._busy: list[_Job] = []  # without those that hang
        self._runs: dict[str, tuple[int, str]] = {}  # libvirt's number and the run, by UUID
        self._armed: dict[str, tuple[str, str]] = {}  # run and policy
        self._due = due.Due()
        self._recovered: dict[str, float] = {}  # time.monotonic() of one that failed
        self._said: dict[str, str] = {}  # the last problem, by name
        self._gone: dict[str, float] = {}  # time.monotonic() since when libvirt has none, by UUID

    def end(self) -> None:
        """What is under way comes to its end, unless it hangs."""
        self._until = time.monotonic() + _END
        self._ended = True

    def run(self) -> None:
        """Until :meth:`end`. While libvirt does not answer it waits for that."""
        while not self._ended:
            self._look_at_all()
            end = time.monotonic() + PERIOD
            while not self._ended and time.monotonic() < end:
                time.sleep(_STEP)
        self._wait()
        # The guests that were shut down with the host, the last one just now
        self._until = time.monotonic() + _END
        self._look_at_all()
        self._wait()

    def _wait(self) -> None:
        for job in self._jobs.values():
            job.thread.join(max(0.0, self._until - time.monotonic()))
        self._busy.clear()

    def _look_at_all(self) -> None:
        try:
            with libvirt_host.connect() as connection:
                there = libvirt_host.names_by_uuid(connection)
            self._say('', '')
        except exception.LibvirtFailed as e:
            self._say('', str(e))
            self._runs.clear()  # it may begin anew with its numbers
            return
        for name in there.values():
            job = self._jobs.get(name)
            if job is None or job.is_done():
                self._begin(name, self._look_safely)
        self._forget_gone(there)
        for name in self._jobs.keys() - set(there.values()):
            if self._jobs[name].is_done():
                del self._jobs[name]

    def _forget_gone(self, there: Container[str]) -> None:
        """What is known of domains that their owner has undefined: one that it defines anew boots,
        or is somewhere else.
        """
        now = time.monotonic()
        gone = [uuid for uuid in records.all_uuids() if uuid not in there]
        self._gone = {uuid: self._gone.get(uuid, now) for uuid in gone}
        for uuid, since in self._gone.items():
            job = self._jobs.get(uuid)
            if now >= since + _GONE and (job is None or job.is_done()):
                self._begin(uuid, self._forget_safely)

    def _forget_safely(self, uuid: str) -> None:
        try:
            with records.alone(uuid):
                record = records.read(uuid)
                if record is not None and record.owner:
                    records.forget(uuid)
        except exception.PcowError as e:
            self._say(uuid, str(e))

    def _begin(self, name: str, work: Callable[[str], None]) -> None:
        while len(self._busy) >= _THREADS:
            if time.monotonic() >= self._until:
                return
            time.sleep(_TURN)
            self._busy = [job for job in self._busy if not job.is_done() and not job.hangs()]
        # It ends with the process: all that it knows is in the records.
        thread = threading.Thread(target=work, args=(name,), daemon=True)
        job = self._jobs[name] = _Job(thread, time.monotonic())
        self._busy.append(job)
        thread.start()

    def _look_safely(self, name: str) -> None:
        try:
            with libvirt_host.connect() as connection:
                self.look(domain.Domain(connection, name))
            self._say(name, '')
        except exception.PcowError as e:
            self._say(name, str(e))
        except Exception:
            LOG.exception('%s', name)

    def look(self, found: domain.Domain) -> None:
        """Do what is to be done for a domain now.

        :raises PcowError: it could not be done, and is tried again
        """
        wanted = policy.get(found)
        known = found.uuid in self._armed or records.read(found.uuid) is not None
        if wanted is None and not known:
            return
        with records.alone(found.uuid):
            record = records.read(found.uuid)
            if wanted is None:
                self._let_go(found)
            elif not found.active():
                self._look_at_off(found, wanted, record)
            elif not self._is_just_started(found, wanted, record):
                self._look_at_active(found, wanted, record)

    @staticmethod
    def _is_just_started(
        found: domain.Domain, wanted: policy.Policy, record: records.Record | None
    ) -> bool:
        """Whether its owner is about to have it run."""
        if not wanted.owner or found.running():
            return False
        recovers = record is not None and record.state is records.State.RECOVERING
        return not (recovers or found.has_run())

    def _let_go(self, found: domain.Domain) -> None:
        """It is not protected any more."""
        if found.active():
            self._arm(found, '')
        self._armed.pop(found.uuid, None)
        records.forget(found.uuid)

    def _look_at_active(
        self, found: domain.Domain, wanted: policy.Policy, record: records.Record | None
    ) -> None:
        if record is not None and record.state is records.State.RECOVERING:
            if found.is_starting():
                return
            if recover.is_cut_off(found, record):
                if self._may_recover(found):
                    recover.finish(found, record, wanted)
                    del self._recovered[found.uuid]
                return
            record = None  # somebody has started it
        if record is None or record.run != self._run_of(found):
            record = runs.begun(found)
            records.write(found.uuid, record)
            if found.autostart():
                LOG.error(
                    '%s: libvirt starts it when the host comes up, and it boots then instead of '
                    'going on: virsh autostart --disable',
                    found.name,
                )
        if record.state is records.State.FIXATED and not found.running():  # its QEMU did not end
            fixate.finish(found)
            return
        if record.state is records.State.FIXATING:  # who did that was killed
            fixate.go_on(found, record)
            return
        if self._ended:
            return
        self._note(found, record, wanted)
        # first: where the pool has no room for a checkpoint, some is kept for the last one
        self._arm(found, wanted.on_shutdown, anew=record.state is records.State.FIXATED)
        self._take_if_due(found, wanted, records.read(found.uuid) or record)

    def _note(self, found: domain.Domain, record: records.Record, wanted: policy.Policy) -> None:
        """What is true of it now."""
        runs_for_long = time.time() - record.since > _LONG
        records.write(
            found.uuid,
            dataclasses.replace(
                record,
                state=records.State.RUNS,
                paused=found.paused_on_purpose(),
                tries=0 if runs_for_long else record.tries,
                outlived=self._outlived_by(record),
                owner=wanted.owner,
            ),
        )

    @staticmethod
    def _outlived_by(record: records.Record) -> float:
        """The last fixation that was none of a host that went down."""
        fixation = records.last_fixation()
        known = fixation == record.outlived or time.time() - fixation <= _STAYS_UP
        # libvirt-guests may wait for one guest after the other, five minutes each
        return record.outlived if known or _host_goes_down() else fixation

    def _look_at_off(
        self, found: domain.Domain, wanted: policy.Policy, record: records.Record | None
    ) -> None:
        self._runs.pop(found.uuid, None)
        self._armed.pop(found.uuid, None)
        if record is None or record.state is records.State.FAILED:
            return
        if record.state is records.State.FIXATED and runs.is_of_this_boot(record):
            return  # the host is yet to go down, or somebody wants it so
        if recover.is_left_to_owner(found, record, wanted):
            return
        if recover.is_to_stay_off(found, record):
            recover.leave_off(found, wanted, record)
        elif not self._ended and self._may_recover(found):
            if recover.recover(found, record, wanted).checkpoint:
                del self._recovered[found.uuid]

    def _may_recover(self, found: domain.Domain) -> bool:
        """Also that it is done now."""
        now = time.monotonic()
        if now < self._recovered.get(found.uuid, -math.inf) + _RETRY:
            return False
        self._recovered[found.uuid] = now
        return True

    def _run_of(self, found: domain.Domain) -> str:
        """As :func:`runs.current`, which has to look at all processes, and so once for each."""
        number = found.libvirt_id()
        known = self._runs.get(found.uuid)
        if known is None or known[0] != number:
            known = self._runs[found.uuid] = (number, runs.current(found))
        return known[1]

    def _arm(self, found: domain.Domain, on_shutdown: str, *, anew: bool = False) -> None:
        """Once for each run of its QEMU, and for each policy.

        :param anew: it may have been told to keep none meanwhile, by who was to end it
        """
        now = (self._run_of(found), on_shutdown)
        if self._armed.get(found.uuid) == now and not anew:
            return
        try:
            at_signal.tell(found, on_shutdown)
        except exception.QmpFailed as e:
            LOG.warning('%s: its QEMU keeps no last moment by itself: %s', found.name, e)
        self._armed[found.uuid] = now

    def _take_if_due(
        self, found: domain.Domain, wanted: policy.Policy, record: records.Record
    ) -> None:
        # one that does not run is what it was, or has crashed
        if not found.running() or not self._due.is_due(found, wanted, record):
            return
        with self._due.attempt(found, record):
            name, taken = automatic.take(found, automatic.PERIODIC)
        records.write(
            found.uuid, dataclasses.replace(record, checkpoint=name, durable=taken.durable)
        )
        automatic.thin(found)

    def _say(self, name: str, problem: str) -> None:
        """Once, until it changes."""
        if problem and self._said.get(name) != problem:
            LOG.error('%s: %s', name or 'libvirt', problem)
        self._said[name] = problem
