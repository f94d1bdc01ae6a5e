# SPDX-License-Identifier: Apache-2.0
"""The main job, step by step."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
import statistics
import subprocess
import time
from typing import Any

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.templates import template as template_module
from pcow_driver.virt import domain_xml
from pcow_driver.virt import libvirt_host
from pcow_driver.virt import libvirt_xml
from tools.lib.quickstart import guest as guest_module
from tools.lib.quickstart import libvirtd as libvirtd_module
from tools.lib.quickstart import options as options_module
from tools.lib.quickstart import report as report_module
from tools.lib.quickstart import state
from tools.lib.quickstart import vm
from tools.lib.quickstart import workplace

_OVERLAYS = 9  # made to measure how long one takes
MEMORY = units.GIB
CMDLINE = 'console=ttyS0 quiet panic=-1 rw'
_BOOT_SECONDS = 300.0
_SNAPSHOT = 'before'
_DATA = '/root/pcow-quickstart'


def _size(path: Path) -> int:
    """Bytes that a file takes."""
    return path.stat().st_blocks * 512


class Job:
    def __init__(self, run: state.Run, options: options_module.Options) -> None:
        self.run = run
        self.options = options
        self.report = report_module.Report()
        self.daemon = libvirtd_module.Libvirtd(run.directory)
        self.place = workplace.Workplace(run, self.daemon.uri)

    def perform(self) -> None:
        """All steps.

        :raises PcowError: one of them failed
        """
        self._check_input()
        with self.report.step(1, 'make a pool'):
            self._make_pool()
        with self.report.step(2, 'take a guest'):
            guest = self._take_guest()
        with self.report.step(3, 'make a template of it, and a thin image on that'):
            template = self._make_template(guest)
            self._measure_overlay(template)
        with contextlib.ExitStack() as stack:
            with self.report.step(4, 'boot it through libvirt, from raw and from pcow by turns'):
                self.daemon.start()
                connection = stack.enter_context(libvirt_host.connect(self.daemon.uri))
                machine, overlay = self._boot_by_turns(connection, template, guest)
            with self.report.step(5, 'write, snapshot, write more, revert, boot again'):
                self._snapshot_and_revert(machine)
            if self.options.keep:
                machine.release()
            else:
                # While it runs, its image also holds what is prepared for the next stores.
                machine.power_off()
            self.report.figures['overlay_final_size'] = _size(overlay)
            if not self.options.keep:
                machine.remove()
        self.report.print_table()
        if self.options.json is not None:
            self.report.write_json(self.options.json)
        if self.options.keep:
            self._keep(machine)

    def _check_input(self) -> None:
        """Before anything is made."""
        if self.options.image is not None:
            template_module.inspect_source(str(self.options.image), 'qcow2')
        tool.find('emulator', build_first=True)

    def _make_pool(self) -> None:
        shown = self.place.make_pool(self.options.pool)
        self.report.figures |= {
            'run': self.run.id,
            'pool': str(self.place.pool),
            'persistence': shown['persistence'],
        }
        self.report.say(
            f'{self.place.pool}: persistence class "{shown["persistence"]}", '
            f'{units.format_size(shown["free"])} free of {units.format_size(shown["total"])}'
        )

    def _take_guest(self) -> guest_module.Guest:
        guest, cache = guest_module.prepare(
            self.run, self.options.image, self.options.kernel, self.options.initrd
        )
        source = template_module.inspect_source(str(guest.image), 'qcow2')
        self.report.figures |= {
            'source': str(guest.image),
            'source_size': _size(guest.image),
            'source_virtual_size': source.virtual_size,
        }
        for title, path in (
            ('image', guest.image),
            ('kernel', guest.kernel),
            ('initrd', guest.initrd),
        ):
            self.report.say(f'{title}: {path} ({units.format_size(path.stat().st_size)})')
        self.report.say(
            f'newly made: {", ".join(cache.made)}' if cache.made else 'all of it from the cache'
        )
        return guest

    def _make_template(self, guest: guest_module.Guest) -> Path:
        path = self.place.image_path('template')
        self.run.note(path.with_name(f'.{path.name}.part'))
        begun = time.perf_counter()
        self.place.pcowctl(
            'template',
            'build',
            '--source-format',
            'qcow2',
            str(guest.image),
            self.place.reference(path),
        )
        took = time.perf_counter() - begun
        info = image.info(str(path))
        self.report.figures |= {
            'template_seconds': took,
            'template_size': _size(path),
            'template_virtual_size': info.virtual_size,
        }
        self.report.say(
            f'template: {units.format_size(_size(path))} of {units.format_size(info.virtual_size)} '
            f'in '
            f'{report_module.seconds(took)}'
        )
        return path

    def _new_overlay(self, template: Path, name: str) -> tuple[Path, float]:
        """A thin image and the seconds that pcow-img took for it, from start to end."""
        path = self.place.image_path(name)
        command = (
            tool.find('pcow_img'),
            'create',
            '-f',
            'pcow',
            '-b',
            str(template),
            '-F',
            'pcow',
            str(path),
        )
        begun = time.perf_counter()
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        took = time.perf_counter() - begun
        if done.returncode:
            raise exception.ToolFailed(
                tool='pcow-img', exit_code=done.returncode, message=done.stderr.strip()
            )
        return path, took

    def _measure_overlay(self, template: Path) -> None:
        times, size = [], 0
        for _number in range(_OVERLAYS):
            path, took = self._new_overlay(template, 'measured')
            times.append(took)
            size = max(size, _size(path))
            path.unlink()
        median = statistics.median(times)
        self.report.figures |= {'overlay_seconds': median, 'overlay_size': size}
        self.report.say(
            f'overlay: {units.format_size(size)} in {report_module.seconds(median)} '
            f'(pcow-img from start to end, median of {_OVERLAYS})'
        )

    def _machine(
        self, connection: Any, name: str, path: Path, size: int, guest: guest_module.Guest
    ) -> vm.Vm:
        # libvirt's domain type "qemu" (emulation): it works on any machine, also where /dev/kvm is
        # itself an emulation
        self.report.figures['accelerator'] = 'TCG'
        spec = domain_xml.Domain(
            name=name,
            memory=MEMORY,
            nvdimms=[libvirt_xml.Nvdimm(path=str(path), size=size)],
            kernel=str(guest.kernel),
            initrd=str(guest.initrd),
            cmdline=CMDLINE,
            type='qemu',
            emulator=tool.find('emulator', build_first=True),
            # it is thrown away with the run
            volatile=self.report.figures['persistence'] == 'page-cache',
        )
        return vm.Vm(connection, spec, self.run.directory / f'{name}.console')

    def _boot_by_turns(
        self, connection: Any, template: Path, guest: guest_module.Guest
    ) -> tuple[vm.Vm, Path]:
        """Boot from a fresh copy of each kind in every round; return the last VM on pcow, which
        runs on.
        """
        size = image.info(str(template)).virtual_size
        times: dict[str, list[float]] = {'raw': [], 'pcow': []}
        # libvirt asks a QEMU that it sees for the first time what it can do; that is not part of a
        # boot.
        connection.getDomainCapabilities(
            tool.find('emulator', build_first=True), 'x86_64', 'q35', 'qemu'
        )
        kept: tuple[vm.Vm, Path] | None = None
        for left in reversed(range(self.options.rounds)):
            # The first of two boots in a row is the slower one: each kind goes first by turns. The
            # very last is pcow.
            for kind in ('raw', 'pcow') if left % 2 == 0 else ('pcow', 'raw'):
                if kind == 'raw':
                    path = self.place.scratch / 'raw'
                    image.convert(str(template), image.FORMAT, str(path), 'raw')
                else:
                    path, _took = self._new_overlay(template, 'vm')
                last = left == 0 and kind == 'pcow'
                name = self.run.domain_name if last else f'{self.run.domain_name}-{kind}-{left}'
                machine = self._machine(connection, name, path, size, guest)
                times[kind].append(machine.boot(_BOOT_SECONDS))
                if last:
                    kept = machine, path
                else:
                    machine.remove()
                    path.unlink()
            self.report.say(
                f'round {self.options.rounds - left}: raw '
                f'{report_module.seconds(times["raw"][-1])}, '
                f'pcow {report_module.seconds(times["pcow"][-1])}'
            )
        if kept is None:
            raise exception.PcowError(reason='no round was run')
        self.report.set_boots(times['raw'], times['pcow'])
        self._prove_root(kept[0])
        return kept

    def _prove_root(self, machine: vm.Vm) -> None:
        fields = machine.root.split()
        if (
            len(fields) < 4
            or not fields[0].startswith('/dev/pmem0')
            or not any(option in ('dax', 'dax=always') for option in fields[3].split(','))
        ):
            raise exception.PcowError(
                reason=f'the root of the guest is not on /dev/pmem0 with DAX: {machine.root}'
            )
        seen = int(machine.run('cat /sys/block/pmem0/size')) * 512
        self.report.figures |= {'guest_root': machine.root, 'guest_bytes': seen}
        self.report.say(f'the guest says: {machine.root}')
        self.report.say(
            f'boot, pcow / raw: {self.report.figures["boot_ratio"]:.3f} (at most '
            f'{report_module.BOOT_TARGET})'
        )

    def _snapshot_and_revert(self, machine: vm.Vm) -> None:
        data, figures = _DATA, self.report.figures
        machine.run(
            f'mkdir -p {data}; echo before >{data}/state; head -c 4194304 /dev/urandom '
            f'>{data}/data; sync'
        )
        digest = machine.run(f'sha256sum <{data}/data')
        self.report.say(f'written: 4 MiB, sha256 {digest[:16]}...')
        figures['snapshot_seconds'] = self._timed(
            'snapshot', 'create', '--domain', machine.name, _SNAPSHOT
        )
        self.report.say(
            f'snapshot of the running guest: {report_module.seconds(figures["snapshot_seconds"])}'
        )
        machine.run(
            f'echo after >{data}/state; head -c 4194304 /dev/urandom >{data}/data; echo more '
            f'>{data}/more; sync'
        )
        self.report.say(
            f'written after it: {machine.run(f"ls {data}").split()}, state '
            f'"{machine.run(f"cat {data}/state")}"'
        )
        machine.power_off()
        figures['revert_seconds'] = self._timed(
            'snapshot', 'revert', '--domain', machine.name, _SNAPSHOT
        )
        figures['revert_boot_seconds'] = machine.boot(_BOOT_SECONDS)
        state_now, files = machine.run(f'cat {data}/state'), machine.run(f'ls {data}').split()
        self.report.say(
            f'reverted in {report_module.seconds(figures["revert_seconds"])}, booted; '
            f'the guest now shows: {files}, state "{state_now}"'
        )
        figures['reverted'] = {'state': state_now, 'files': files}
        if (
            state_now != 'before'
            or files != ['data', 'state']
            or machine.run(f'sha256sum <{data}/data') != digest
        ):
            raise exception.PcowError(reason='the guest does not show the state of the snapshot')

    def _timed(self, *words: str) -> float:
        begun = time.perf_counter()
        self.place.pcowctl(*words)
        return time.perf_counter() - begun

    def _keep(self, machine: vm.Vm) -> None:
        self.run.kept = True
        self.run.save()
        print(
            f"\nThe VM runs on. Its console:\n    virsh -c '{self.daemon.uri}' console "
            f"{machine.name}\n"
            f'Its snapshots:\n    build/venv/bin/pcowctl --config-file {self.place.config} '
            f'snapshot list '
            f'--domain {machine.name}\n'
            'To end it:\n    tools/quickstart --stop',
            flush=True,
        )


def perform(run: state.Run, options: options_module.Options) -> None:
    """The job of :func:`tools.lib.quickstart.supervisor.supervise`."""
    os.chdir('/')
    Job(run, options).perform()
