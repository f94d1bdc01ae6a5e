# SPDX-License-Identifier: Apache-2.0
"""A protected VM on a host that goes down and comes up: what is done inside that host, which has
systemd, libvirt and pcow's services as they are installed.

Its RAM is on XFS and its NVDIMM on ext4, both with DAX. The guest (tests/functional/guest) counts
generations of both, and compares them byte by byte.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import json
import os
from pathlib import Path
import re
import subprocess
import time
from typing import Any
import xml.etree.ElementTree as ET

from pcow_driver.common import units
from pcow_driver.virt import domain_xml
from pcow_driver.virt import libvirt_xml
from tests.functional import moments
from tests.vm import machine

# What tests/vm/persist_host.py puts where.
KERNEL, INITRD, NVDIMM = '/boot/vmlinuz', '/boot/guest-initrd', '/suite/nvdimm.pcow'
EMULATOR = '/usr/local/bin/qemu-system-x86_64'
LOG = '/var/log/pcow.log'
SHUTDOWN = '/run/vm-test.shutdown'  # what boot-suite looks for

NAME = 'web1'
_MEMORY = 160 * units.MIB
_RAM, _DISK = (Path(f'/var/lib/pcow/pools/{pool}/{NAME}.pcow') for pool in ('ram', 'fast'))
_CONSOLE = Path('/run/web1.console')  # that of this boot
_RECORDS = Path('/var/lib/pcow/protected')
_RESULTS = Path('/dev/ttyS1')
_REPORT = re.compile(rb'check: gen=(\d+) mark=\S+ ok\r?\n')
_BAD = re.compile(rb'check: BROKEN [^\r\n]*')
_SECONDS = 300.0
_ANSWERS = 90.0  # in which a guest that runs has said something
_POLL = 0.1
_TOLD = 2  # checkpoints before a panic
_INTERVAL = '10s'


def _must(*words: object) -> str:
    done = subprocess.run(
        [*map(str, words)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if done.returncode:
        raise machine.Failure(f'{" ".join(map(str, words))}: {done.stdout}{done.stderr}{_said()}')
    return done.stdout


def _said() -> str:
    """What the services and the guest said last."""
    paths = (Path(LOG), Path('/var/log/libvirtd.log'), _CONSOLE)
    said = [
        f'--- {path}:\n{path.read_text(errors="replace")[-2000:]}'
        for path in paths
        if path.exists()
    ]
    return '\n'.join([*said, *_qemu()])


def _qemu() -> list[str]:
    """What it says of itself, and what its threads are doing."""
    found = []
    for file in Path('/run/libvirt/qemu').glob('*.pid'):
        for task in sorted(Path(f'/proc/{file.read_text().strip()}/task').glob('*')):
            with contextlib.suppress(OSError):
                fields = (task / 'stat').read_text().rpartition(')')[2].split()
                found.append(
                    f'--- {(task / "comm").read_text().strip()} {fields[0]}, '
                    f'{fields[11]}+{fields[12]} ticks\n{(task / "stack").read_text()}'
                )
    for command in ('query-status', 'query-pcow'):
        done = subprocess.run(
            ['virsh', 'qemu-monitor-command', NAME, json.dumps({'execute': command})],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        found.append(done.stdout + done.stderr)
    return found


def _wait(what: str, condition: Callable[[], Any], seconds: float = _SECONDS) -> Any:
    """Until it gives something.

    :raises Failure: it does not
    """
    limit = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > limit:
            raise machine.Failure(f'{what}: not within {seconds:.0f} s; {_said()}')
        time.sleep(_POLL)
    return found


def _expect(condition: object, what: object) -> None:
    if not condition:
        raise machine.Failure(f'{what}\n{_said()}')


def _generations() -> list[int]:
    """Of this boot."""
    text = _CONSOLE.read_bytes() if _CONSOLE.exists() else b''
    bad = _BAD.search(text)
    _expect(not bad, bad and bad[0])
    return [int(match) for match in _REPORT.findall(text)]


def _running() -> int:
    """How many generations it has told of."""
    found = _generations()
    _expect(found, 'the guest does not run')
    return len(found)


def _checkpoint() -> str:
    """The last one of pcow's that is known to be durable."""
    for path in _RECORDS.glob('*.json'):
        record = json.loads(path.read_text())
        if record['state'] == 'runs':
            return str(record['checkpoint'])
    return ''


