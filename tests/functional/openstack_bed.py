# SPDX-License-Identifier: Apache-2.0
"""The all-in-one that the tests of a module share: setUpModule() calls up(), tearDownModule() calls
down().
"""

from collections.abc import Iterator
import contextlib
import os
from pathlib import Path
import subprocess
import sys
import time

from tools.lib.openstack_aio import allinone
from tools.lib.openstack_aio import hosts
from tools.lib.openstack_aio import settings as settings_module

TOP = Path(__file__).resolve().parents[2]
STATE = TOP / 'build' / 'openstack-test'
POOLS = TOP / 'build' / 'openstack-test-pools'  # a file system that a test may fill
POOLS_SIZE = '8g'
PORT_OFFSET = '700'  # beside one that somebody has running
UP_SECONDS = 580


def tool(*words: str, timeout: float = UP_SECONDS) -> subprocess.CompletedProcess[str]:
    """Run tools/openstack-aio on the bed; what it needs of packages is there (tools/run-tests)."""
    command, *options = words
    return subprocess.run(
        (sys.executable, '-m', 'tools.lib.openstack_aio', command, '--state', str(STATE), *options),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=TOP,
    )


def must(*words: str) -> str:
    done = tool(*words)
    if done.returncode:
        raise AssertionError(f'openstack-aio {" ".join(words)}: {done.stdout}{done.stderr}')
    return done.stdout


class Bed:
    def __init__(self) -> None:
        tool('down', '--purge')  # of a run that was killed
        unmount()
        begun = time.monotonic()
        try:
            POOLS.mkdir(parents=True, exist_ok=True)
            subprocess.run(
                ('mount', '-t', 'tmpfs', '-o', f'size={POOLS_SIZE},mode=755', 'tmpfs', POOLS),
                check=True,
            )
            must('up', '--port-offset', PORT_OFFSET, '--pool', str(POOLS))
            self.up_seconds = time.monotonic() - begun
            must('image')
            settings = settings_module.Settings.load(STATE)
            if settings is None:
                raise AssertionError('it keeps no settings')
            self.settings = settings
            self.machine = machine = allinone.AllInOne(settings)
            self.api = machine.api
            self.api.log_in()
            self.hosts = hosts.Hosts(machine)
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def node2(self) -> Iterator[None]:
        """For the context there is a second node; afterwards nothing is placed on it. Once for each
        bed.
        """
        try:
            must('node2')
            yield
        finally:
            self.hosts.fail()
            # Nova has been told; Cinder's scheduler would take it for another minute
            for binary, host in self.api.services('cinder'):
                if (binary, host.partition('@')[0]) == (
                    'cinder-volume',
                    settings_module.NODE2.name,
                ):
                    self.api.call(
                        'cinder', 'PUT', '/os-services/disable', {'binary': binary, 'host': host}
                    )

    def pool_images(self) -> list[str]:
        """Images of servers in the pool; templates stay for the next server."""
        found = self.shell('pcowctl image list nova -f value -c name')
        return [line for line in found.split() if line.startswith('server-')]

    def shell(self, command: str) -> str:
        """What a command prints for a user who has sourced openrc; it must succeed."""
        done = subprocess.run(
            ('bash', '-c', f'. {self.settings.openrc}; {command}'),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if done.returncode:
            raise AssertionError(f'{command}: {done.stdout}{done.stderr}')
        return done.stdout

    def close(self) -> list[str]:
        """What the purge has left in the place of the pools."""
        must('down', '--purge')
        left = os.listdir(POOLS) if POOLS.is_dir() else []
        unmount()
        return left


def unmount() -> None:
    while POOLS.is_mount():
        subprocess.run(('umount', POOLS), check=True)


def report(name: str, text: str) -> None:
    """Keep what a test measured: build/logs/NAME."""
    path = TOP / 'build' / 'logs' / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
