# SPDX-License-Identifier: Apache-2.0
"""A guest's disk outlives the service that asked for it: nbdkit in its unit, and a real systemd."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
import re
import select
import shutil
import signal
import subprocess
import time
from typing import Any

from pcow_driver.common import exception
from pcow_driver.export import nbdkit
from pcow_driver.export import nbdkit_unit
from tests.functional import qmp
from tests.vm import machine

# What tests/vm/contents.py puts where.
_NAMES = ('pcow-nbd.socket', 'pcow-nbd@.service')
UNITS = {f'etc/systemd/system/{name}': f'/etc/systemd/system/{name}' for name in _NAMES}
PROGRAM = '/usr/local/bin/pcow-nbd-unit'
PYTHON = (
    '/usr/bin/env PYTHONPATH=/suite:/suite/site PATH=/usr/local/bin:/usr/bin:/sbin '
    '/usr/bin/python3 -B -c'
)
_TEXT = 'import sys; from pcow_driver.export import nbdkit_unit; sys.exit(nbdkit_unit.main())'
PROGRAM_TEXT = f'#!/bin/sh\nexec {PYTHON} "{_TEXT}"\n'

_USER, _GROUP = 'daemon', 'pcow'
_PLACE = Path('/var/lib/disk-unit')
_IMAGE, _DIRECTORY = _PLACE / 'volume.pcow', _PLACE / 'disk'
_SERVICE = 'pcow-asks.service'  # in the part of nova-compute
_LOG = Path('/var/log/disk-unit.log')  # there is no journal
_LOG_TEXT = f"""\
[Service]
StandardOutput=append:{_LOG}
StandardError=append:{_LOG}
"""
_UNIT_TEXT = (
    _LOG_TEXT
    + f"""\
Type=exec
User={_USER}
SupplementaryGroups={_GROUP}
ExecStart={PYTHON} "from pcow_driver.export import nbd; import os, time; \\
    os.path.exists('{_DIRECTORY}') or nbd.start('{_DIRECTORY}', '{_IMAGE}'); time.sleep(10000)"
