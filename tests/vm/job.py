# SPDX-License-Identifier: Apache-2.0
"""A run of tools/vm-test: makes the parts, runs the scenarios, tells the results."""

from __future__ import annotations

import json
import os
from pathlib import Path
import sys
import time
from typing import Any

from pcow_driver.common import exception
from pcow_driver.images import image
from pcow_driver.images import info_block
from pcow_driver.templates import template
from tests.vm import chain
from tests.vm import contents
from tests.vm import failing
from tests.vm import fsdax
from tests.vm import kernels
from tests.vm import machine
from tests.vm import machines
from tests.vm import media
from tests.vm import options as options_module
from tests.vm import outer
from tests.vm import parts as parts_module
from tests.vm import suite
from tools.lib.quickstart import state

_OUTER_MACHINES = 4  # that a run may use up
_TMPFS = Path('/dev/shm')
# The order of the scenarios. tmpfs is a pool of the class volatile, pmem and xfs are on fsdax
# namespaces.
PLANS = {
    'kvm': (
        ('plain-file', 'tmpfs'),
        ('stores', 'tmpfs'),
        ('stores', 'pmem'),
        ('transfers', 'tmpfs'),
        ('transfers', 'pmem'),
        ('snapshots', 'tmpfs'),
        ('snapshots', 'pmem'),
        ('pool-full', 'tmpfs'),
        ('full-emulated', 'tmpfs'),
        ('saved-state', 'tmpfs'),
        ('live-migration', 'tmpfs'),
        ('guest-ram', 'tmpfs'),
        ('vhost', 'tmpfs'),
        ('vhost-full', 'tmpfs'),
        ('vhost-vsock', 'tmpfs'),
        ('ram-full', 'tmpfs'),
        ('debian', 'pmem'),
        ('virtio-pmem', 'tmpfs'),
        ('virtio-pmem', 'page-cache'),
        ('debian-flush', 'page-cache'),
        ('media-errors', 'tmpfs'),
        ('media-errors', 'pmem'),
        ('media-errors', 'xfs'),
        ('media-deaf', 'tmpfs'),
        ('media-many', 'tmpfs'),
        ('media-dropped', 'page-cache'),
        ('full-fails', 'tmpfs'),
    ),
    'tcg': (
        ('stores', 'tmpfs'),
        ('transfers', 'tmpfs'),
        ('snapshots', 'tmpfs'),
        ('pool-full', 'tmpfs'),
        ('full-emulated', 'tmpfs'),
        ('saved-state', 'tmpfs'),
        ('live-migration', 'tmpfs'),
        ('guest-ram', 'tmpfs'),
        ('debian', 'tmpfs'),
        ('virtio-pmem', 'tmpfs'),
        ('debian-flush', 'tmpfs'),
    ),
    'fsdax': (
        *((name, kind) for kind in fsdax.REGIONS for name in fsdax.ALL),
        *((name, 'pmem') for name in machines.FSDAX if name not in machines.SHORT),
    ),
}


def _wanted(options: options_module.Options) -> list[tuple[str, str]]:
    plan = list(PLANS[options.what])
    if not options.only:
        return plan
    chosen: list[tuple[str, str]] = []
    for item in options.only:
        name, _at, pool = item.partition('@')
        pools = (
            (pool,)
            if pool
            else tuple(place for known, place in plan if known == name) or ('tmpfs',)
        )
        # nothing goes without the file system
        needed = ['namespace', name] if name in fsdax.ALL and name != 'namespace' else [name]
        chosen += [
            (step, place) for place in pools for step in needed if (step, place) not in chosen
        ]
    # those that want another kernel are together, at the end
    return sorted(chosen, key=lambda item: item[0] in media.ALL)


