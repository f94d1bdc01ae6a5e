# SPDX-License-Identifier: Apache-2.0
"""The outer machine: under TCG, with emulated SVM, so that the QEMUs in it run under a real KVM;
and with persistent memory.
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

from pcow_driver.common import exception
from tests.functional import qmp
from tests.vm import machine
from tests.vm import parts as parts_module
from tests.vm import tree
from tools.lib.quickstart import cpio
from tools.lib.quickstart import state

CPUS = 2
_MODULES = (
    'virtio_pci',
    'virtio_blk',
    'crc32c_generic',
    'ext4',
    'xfs',
    'nfit',
    'nd_pmem',
    'nd_e820',
    'device_dax',
    'dax_pmem',
    'loop',
    'kvm-amd',
    'af_packet',
    'tun',
    'vhost_net',
    'vhost_vsock',
)
# which ext4 needs unsaid, in kernels where it is a module
_NOT_IN_ALL = ('crc32c_generic',)
_MEMORY = '3584M'
_INIT = Path(__file__).parent / 'outer' / 'init'
_BUSYBOX = Path('/bin/busybox')
_BAD = re.compile(rb'Kernel panic[^\r\n]*|vm-test: (?!ended)[^\r\n]*')
# Without a result, beside what random work was asked for; every step inside has a limit of 300 s of
# its own
_QUIET_SECONDS = 1000.0
_ENVIRONMENT = ('PCOW_RANDOM_SECONDS', 'PCOW_TEST_SEED')  # that scenarios look at
_LOOKS = ('info status', 'info registers -a', 'info lapic 0', 'info lapic 1', 'info cpus')
# For the kernel. A timer interrupt that the emulation loses is the last one of a CPU that sets its
# timer anew each time; a timer that runs by itself has a next one, after which the CPU also sees
# whatever else was lost.
_STEADY_TICKS = 'nohz=off highres=off'
_END_SECONDS = 300.0  # of a shutdown, whose services may take their time
_POLL = 0.2
_TAIL = 6000

Report = Callable[[dict[str, Any]], None]


def plan_text(wanted: list[tuple[str, str]], places: dict[str, machine.Place]) -> str:
    """(scenario, pool) pairs for one boot."""
    return json.dumps(
        {
            'wanted': wanted,
            'places': {pool: place.dump() for pool, place in places.items()},
            'environment': {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        }
    )


class Ended(exception.PcowError):
    """The outer machine itself failed: its emulation of SVM, and not what is tested."""


class Outer:
    """Runs tests/vm/suite.py in a root file system that the caller has filled."""

    def __init__(
        self, run: state.Run, parts: parts_module.Parts, qemu: Path, scratch: Path
    ) -> None:
        """:param scratch: directory for big files, on tmpfs"""
        self._run = run
        self._parts = parts
        self._qemu = qemu
        self._scratch = scratch
        self._console = scratch / 'outer.log'
        self._results = scratch / 'results'
        self._control = scratch / 'outer.qmp'

    def _make_initrd(self, plan: str) -> Path:
        files = {'init': _INIT, 'bin/busybox': _BUSYBOX}
        for number, path in enumerate(
            parts_module.modules_in_order(self._parts.modules, _MODULES, _NOT_IN_ALL)
        ):
            files[f'modules/{number:02}-{path.name}'] = path
        path = self._run.directory / 'outer.plan'
        path.write_text(plan)
        target = self._run.directory / 'outer.initrd'
        target.write_bytes(cpio.archive(files | {'plan.json': path}))
        return target

    def _command(self, disk: Path, nvdimms: tuple[str, ...], more: str, plan: str) -> list[str]:
        return [
            str(self._qemu),
            '-name',
            f'guest={self._run.domain_name}',
            '-machine',
            'q35,nvdimm=on,nvdimm-persistence=mem-ctrl',
            '-accel',
            'tcg,thread=multi,tb-size=512',
            '-cpu',
            'max',
            '-smp',
            str(CPUS),
            '-m',
            f'{_MEMORY},slots=4,maxmem=32G',
            '-nodefaults',
            '-no-user-config',
            '-display',
            'none',
            '-no-reboot',
            '-qmp',
            f'unix:{self._control},server=on,wait=off',
            '-serial',
            f'file:{self._console}',
            '-serial',
            f'file:{self._results}',
            '-kernel',
            str(self._parts.kernel),
            '-initrd',
            str(self._make_initrd(plan)),
            '-append',
            f'console=ttyS0 panic=-1 quiet mitigations=off {_STEADY_TICKS} {more}',
            '-blockdev',
            f'driver=raw,node-name=root,'
            f'read-only={"off" if "vm-test.writable" in more else "on"},file.driver=file,'
            f'file.filename={disk}',
            '-device',
            'virtio-blk-pci,drive=root',
            *nvdimms,
        ]

    def run(
        self,
        root: tree.Tree,
        wanted: list[tuple[str, str]],
        places: dict[str, machine.Place],
        nvdimms: tuple[str, ...],
        more: str,
        report: Report,
    ) -> None:
        """Run scenarios in it and report each as soon as it ended.

        :param nvdimms: arguments for QEMU
        :param more: for the kernel's command line
        :raises Ended: the machine itself failed
        :raises PcowError: it did not go on
        """
        disk = self._scratch / 'outer.ext4'
        root.make_image(disk)
        self.boot(disk, nvdimms, more, report, plan_text(wanted, places))

    def boot(
        self, disk: Path, nvdimms: tuple[str, ...], more: str, report: Report, plan: str
    ) -> None:
        """The same, with a root file system that was made before.

        :param more: with ``vm-test.writable`` the disk keeps what is changed
        :param report: may raise, which kills the machine
        """
        for path in (self._console, self._results, self._control):
            path.unlink(missing_ok=True)
        process = subprocess.Popen(
            self._command(disk, nvdimms, more, plan),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            self._follow(process, report)
            if 'vm-test.writable' in more:
                process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            raise exception.PcowError(
                reason=f'the outer machine was not switched off within {_END_SECONDS:.0f} s'
            ) from None
        finally:
            process.kill()
            process.wait()

    def _state(self, process: subprocess.Popen[bytes]) -> str:
        """Registers and interrupt controllers of both CPUs."""
        try:
            with contextlib.closing(qmp.Qmp(qmp.connect(self._control, process))) as channel:
                return '\n'.join(
                    str(channel.run('human-monitor-command', command_line=line)) for line in _LOOKS
                )
        except (AssertionError, OSError, ValueError) as e:
            return str(e) or type(e).__name__

    def _follow(self, process: subprocess.Popen[bytes], report: Report) -> None:
        quiet = _QUIET_SECONDS + float(os.environ.get('PCOW_RANDOM_SECONDS', '0'))
        seen, last = 0, time.monotonic()
        while True:
            ended = process.poll() is not None
            lines = self._results.read_bytes().split(b'\n')[:-1] if self._results.exists() else []
            for line in lines[seen:]:
                result = json.loads(line)
                if result.get('end'):
                    return
                report(result)
                last = time.monotonic()
            seen = len(lines)
            console = self._console.read_bytes() if self._console.exists() else b''
            bad = _BAD.search(console)
            if ended or bad:
                said = (
                    process.stdout.read().decode(errors='replace')
                    if ended and process.stdout is not None
                    else ''
                )
                why = bad[0].decode(errors='replace') if bad else said
                raise Ended(
                    reason=f'the outer machine ended ({process.poll()}): {why}'
                    f'\n--- its console:\n{console[-_TAIL:].decode(errors="replace")}'
                )
            if time.monotonic() - last > quiet:
                raise Ended(
                    reason=f'the outer machine did not go on for {quiet:.0f} s'
                    f'\n--- its console:\n{console[-_TAIL:].decode(errors="replace")}'
                    f'\n--- its state, twice:\n{self._state(process)}\n{self._state(process)}'
                )
            time.sleep(_POLL)