"""
)
_STOP = (
    f"import grp, os, pwd; from pcow_driver.export import nbd; user = pwd.getpwnam('{_USER}'); "
    f"os.setgroups([grp.getgrnam('{_GROUP}').gr_gid]); os.setgid(user.pw_gid); "
    "os.setuid(user.pw_uid); "
    f"nbd.stop('{_DIRECTORY}')"
)
_SECONDS = 120.0
_MIB = 1 << 20


def _must(*words: object) -> str:
    done = subprocess.run(
        [*map(str, words)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        raise machine.Failure(f'{" ".join(map(str, words))}: {done.stdout}{done.stderr}{_said()}')
    return done.stdout


def _said() -> str:
    """What the service and the units printed."""
    return _LOG.read_text(errors='replace')[-3000:] if _LOG.exists() else ''


def _wait(what: str, condition: Any) -> Any:
    """Until it gives something.

    :raises Failure: it does not
    """
    limit = time.monotonic() + _SECONDS
    while not (found := condition()):
        if time.monotonic() > limit:
            raise machine.Failure(f'{what}: not within {_SECONDS:.0f} s; {_said()}')
        time.sleep(0.2)
    return found


def _expect(condition: object, what: object) -> None:
    if not condition:
        raise machine.Failure(str(what))


def _pid() -> int:
    """Of the nbdkit that serves, or 0."""
    with contextlib.suppress(OSError, ValueError):
        pid = int((_DIRECTORY / 'nbdkit.pid').read_text())
        if b'nbdkit' in Path(f'/proc/{pid}/cmdline').read_bytes():
            return pid
    return 0


def _units() -> list[str]:
    listed = _must('systemctl', 'list-units', '--plain', '--no-legend', 'pcow-nbd@*')
    return re.findall(r'pcow-nbd@\S+\.service', listed)


class _Qemu:
    """One that has the disk, and tries for a minute when it goes away."""

    def __init__(self) -> None:
        control = _PLACE / 'qmp'
        # what qemu-io says goes to stdout, and to a terminal at once
        self._output, terminal = os.openpty()
        self._process = subprocess.Popen(
            [
                '/usr/local/bin/qemu-system-x86_64',
                '-machine',
                'none',
                '-nodefaults',
                '-display',
                'none',
                '-qmp',
                f'unix:{control},server=on,wait=off',
                '-blockdev',
                'driver=nbd,node-name=disk,reconnect-delay=60,server.type=unix,'
                f'server.path={_DIRECTORY / nbdkit.SOCKET}',
            ],
            stdin=subprocess.DEVNULL,
            stdout=terminal,
        )
        os.close(terminal)
        self._channel = qmp.Qmp(qmp.connect(control, self._process))

    def close(self) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait()
        os.close(self._output)

    def io(self, command: str) -> None:
        """:raises Failure: it fails, or says nothing"""
        self._channel.run('human-monitor-command', command_line=f'qemu-io disk "{command}"')
        said = ''
        while select.select([self._output], [], [], 5 if 'ops' not in said else 0)[0]:
            said += os.read(self._output, 4096).decode(errors='replace')
        done = re.search(r'(?:wrote|read) 4096/4096', said) and 'failed' not in said
        _expect(done, f'{command}: {said}')


def _survives() -> dict[str, Any]:
    _must('systemctl', 'start', 'pcow-nbd.socket')
    _must('systemctl', 'start', _SERVICE)
    pid = _wait('nbdkit', _pid)
    status = Path(f'/proc/{pid}/status').read_text()
    group = Path(f'/proc/{pid}/cgroup').read_text()
    _expect('pcow-nbd@' in group and _SERVICE not in group, f'nbdkit is in {group}')
    user = _DIRECTORY.stat().st_uid
    _expect(f'\nUid:\t{user}\t{user}\t{user}\t{user}\n' in status, status)
    _expect(re.search(r'^CapPrm:\t0+$', status, re.MULTILINE), status)
    with contextlib.closing(_Qemu()) as qemu:
        qemu.io('write -P 0x11 0 4k')
        _must('systemctl', 'restart', _SERVICE)
        qemu.io('read -P 0x11 0 4k')
        _expect(_pid() == pid, 'nbdkit is another one after a restart of the service')
        (_DIRECTORY / nbdkit.SOCKET).chmod(0o640)
        before = (_DIRECTORY / nbdkit.SOCKET).stat()
        os.kill(pid, signal.SIGKILL)
        begun = time.monotonic()
        qemu.io('write -P 0x22 4k 4k')
        away = time.monotonic() - begun
        after = (_DIRECTORY / nbdkit.SOCKET).stat()
        _expect(
            (before.st_mode, before.st_gid) == (after.st_mode, after.st_gid),
            'the socket has another owner or mode',
        )
        _expect(_pid() not in (0, pid), 'nbdkit was not started again')
    _must('systemctl', 'stop', _SERVICE)
    _expect(_pid(), 'nbdkit has ended with the service')
    # as in a container, which sees none of the processes of the host
    _must('unshare', '--pid', '--fork', '--mount-proc', '/bin/sh', '-c', f'exec {PYTHON} "{_STOP}"')
    _expect(not _pid() and not _DIRECTORY.exists(), 'nbdkit goes on')
    _wait('the unit goes', lambda: not _units())
    return {'seconds until QEMU was connected again': round(away, 1)}


def _dies_without() -> None:
    """What this test is about: without the unit nbdkit is one of the processes of the service."""
    _must('systemctl', 'stop', 'pcow-nbd.socket')
    _expect(not nbdkit_unit.is_there(), f'{nbdkit_unit.SOCKET} is still there')
    _must('systemctl', 'start', _SERVICE)
    pid = _wait('nbdkit', _pid)
    _expect(
        _SERVICE in Path(f'/proc/{pid}/cgroup').read_text(),
        'nbdkit is not in the unit of the service',
    )
    _must('systemctl', 'stop', _SERVICE)
    _expect(not Path(f'/proc/{pid}').exists(), 'nbdkit has outlived the service without a unit')


def _refuses() -> None:
    """Who asks for a directory of somebody else gets an answer, and nothing else."""
    _must('systemctl', 'start', 'pcow-nbd.socket')
    for theirs, words in (
        (Path('/var/lib/theirs'), 'no directory of the one who asks'),
        # root does not even look at what the service may exchange
        (_PLACE / 'theirs', 'the directory above it belongs to another user'),
    ):
        theirs.mkdir()
        shutil.chown(theirs, 'nobody')
        try:
            nbdkit_unit.stop(str(theirs))
        except exception.ToolFailed as e:
            _expect(words in str(e), e)
        else:
            raise machine.Failure('a directory of somebody else was taken')
        _expect(not list(theirs.iterdir()), 'something was made in the directory of somebody else')
    _wait('the units go', lambda: not _units())


def run() -> dict[str, Any]:
    for path in (_PLACE, _PLACE / 'pool'):
        path.mkdir(mode=0o755)
        shutil.chown(path, _USER)
    _must('/usr/local/bin/pcow-img', 'create', '-f', 'pcow', _IMAGE, f'{16 * _MIB}')
    shutil.chown(_IMAGE, _USER)
    unit = Path('/run/systemd/system') / _SERVICE
    unit.write_text(_UNIT_TEXT)
    drop_in = Path('/run/systemd/system/pcow-nbd@.service.d/log.conf')
    drop_in.parent.mkdir()
    drop_in.write_text(_LOG_TEXT)
    _LOG.parent.mkdir(exist_ok=True)
    _must('systemctl', 'daemon-reload')
    figures = _survives()
    _refuses()
    _dies_without()
    return figures
