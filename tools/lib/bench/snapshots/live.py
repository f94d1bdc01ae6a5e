# SPDX-License-Identifier: Apache-2.0
"""Snapshots of a running guest through virsh: its NVDIMM a pcow image, beside the same on a raw
file.

QEMU copies a raw NVDIMM into the state of the VM; the guest stands still meanwhile, from the
beginning to the end of the command.
"""

from __future__ import annotations

import os
from pathlib import Path
import time
from typing import Any

from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.virt import domain
from pcow_driver.virt import domain_xml
from pcow_driver.virt import libvirt_host
from pcow_driver.virt import libvirt_xml
from tools.lib.quickstart import guest
from tools.lib.quickstart import libvirtd
from tools.lib.quickstart import state
from tools.lib.quickstart import teardown
from tools.lib.quickstart import vm
from tools.lib.quickstart import workplace

MEMORY = 512 * units.MIB
_BOOT_SECONDS = 300.0
_BETWEEN_SECONDS = 1.0
# all of a file on the NVDIMM under DAX is stored to, again and again
_STORES = (
    '(while :; do dd if=/dev/zero of=/root/data bs=64k count=1024 conv=notrunc 2>/dev/null; done) '
    '& echo $! >/run/stores'
)
_CMDLINE = 'console=ttyS0 quiet panic=-1 rw'


class _Bench:
    def __init__(self, run: state.Run, rounds: int) -> None:
        self.run = run
        self.rounds = rounds
        self.daemon = libvirtd.Libvirtd(run.directory)
        self.place = workplace.Workplace(run, self.daemon.uri)

    def measure(self) -> dict[str, Any]:
        os.chdir('/')
        self.place.make_pool(None)
        made, _cache = guest.prepare(self.run, None, None, None)
        template = self.place.image_path('template')
        self.place.pcowctl(
            'template',
            'build',
            '--source-format',
            'qcow2',
            str(made.image),
            self.place.reference(template),
        )
        self.daemon.start()
        size = image.info(str(template)).virtual_size
        result: dict[str, Any] = {'ram': MEMORY, 'nvdimm': size, 'sides': {}}
        with libvirt_host.connect(self.daemon.uri) as connection:
            for kind in ('raw', 'pcow'):
                path = self._memory(kind, template)
                carrier = self.place.scratch / f'{kind}.qcow2'
                tool.run(tool.find('qemu_img'), 'create', '-q', '-f', 'qcow2', str(carrier), '1M')
                machine = self._machine(connection, kind, path, size, carrier, made)
                if kind == 'pcow':
                    result['pause'] = self._pauses(connection, machine.name)
                    machine.run(_STORES)
                    result['pause-stores'] = self._pauses(connection, machine.name)
                    machine.run('kill $(cat /run/stores)')
                machine.release()
                result['sides'][kind] = self._snapshots(machine, carrier)
                machine.power_off()
                path.unlink()
                carrier.unlink()
        return result

    def _memory(self, kind: str, template: Path) -> Path:
        if kind == 'raw':
            path = self.place.scratch / 'raw'
            image.convert(str(template), image.FORMAT, str(path), 'raw')
        else:
            path = self.place.image_path('vm')
            image.create_overlay(str(path), str(template))
        return path

    def _machine(
        self, connection: Any, kind: str, path: Path, size: int, carrier: Path, made: guest.Guest
    ) -> vm.Vm:
        spec = domain_xml.Domain(
            name=f'{self.run.domain_name}-{kind}',
            memory=MEMORY,
            nvdimms=[libvirt_xml.Nvdimm(path=str(path), size=size)],
            kernel=str(made.kernel),
            initrd=str(made.initrd),
            cmdline=_CMDLINE,
            type='qemu',
            emulator=tool.find('emulator', build_first=True),
            carrier_disk=str(carrier),
        )
        machine = vm.Vm(connection, spec, self.run.directory / f'{kind}.console')
        machine.boot(_BOOT_SECONDS)
        machine.run('head -c 67108864 /dev/urandom >/root/data; sync')
        return machine

    def _virsh(self, *words: str) -> float:
        begun = time.perf_counter()
        tool.run('/usr/bin/virsh', '-q', '-c', self.daemon.uri, *words)
        return time.perf_counter() - begun

    def _snapshots(self, machine: vm.Vm, carrier: Path) -> dict[str, Any]:
        times: dict[str, Any] = {'create': [], 'revert': [], 'delete': []}
        for _number in range(self.rounds):
            times['create'].append(self._virsh('snapshot-create-as', machine.name, 's'))
            times['state_size'] = carrier.stat().st_blocks * 512
            times['revert'].append(self._virsh('snapshot-revert', machine.name, 's'))
            times['delete'].append(self._virsh('snapshot-delete', machine.name, 's'))
        return times

    def _pauses(self, connection: Any, name: str) -> list[float]:
        """Seconds that a snapshot of the image alone holds the running guest, as QEMU
        measures it.
        """
        found = domain.Domain(connection, name)
        pauses = []
        for number in range(self.rounds):
            pauses.append(
                found.qmp('pcow-snapshot-create', id='memnvdimm0', name=f'p{number}')['pause'] / 1e9
            )
            time.sleep(_BETWEEN_SECONDS)  # for stores to what the last one has frozen
        for number in range(self.rounds):
            found.snapshot_delete(f'p{number}')
        return pauses


def measure(rounds: int) -> dict[str, Any]:
    """Sizes in bytes, times in seconds.

    :raises PcowError: libvirt, QEMU or the guest fails
    """
    teardown.reap()
    run = state.Run.create()
    try:
        return _Bench(run, rounds).measure()
    finally:
        teardown.tear_down(run)
