# SPDX-License-Identifier: Apache-2.0
"""What data in a pool survives, in words: the file system's behaviour together with what is known
of the memory below it.
"""

from __future__ import annotations

import dataclasses

from pcow_driver.provision import ndctl

# Who told the kernel of a region decides what is behind it (libnvdimm bus providers;
# Documentation/driver-api/nvdimm).
_RESERVED_DRAM = {
    'e820': 'DRAM reserved with memmap= or marked persistent by the firmware (NVDIMM-N of old), '
    'without a label',
    'ramdax': 'DRAM offered as persistent memory by the ramdax driver',
}


@dataclasses.dataclass(frozen=True)
class Promise:
    """``survives`` and ``lost_by`` name events; ``note`` says what the answer rests on."""

    survives: str
    lost_by: str
    note: str


_PROCESS_ONLY = Promise(
    'the end of QEMU, also by kill -9', 'a reboot or crash of the host', 'memory file system'
)
_PAGE_CACHE = Promise(
    'the end of QEMU, also by kill -9; a host crash for what was flushed (virtio-pmem, pcow-flush)',
    'a host crash or power loss, for stores since the last flush',
    'ordinary file system, mapped through the page cache',
)


def of(persistence: str, region: ndctl.Region | None) -> Promise:
    """The promise of a pool.

    :param persistence: class of its file system as probed: volatile, page-cache or pmem
    :param region: what lies below it, if that is known to libnvdimm
    """
    if persistence == 'volatile':
        return _PROCESS_ONLY
    if persistence == 'page-cache':
        return _PAGE_CACHE
    if region is None:
        return Promise(
            'a host crash',
            'unknown: power loss',
            'the memory below the file system is not known to libnvdimm',
        )
    provider = region.provider.lower()
    if provider in _RESERVED_DRAM:
        return Promise(
            'kexec and a warm reboot, if the firmware leaves memory alone',
            'power loss',
            _RESERVED_DRAM[provider],
        )
    origin = (
        f'CXL memory device ({region.provider})'
        if 'cxl' in provider
        else f'{region.provider}, {len(region.dimms)} DIMM(s)'
    )
    if region.persistence_domain == 'cpu_cache':
        return Promise('power loss, CPU caches included (eADR)', 'nothing that was stored', origin)
    if region.persistence_domain == 'memory_controller':
        return Promise(
            'power loss, for what was flushed from the CPU caches (ADR)',
            'power loss, for stores not flushed yet',
            origin,
        )
    return Promise(
        'a host crash',
        'unknown: power loss',
        f'{origin}; the platform does not say up to where it saves data at power loss '
        f'(persistence_domain)',
    )