def _define() -> None:
    size = int(json.loads(_must('pcow-img', 'info', '--output=json', _DISK))['virtual-size'])
    element = domain_xml.Domain(
        name=NAME,
        type='kvm',
        memory=_MEMORY,
        nvdimms=[libvirt_xml.Nvdimm(path=str(_DISK), size=size)],
        kernel=KERNEL,
        initrd=INITRD,
        cmdline='console=ttyS0 quiet panic=-1 mitigations=off',
        emulator=EMULATOR,
        ram=str(_RAM),
    ).to_element()
    serial, cpu = element.find('devices/serial'), element.find('cpu')
    assert serial is not None and cpu is not None
    ET.SubElement(serial, 'log', file=str(_CONSOLE), append='on')
    ET.SubElement(cpu, 'feature', policy='disable', name='svm')
    path = Path('/tmp/domain.xml')
    path.write_text(libvirt_xml.to_string(element))
    _must('virsh', 'define', path)


def begin() -> dict[str, Any]:
    """The host as its operator sets it up, and the VM."""
    for pool, region, kind in (('ram', 'region1', 'xfs'), ('fast', 'region0', 'ext4')):
        _must('pcowctl', 'pool', 'create', pool, '--region', region, '--fs', kind)
    _must('pcow-img', 'create', '-q', '-f', 'pcow', _RAM, _MEMORY)
    _must('pcow-img', 'convert', '-f', 'pcow', '-O', 'pcow', NVDIMM, _DISK)
    _must('systemctl', 'enable', '--now', 'pcow-fixate.service', 'pcow-protect.service')
    _define()
    begun = time.monotonic()
    _must('virsh', 'start', NAME)
    _wait('the guest boots', _generations)
    booted = time.monotonic() - begun
    _must('pcowctl', 'vm', 'protect', NAME, '--interval', _INTERVAL)
    (row,) = json.loads(_must('pcowctl', 'vm', 'protect', '--list', '-f', 'json'))
    _expect(row['outlives'] == 'power failure', row)
    _wait('a checkpoint', _checkpoint)
    os.sync()
    return {'seconds to boot': round(booted, 1)}


def shutdown() -> dict[str, Any]:
    """The host is told to go down when this has ended."""
    count = _running()
    _wait('the guest goes on', lambda: len(_generations()) > count + 2, _ANSWERS)
    Path(SHUTDOWN).touch()
    return {'generation': _generations()[-1]}


def _tell(until: int | None) -> None:
    """Of each checkpoint, as it is durable, a generation that was there when it was begun."""
    _running()
    seen: list[tuple[float, int]] = []
    last, told = _checkpoint(), 0
    with open(_RESULTS, 'w', buffering=1) as results:
        while until is None or told < until:
            now, found = time.time(), _generations()
            seen = [*seen[-1000:], (now, found[-1])]
            if (name := _checkpoint()) not in ('', last):
                last, moment = name, moments.moment_of(name)
                if least := [generation for when, generation in seen if when <= moment]:
                    results.write(json.dumps({'told': {'least': least[-1]}}) + '\n')
                    told += 1
            time.sleep(_POLL)


def load() -> dict[str, Any]:
    """Until the power is cut."""
    _tell(None)
    raise machine.Failure('nobody cut the power')


def panic() -> dict[str, Any]:
    _tell(_TOLD)
    Path('/proc/sys/kernel/sysrq').write_text('1\n')
    Path('/proc/sysrq-trigger').write_text('c\n')
    raise machine.Failure('the kernel has not panicked')


def verify(least: int, prefix: str) -> dict[str, Any]:
    """It goes on by itself, from no older moment than this generation."""
    begun = time.monotonic()
    first = _wait('the VM goes on by itself', _generations)[0]
    waited = time.monotonic() - begun
    text = _CONSOLE.read_bytes()
    _expect(b'check: booted' not in text, 'it was booted')
    _expect(first >= least, f'it goes on from generation {first}, which is before {least}')
    said = re.findall(r'goes on from (\S+), of (\d+) s ago', Path(LOG).read_text())
    _expect(said and said[-1][0].startswith(prefix), f'{said}, and not from {prefix}')
    count = len(_generations())
    _wait('the guest goes on', lambda: len(_generations()) > count + 10)
    found = _generations()
    _expect(sorted(set(found)) == found, f'generations {found}')
    for path in (_RAM, _DISK):
        _must('pcow-img', 'check', '-U', path)
    return {'from': said[-1][0], 'generation': first, 'least': least, 'waited': round(waited, 1)}


def run(name: str) -> dict[str, Any]:
    """``begin``, ``shutdown``, ``load``, ``panic``, ``verify-LEAST-fixation`` or
    ``verify-LEAST-auto``.
    """
    os.environ['PATH'] = '/usr/local/bin:/usr/sbin:/usr/bin'
    what, *words = name.split('-')
    if what == 'verify':
        return verify(int(words[0]), f'pcow-{words[1]}-')
    return {'begin': begin, 'shutdown': shutdown, 'load': load, 'panic': panic}[what]()
