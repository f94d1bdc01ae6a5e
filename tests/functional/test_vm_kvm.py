# SPDX-License-Identifier: Apache-2.0
"""tools/vm-test: guests on pcow images under real KVM faults, and the same under TCG. Needs root
and what tools/build makes.
"""

import json
import os
from pathlib import Path
import random
import signal
import subprocess
import sys
import tempfile
from typing import Any

import testtools

from pcow_driver.common import units
from tests.functional import images
from tests.functional import long
from tests.functional import test_main_job as main_job
from tests.functional import test_qemu_backend as backend
from tests.vm import caches
from tests.vm import kernels

SECONDS = 3000 + float(os.environ.get('PCOW_RANDOM_SECONDS', '0'))
CACHE = Path(os.environ.get('PCOW_CACHE_DIR', '/var/cache/pcow'))
UNREACHABLE = kernels.Unreachable.msg_fmt.partition('%')[0]


def left(runs: list[str]) -> set[str]:
    """Names of what tests.vm and these runs leave in the places where they work; other runs may
    work there as well.
    """
    places = (Path('/dev/shm'), main_job.RUNS, CACHE / 'quickstart')
    return {
        str(path)
        for place in places
        if place.is_dir()
        for path in place.iterdir()
        if any(name in path.name for name in ('vm-test', *runs))
    }


