# SPDX-License-Identifier: Apache-2.0
"""A QEMU that was stopped (SIGSTOP), under a real libvirtd: who asks it is told on time, and when
it goes on nothing is lost, left over or held.
"""

from collections.abc import Callable
import contextlib
import os
import signal
import time
from typing import Any
from unittest import mock

from pcow_driver.common import conf
from pcow_driver.common import exception
from pcow_driver.common import locks
from pcow_driver.copies import clone
from pcow_driver.pools import registry
from pcow_driver.snapshots import attached
from pcow_driver.virt import domain
from pcow_driver.virt import libvirt_call
from pcow_driver.virt import libvirt_host
from pcow_driver.vm import checkpoint
from tests.functional import images
from tests.functional import libvirt_vm
from tests.functional import long

LIMIT = 2  # seconds
BESIDE = 20  # of what is done before and after the call, on a machine that is busy


class StandingTest(libvirt_vm.HostTestCase):
    guest: libvirt_vm.Guest

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        conf.CONF([], default_config_files=[])
        for option, value in {
            'state_path': str(cls.host.directory / 'pcow'),
            'libvirt_uri': cls.host.daemon.uri,
            'libvirt_timeout': LIMIT,
            'pcow_img': images.program('pcow-img'),
        }.items():
            conf.CONF.set_override(option, value, 'pcow')
            cls.addClassCleanup(conf.CONF.clear_override, option, 'pcow')
        cls.guest = libvirt_vm.Guest(cls.host, 'vm', carrier=False, agent=True, ram=True)
        cls.addClassCleanup(cls.guest.remove)
        cls.guest.start()
        end = time.monotonic() + libvirt_vm.ANSWER_SECONDS
        while not cls.host.try_virsh('guestinfo', cls.guest.name).stdout:
            if time.monotonic() > end:
                raise AssertionError('its agent does not answer')
            time.sleep(0.2)

    def setUp(self) -> None:
        super().setUp()
        self.pid = self.guest.pid()
        self.addCleanup(os.kill, self.pid, signal.SIGCONT)
        self.path = str(self.guest.image)
        self.guest.mark(self.id().rpartition('.')[2])

    @contextlib.contextmanager
    def found(self) -> Any:
        with libvirt_host.connect() as connection:
            yield domain.Domain(connection, self.guest.name)

    def stand(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def no_answer(self, asked: Callable[[], object], call: str) -> None:
        begun = time.monotonic()
        with self.assertRaises(exception.NoAnswer) as caught:
            asked()
        self.assertLess(time.monotonic() - begun, LIMIT + BESIDE)
        self.assertIn(
            f'the domain {self.guest.name} does not answer: {call}', str(caught.exception)
        )
        self.assertIn('virsh destroy', str(caught.exception))

    def goes_on(self) -> None:
        """As if nothing had been: it runs, nothing is left, and all can be done."""
        os.kill(self.pid, signal.SIGCONT)
        end = time.monotonic() + libvirt_vm.ANSWER_SECONDS
        while self.guest.state() != 'running' or 'thawed' not in self.agent('fsfreeze-status'):
            self.assertLess(time.monotonic(), end)
            time.sleep(0.1)
        self.assertEqual(self.id().rpartition('.')[2], self.guest.next_report().mark)
        while self.guest.image_snapshots():
            self.assertLess(time.monotonic(), end)
            time.sleep(0.1)
        self.assertEqual([], locks.held(''))
        attached.snapshot_create(self.path, 'after')
        attached.snapshot_delete(self.path, 'after')
        self.guest.next_report()

    def test_stands_already(self) -> None:
        """Nothing is begun."""
        pool = registry.PoolRegistry().find(os.path.dirname(self.path))
        assert pool is not None
        self.stand()
        self.no_answer(lambda: attached.snapshot_create(self.path, 's1'), 'query-')
        with self.found() as found:
            self.no_answer(lambda: checkpoint.take(found, 'c1'), 'query-')
            wanted = clone.Clone(pool, self.guest.image.stem, pool, 'copy', libvirt_vm.PMEM)
            self.no_answer(lambda: clone.clone([wanted], max_chain=8), 'query-')
        self.goes_on()
        self.assertFalse(os.path.exists(pool.image_path('copy')))

    @long.only_long
    def test_group(self) -> None:
        """It is paused when it goes on, and goes on then."""
        self.stand()
        wanted = [(str(path), 'g1') for path in (self.guest.image, self.guest.ram)]
        self.no_answer(lambda: attached.snapshot_create_all(wanted), 'suspend')
        self.goes_on()

    def check_abandoned(self, words: str, *, quiesce: bool, before: bool) -> None:
        """It stops while a snapshot is made.

        :param before: it is asked for
        """
        check = domain.Domain.check_answers

        def answers(found: domain.Domain) -> None:
            if before:
                self.stand()
            check(found)
            self.stand()

        with (
            self.found() as found,
            mock.patch.object(domain.Domain, 'check_answers', answers),
            mock.patch.object(libvirt_call, '_LONG', 1),
        ):
            self.no_answer(lambda: found.snapshot_create('s1', self.path, quiesce=quiesce), words)
        self.goes_on()

    def test_stops_in_the_midst(self) -> None:
        """QEMU makes the snapshot when it goes on, and it is deleted."""
        self.check_abandoned('pcow-snapshot-create', quiesce=False, before=False)

    @long.only_long
    def test_stops_while_it_is_frozen(self) -> None:
        """Its file systems are thawed."""
        for before, words in ((True, 'query-status'), (False, 'pcow-snapshot-create')):
            with self.subTest(words):
                self.check_abandoned(words, quiesce=True, before=before)

    def agent(self, command: str) -> str:
        """What it answers; nothing if it does not."""
        request = f'{{"execute": "guest-{command}"}}'
        return self.host.try_virsh('qemu-agent-command', self.guest.name, request).stdout