class Job:
    def __init__(self, run: state.Run, options: options_module.Options) -> None:
        self._run = run
        self._options = options
        self._results: list[dict[str, Any]] = []
        self._binaries = options.binaries
        self._scratch = _TMPFS / f'pcow-vm-test-{run.id}'

    def perform(self) -> None:
        """:raises PcowError: a scenario failed, or it could not be run"""
        for name in ('qemu-system-x86_64', 'pcow-img', 'pcow-io'):
            if not (self._binaries / name).exists():
                raise exception.PcowError(reason=f'{self._binaries} has no {name}: run tools/build')
        wanted = _wanted(self._options)
        self._run.note(self._scratch)
        self._scratch.mkdir(mode=0o700)
        if self._options.keep:
            self._run.kept = True
            self._run.save()
        begun = time.monotonic()
        parts = parts_module.prepare(self._run)
        outside = self._outer(parts)
        root = self._scratch / 'tree'
        if self._options.what == 'fsdax':
            expected = self._run_fsdax(outside, parts, root, wanted)
            return self._finish(expected, time.monotonic() - begun)
        made = (
            self._make_template(parts)
            if any(name.startswith('debian') for name, _pool in wanted)
            else None
        )
        images = self._scratch / 'chain'
        chain.make(images, self._binaries, parts.guest, parts.info_block)
        if self._options.verbose:
            self._say(f'prepared in {time.monotonic() - begun:.1f} s')
        if self._options.what == 'kvm':
            self._run_kvm(outside, wanted, parts, made, images)
        else:
            self._run_here(wanted, parts, made, images)
        self._finish(len(wanted), time.monotonic() - begun)

    def _say(self, line: str) -> None:
        if self._options.output == 'human':
            print(line, flush=True)

    def _report(self, result: dict[str, Any]) -> None:
        self._results.append(result)
        name = f'{result["name"]}@{result["pool"]}'
        self._say(
            f'{name:<20} {result["accel"]} {"PASS" if result["passed"] else "FAIL"} '
            f'{result["seconds"]:7.1f} s'
        )
        if not result['passed']:
            self._say(result['error'])
        for line in result.get('figures', {}).get('table', ()):
            self._say(f'    {line}')
        if result['passed'] and self._options.verbose:
            self._say(f'    {json.dumps(result["figures"])}')

    def _make_template(self, parts: parts_module.Parts) -> Path:
        """A sealed image with the Debian guest."""
        raw, target = self._scratch / 'namespace', self._scratch / 'template.pcow'
        source = template.inspect_source(str(parts.image), 'qcow2')
        size = template.virtual_size(source.virtual_size, info_block.PageMap.RAM)
        template.write_namespace(str(raw), source, size, info_block.PageMap.RAM)
        image.convert(str(raw), 'raw', str(target))
        raw.unlink()
        image.seal(str(target))
        return target

    def _run_fsdax(
        self,
        outside: outer.Outer,
        parts: parts_module.Parts,
        root: Path,
        wanted: list[tuple[str, str]],
    ) -> int:
        """How many results there must be."""
        library = [item for item in wanted if item[0] in fsdax.ALL]
        expected = len(library)
        if library:
            outside.run(
                contents.fsdax_tree(root, self._binaries, self._options.unit_tests),
                library,
                contents.fsdax_places(),
                contents.labelled_nvdimms(self._scratch, fsdax.REGION_SIZES),
                '',
                self._report,
            )
        for name, _pool in wanted:
            if name in machines.FSDAX:
                scratch = self._scratch / name
                scratch.mkdir()
                around = machines.Surroundings(
                    self._run, outside, parts, self._options, scratch, self._report
                )
                expected += machines.FSDAX[name](around)
        return expected

    def _run_kvm(
        self,
        outside: outer.Outer,
        wanted: list[tuple[str, str]],
        parts: parts_module.Parts,
        made: Path | None,
        images: Path,
    ) -> None:
        """:raises Ended: an outer machine failed too often"""
        ordinary = [item for item in wanted if item[0] not in media.ALL]
        suite = self._options.host_kernel
        if ordinary:
            if suite:
                outside = self._outer(
                    parts_module.with_host_kernel(self._run, parts, suite, kernels.CLOUD)
                )
            self._run_outside(outside, ordinary, parts, made, images)
        if len(ordinary) < len(wanted):
            checked = parts_module.with_kernel(self._run, parts, failing.KERNEL)
            host = (
                parts_module.with_host_kernel(self._run, parts, suite, failing.KERNEL)
                if suite
                else checked
            )
            self._run_outside(self._outer(host), wanted, parts, made, images, checked)

    def _outer(self, parts: parts_module.Parts) -> outer.Outer:
        return outer.Outer(
            self._run,
            parts,
            self._options.outer or self._binaries / 'qemu-system-x86_64',
            self._scratch,
        )

    def _run_outside(
        self,
        outside: outer.Outer,
        wanted: list[tuple[str, str]],
        parts: parts_module.Parts,
        made: Path | None,
        images: Path,
        checked: parts_module.Parts | None = None,
    ) -> None:
        """Each scenario gives one result, good or bad. What a failure of the outer machine
        interrupts is run in another one.

        :param wanted: after those that have a result
        :raises Ended: it failed too often
        """
        for machines_left in reversed(range(_OUTER_MACHINES)):
            rest = wanted[len(self._results) :]
            tree = contents.kvm_tree(self._scratch / 'tree', parts, self._binaries, checked)
            pools = {pool for _name, pool in rest}
            devices = (
                *contents.pool_nvdimm(self._scratch, made, images),
                *contents.more_pools(self._scratch, pools),
            )
            options = ['vm-test.pool', *contents.more_options(pools)] + (
                [] if checked is None else [failing.OUTER_OPTIONS]
            )
            try:
                outside.run(
                    tree,
                    rest,
                    contents.kvm_places(self._options.cpus),
                    devices,
                    ' '.join(options),
                    self._report,
                )
                return
            except outer.Ended as e:
                if not machines_left:
                    raise
                name = '@'.join(wanted[len(self._results)])
                print(
                    f'vm-test: {str(e).partition(chr(10))[0]}; {name} is run again in another one',
                    file=sys.stderr,
                    flush=True,
                )

    def _run_here(
        self,
        wanted: list[tuple[str, str]],
        parts: parts_module.Parts,
        made: Path | None,
        images: Path,
    ) -> None:
        pool, logs = self._scratch / 'pool', self._scratch / 'logs'
        pool.mkdir()
        logs.mkdir()
        place = machine.Place(
            accel='tcg',
            binaries=self._binaries,
            kernel=parts.kernel,
            initrd=parts.initrd,
            guest=parts.guest,
            info_block=parts.info_block,
            debian_initrd=parts.debian_initrd,
            template=made or self._scratch / 'template.pcow',
            chain=images,
            pool=pool,
            logs=logs,
            cpus=self._options.cpus,
        )
        suite.run_all(wanted, {'tmpfs': place}, self._report)

    def _finish(self, wanted: int, seconds: float) -> None:
        passed = sum(result['passed'] for result in self._results)
        if self._options.output == 'json':
            print(json.dumps(self._results, indent=1), flush=True)
        # what happens between two outer machines has none
        kernels_seen = sorted({result['kernel'] for result in self._results if 'kernel' in result})
        self._say(f'{passed} of {wanted} passed, {seconds:.0f} s; Linux {", ".join(kernels_seen)}')
        if self._options.keep:
            self._say(
                f'kept: {self._scratch} and {self._run.directory}; tools/quickstart --stop takes '
                f'them away'
            )
        if passed != wanted:
            failed = [
                f'{result["name"]}@{result["pool"]}'
                for result in self._results
                if not result['passed']
            ]
            raise exception.PcowError(reason=f'failed: {", ".join(failed) or "not all were run"}')


def perform(run: state.Run, options: options_module.Options) -> None:
    """The job of :func:`tools.lib.quickstart.supervisor.supervise`."""
    os.chdir('/')
    Job(run, options).perform()