class VmTestCase(testtools.TestCase):
    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start tests.vm; it is ended with the test."""
        errors = tempfile.TemporaryFile('w+')
        self.addCleanup(errors.close)
        process = subprocess.Popen(
            [sys.executable, '-m', 'tests.vm', *arguments],
            cwd=images.TOP,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {'PYTHONUNBUFFERED': '1'} | environment,
        )
        self.errors = errors
        self.addCleanup(self.finish, process)
        return process

    def finish(self, process: subprocess.Popen[str]) -> None:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
        if process.stdout is not None:
            process.stdout.close()

    def run_all(self, *arguments: str) -> list[dict[str, Any]]:
        """Results of a run that must pass."""
        process = self.start(*arguments, '--output', 'json')
        output, _nothing = process.communicate(timeout=SECONDS)
        self.errors.seek(0)
        self.assertEqual(0, process.returncode, self.errors.read() + output)
        found: list[dict[str, Any]] = json.loads(output)
        for result in found:
            self.assertTrue(result['passed'], result)
        return found

    def assert_trapped(self, result: dict[str, Any], engine: str) -> None:
        """Stores were caught, by the engine that is for this accelerator."""
        self.assertEqual(engine, result['figures']['engine'], result)
        self.assertGreater(result['figures']['stats']['write-traps'], 20, result)
        self.assertGreater(result['figures']['stats']['pages-copied'], 100, result)


class KvmTest(VmTestCase):
    """Nearly all scenarios; see "Limits" in doc/source/contributor/testing.rst."""

    SCENARIOS = (
        'stores@tmpfs',
        'snapshots@tmpfs',
        'pool-full@tmpfs',
        'guest-ram@tmpfs',
        'vhost@tmpfs',
    )
    SCENARIOS_LONG = (
        'full-emulated@tmpfs',
        'saved-state@tmpfs',
        'live-migration@tmpfs',
        'transfers@pmem',
        'debian@pmem',
        'debian-flush@page-cache',
        'transfers@tmpfs',
        'vhost-full@tmpfs',
        'vhost-vsock@tmpfs',
        'stores@pmem',
        'virtio-pmem@tmpfs',
    )
    PERSISTENCE = {'tmpfs': 'volatile', 'pmem': 'pmem', 'page-cache': 'page-cache'}
    # in another outer machine
    MEDIA = ('full-fails@tmpfs',)
    MEDIA_LONG = ('media-errors@pmem', 'media-errors@tmpfs', 'media-deaf@tmpfs', 'media-many@tmpfs')
    # What depends on the kernel of the host most: how KVM tells of a store, and what it does with
    # one that it emulates itself.
    NEWER = ('stores@tmpfs', 'pool-full@tmpfs', 'full-emulated@tmpfs', 'vhost@tmpfs')
    TRIES = 2
    # mostly none; an interrupt that uses another stack may come at any time
    FEW_WATCHES = 6
    SHOWN = 8000  # bytes of an error

    def run_scenarios(self, wanted: tuple[str, ...], *more: str) -> dict[str, dict[str, Any]]:
        """Results by scenario@pool, good or bad."""
        process = self.start(
            'kvm',
            *(word for name in wanted for word in ('--only', name)),
            *more,
            '--output',
            'json',
        )
        output, _nothing = process.communicate(timeout=SECONDS)
        self.errors.seek(0)
        errors = self.errors.read()
        if process.returncode and not output and UNREACHABLE in errors:
            self.skipTest(errors.strip())
        self.assertTrue(output.startswith('['), errors + output)
        return {f'{result["name"]}@{result["pool"]}': result for result in json.loads(output)}

    def run_steady(self, scenarios: tuple[str, ...], *more: str) -> dict[str, dict[str, Any]]:
        """Results of scenarios that must pass."""
        found: dict[str, dict[str, Any]] = {}
        for number in range(self.TRIES):
            # Wrong bytes, a guest that starts anew, a crash or an error fail at once: only silence,
            # and packets that a busy machine lost, are tried again.
            wanted = tuple(
                name for name in scenarios if name not in found or found[name].get('silent')
            )
            if not wanted:
                break
            found |= self.run_scenarios(wanted, *more)
            for name in wanted:
                if name in found and not found[name]['passed']:
                    print(f'try {number + 1} of {name}: {found[name]["error"]}', file=sys.stderr)
        for name in scenarios:
            if not found[name]['passed']:
                self.fail(f'{name}: {found[name].get("error", "")[: self.SHOWN]}')
            self.assertEqual('kvm', found[name]['accel'])
        return found

    def test_scenarios(self) -> None:
        wanted = self.SCENARIOS + (self.SCENARIOS_LONG if long.LONG else ())
        found = self.run_steady(wanted)
        for name in wanted:
            self.assertEqual(
                self.PERSISTENCE[name.partition('@')[2]], found[name]['figures']['persistence']
            )
            self.assert_trapped(found[name], 'kvm')
            self.assertRegex(found[name]['kernel'], r'6\.1\.')
        # userfaultfd had nothing to find out: every address came from the instruction
        self.assertEqual(0, found['stores@tmpfs']['figures']['stats']['watches'], found)
        # but those of an exception with a stack of its own; page tables and other interrupts were
        # guessed (34 watches without that)
        ram = found['guest-ram@tmpfs']['figures']['ram']
        self.assertLess(ram['watches'], self.FEW_WATCHES, ram)
        self.assertGreater(ram['watches-for-traps'], 0, ram)

    def run_on_host(self, suite: str, at_least: tuple[int, int]) -> dict[str, dict[str, Any]]:
        """Results under the kernel of another Debian suite. What KVM tells of a store, and how, is
        the host kernel's doing.
        """
        found = self.run_steady(self.NEWER, '--host-kernel', suite)
        for name in self.NEWER:
            major, minor = found[name]['kernel'].split('.')[:2]
            self.assertGreaterEqual((int(major), int(minor)), at_least)
            self.assert_trapped(found[name], 'kvm')
        self.assertEqual(0, found['stores@tmpfs']['figures']['stats']['watches'], found)
        # vhost of 6.1 does not let a guest make its queues anew
        self.assertTrue(found['vhost@tmpfs']['figures']['resizes'], found['vhost@tmpfs'])
        return found

    @long.only_long
    def test_kernel_of_debian_13(self) -> None:
        self.run_on_host('trixie', (6, 12))

    @long.only_long
    def test_newer_kernel(self) -> None:
        """The newest that there is a package of."""
        self.run_on_host('trixie-backports', (7, 0))

    def test_media_errors(self) -> None:
        """Stores that a full pool refuses; and pages that the host's kernel declares to be lost."""
        wanted = self.MEDIA + (self.MEDIA_LONG if long.LONG else ())
        found = self.run_steady(wanted)
        for name in wanted:
            if name.startswith('media-errors@'):
                figures = found[name]['figures']
                self.assertEqual(7, figures['lost'])
                self.assertEqual(self.PERSISTENCE[name.partition('@')[2]], figures['persistence'])
        self.assertEqual(7, found['full-fails@tmpfs']['figures']['refused'])


