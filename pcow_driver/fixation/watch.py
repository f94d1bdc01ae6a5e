# SPDX-License-Identifier: Apache-2.0
"""The loop that keeps protected VMs: it takes their checkpoints, and has those go on that were
killed.

Each second it asks libvirt of each domain. What it does then is done by a thread of the domain, so
that one that hangs keeps no other one waiting. It may be ended and started at any time: all that it
has to know is in the records.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time

from oslo_log import log as logging

from pcow_driver.common import exception
from pcow_driver.fixation import automatic
from pcow_driver.fixation import policy
from pcow_driver.fixation import records
from pcow_driver.fixation import recover
from pcow_driver.virt import domain

LOG = logging.getLogger(__name__)

PERIOD = 1.0  # seconds
_THREADS = 16  # domains at once
_RETRY = 60.0  # seconds after a checkpoint that could not be taken


class Watch:
    """Of all domains of the host. :meth:`run` is one thread's, :meth:`end` any's."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._jobs: dict[str, concurrent.futures.Future[None]] = {}  # by name
        self._armed: dict[str, tuple[int, str]] = {}  # run and policy, by UUID
        # time.monotonic() of the last checkpoint, and of the last one that could not be taken
        self._taken: dict[str, float] = {}  # by UUID
        self._failed: dict[str, float] = {}
        self._said: dict[str, str] = {}  # the last problem, by name

    def end(self) -> None:
        """What is under way comes to its end."""
        self._ended.set()

    def run(self) -> None:
        """Until :meth:`end`. While libvirt does not answer it waits for that."""
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            while not self._ended.is_set():
                try:
                    with domain.connect() as connection:
                        names = domain.names_of_all(connection)
                    self._say('', '')
                except exception.LibvirtFailed as e:
                    self._say('', str(e))
                    names = []
                for name in names:
                    job = self._jobs.get(name)
                    if job is None or job.done():
                        self._jobs[name] = pool.submit(self._look_safely, name)
                for name in self._jobs.keys() - set(names):
                    if self._jobs[name].done():
                        del self._jobs[name]
                self._ended.wait(PERIOD)

    def _look_safely(self, name: str) -> None:
        try:
            with domain.connect() as connection:
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
        if wanted is None and records.read(found.uuid) is None:
            return
        with records.alone(found.uuid):
            self._decide(found, wanted, records.read(found.uuid))

    def _decide(
        self, found: domain.Domain, wanted: policy.Policy | None, record: records.Record | None
    ) -> None:
        if wanted is None:
            if record is not None:
                records.forget(found.uuid)
        elif found.active():
            if record is None or record.state is not records.State.RUNS:
                record = records.Record(records.State.RUNS)
                records.write(found.uuid, record)
            self._arm(found, wanted)
            self._take_if_due(found, wanted, record)
        elif record is not None and record.state is records.State.RUNS:
            if found.stopped_on_purpose():
                records.forget(found.uuid)
            elif not self._ended.is_set():
                recover.recover(found, record)

    def _arm(self, found: domain.Domain, wanted: policy.Policy) -> None:
        """Have its QEMU keep the last moment when it is told to end: nobody may be there to ask for
        that then.
        """
        now = (found.run_id(), wanted.on_shutdown)
        if self._armed.get(found.uuid) == now:
            return
        if wanted.on_shutdown == policy.FIXATE:
            found.qmp('pcow-checkpoint-at-signal', prefix=automatic.FIXATION)
        else:
            found.qmp('pcow-checkpoint-at-signal')
        self._armed[found.uuid] = now

    def _take_if_due(
        self, found: domain.Domain, wanted: policy.Policy, record: records.Record
    ) -> None:
        seconds = automatic.seconds_between(wanted, record.durable)
        now, never = time.monotonic(), float('-inf')
        if (
            seconds is None
            or now < self._taken.get(found.uuid, never) + seconds
            or now < self._failed.get(found.uuid, never) + _RETRY
            or not found.running()  # it is what it was, or has crashed
        ):
            return
        self._failed[found.uuid] = now
        name, taken = automatic.take(found, automatic.PERIODIC)
        del self._failed[found.uuid]
        self._taken[found.uuid] = now
        records.write(
            found.uuid, records.Record(records.State.RUNS, checkpoint=name, durable=taken.durable)
        )
        automatic.thin(found)

    def _say(self, name: str, problem: str) -> None:
        """Once, until it changes."""
        if problem and self._said.get(name) != problem:
            LOG.error('%s: %s', name or 'libvirt', problem)
        self._said[name] = problem