class TcgTest(VmTestCase):
    SCENARIOS = ('stores', 'pool-full', 'guest-ram', 'virtio-pmem')

    def check(self, found: list[dict[str, Any]]) -> None:
        for result in found:
            self.assertEqual('tcg', result['accel'])
            self.assert_trapped(result, backend.default_engine())

    def test_some(self) -> None:
        found = self.run_all('tcg', *(word for name in self.SCENARIOS for word in ('--only', name)))
        self.assertEqual([*self.SCENARIOS], [item['name'] for item in found])
        self.check(found)

    @long.only_long
    def test_all(self) -> None:
        found = self.run_all('tcg')
        self.assertLess(
            {*self.SCENARIOS, 'debian', 'debian-flush'}, {item['name'] for item in found}
        )
        self.check(found)


class FsdaxTest(VmTestCase):
    def test_library_on_dax(self) -> None:
        found = self.run_all(
            'fsdax', '--only', 'test_snapshot@ext4', '--only', 'random@xfs', '--only', 'journal'
        )
        for kind in ('ext4', 'xfs'):
            results = {
                result['name']: result['figures'] for result in found if result['pool'] == kind
            }
            self.assertEqual('pmem', results['namespace']['persistence'])
            self.assertIn('dax=always', results['namespace']['mount'])
            if kind == 'xfs':
                self.assertGreater(results['random']['stores'], 100, results['random'])
            for what in ('first touch', 'copy-on-write'):
                figures = results['journal'][what]
                self.assertEqual(0, figures['commits-by-storing-thread'], results['journal'])
                self.assertLess(figures['journal-writes'], figures['pages'] // 100)

    @long.only_long
    def test_session_of_pools(self) -> None:
        """pcowctl from bare regions on, as in the operator guide."""
        found = [item['name'] for item in self.run_all('fsdax', '--only', 'pools-session')]
        self.assertEqual(['pool-session'], found)

    @long.only_long
    def test_pools(self) -> None:
        """Also what is refused or killed, a reboot under systemd, and damaged labels."""
        found = {
            result['name']: result['figures'] for result in self.run_all('fsdax', '--only', 'pools')
        }
        names = ('session', 'other', 'refusals', 'odd', 'killed', 'rebooted', 'damaged')
        self.assertEqual({f'pool-{name}' for name in names}, set(found))
        self.assertGreater(len(found['pool-refusals']['session']), 7)

    @long.only_long
    def test_confinement(self) -> None:
        """A QEMU that a guest has broken out of, and disks that outlive the service which began
        them.
        """
        found = {
            result['name']: result['figures']
            for result in self.run_all('fsdax', '--only', 'confinement')
        }
        self.assertEqual({'confinement-domains', 'confinement-disk'}, {*found})
        print('\n'.join(found['confinement-domains']['table']), file=sys.stderr)

    def check_power_cuts(self, scenario: str, cuts: int) -> None:
        found = self.run_all('fsdax', '--only', scenario)
        self.assertEqual('power-begin', found[0]['name'])
        losses = [result['figures'] for result in found if result['name'] == 'power-caches']
        self.assertEqual(cuts, len(losses))
        self.assertGreater(sum(loss['lost'] for loss in losses), 0)
        self.assertGreater(found[-1]['figures']['steps'], 10 * cuts)
        self.assertGreater(found[-1]['figures']['snapshots'], 0)
        # each load is long enough for one: checkpoints with RAM on an image were looked at
        looked_at = [result['figures'] for result in found if '-verify-' in result['name']]
        self.assertEqual(cuts, len(looked_at))
        for figures in looked_at:
            self.assertGreater(figures['checkpoints'], 0)

    def test_power_cuts(self) -> None:
        self.check_power_cuts('caches-twice', 2)

    @long.only_long
    def test_more_power_cuts(self) -> None:
        """One of them loses nothing of the caches, as all of the scenario power, which is for runs
        by hand.
        """
        self.check_power_cuts('caches', 4)

    @long.only_long
    def test_a_protected_vm(self) -> None:
        """Through a shutdown of its host, a power cut and a panic of the host's kernel."""
        found = self.run_all('fsdax', '--only', 'persist')
        goes_on = [result['figures'] for result in found if '-verify-' in result['name']]
        self.assertEqual(
            ['fixation', 'auto', 'auto'], [figures['from'].split('-')[1] for figures in goes_on]
        )
        for figures in goes_on:
            self.assertGreaterEqual(figures['generation'], figures['least'])
        lost = {
            result['name']: result['figures']['lost']
            for result in found
            if '-lost-' in result['name']
        }
        self.assertGreater(lost['persist-lost-load'], 0)


class CachesTest(testtools.TestCase):
    """What a power cut takes away."""

    def cut(self, eviction: float) -> tuple[caches.Loss, int]:
        """Cut a memory of 2 MiB of which every line differs from the media but 32; and how many
        lines are kept.
        """
        with tempfile.TemporaryDirectory() as scratch:
            memory = Path(scratch, 'nvdimm')
            memory.write_bytes(bytes(units.MIB))
            caches.begin([memory])
            lines = units.MIB // caches.LINE - 32
            memory.write_bytes(
                b'\1' * (lines * caches.LINE) + bytes(32 * caches.LINE) + bytes(units.MIB)
            )
            os.truncate(caches.media_of(memory), 2 * units.MIB)
            loss = caches.cut([memory], random.Random(1), eviction)
            self.assertEqual(lines, loss.lost + loss.evicted)
            self.assertFalse(caches.media_of(memory).exists())
            return loss, memory.read_bytes().count(b'\1') // caches.LINE

    def test_all_is_lost(self) -> None:
        self.assertEqual((caches.Loss(units.MIB // caches.LINE - 32, 0), 0), self.cut(0.0))

    def test_part_was_evicted(self) -> None:
        loss, kept = self.cut(0.5)
        self.assertEqual(loss.evicted, kept)
        self.assertTrue(loss.lost > 1000 and loss.evicted > 1000, loss)


class CommandTest(VmTestCase):
    def test_interrupted_while_the_machine_boots(self) -> None:
        before = left([])
        process = self.start('kvm', '--only', 'plain-file', '--verbose')
        assert process.stdout is not None
        self.assertIn('prepared', process.stdout.readline())
        runs = main_job.runs_of(process.pid)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        self.assertEqual(128 + signal.SIGINT, process.returncode)
        self.assertLessEqual(left(runs), before)
        self.assertEqual([], main_job.runs_of(process.pid))

    def test_kernel_that_cannot_be_had(self) -> None:
        """What has the test above skipped."""
        nowhere = Path(tempfile.gettempdir(), 'no-such-mirror').as_uri()
        process = self.start(
            'kvm',
            '--only',
            'plain-file',
            '--host-kernel',
            'no-such-suite',
            PCOW_DEBIAN_MIRROR=nowhere,
        )
        output, _nothing = process.communicate(timeout=SECONDS)
        self.errors.seek(0)
        message = self.errors.read()
        self.assertEqual((1, ''), (process.returncode, output), message)
        self.assertIn(UNREACHABLE, message)
        self.assertIn('no-such-suite', message)

    def test_unknown_scenario(self) -> None:
        process = self.start('kvm', '--only', 'nothing')
        process.communicate(timeout=60)
        self.errors.seek(0)
        message = self.errors.read()
        self.assertEqual(2, process.returncode, message)
        self.assertIn("no scenario nothing", message)
        self.assertIn('stores', message)
