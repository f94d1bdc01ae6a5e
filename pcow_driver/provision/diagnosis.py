# SPDX-License-Identifier: Apache-2.0
"""What ``pcowctl doctor`` finds about persistent memory and the file systems on it."""

from __future__ import annotations

from collections.abc import Iterator
import gzip
import os
import platform

from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.common import units
from pcow_driver.common.finding import ADVICE
from pcow_driver.common.finding import MISSING
from pcow_driver.common.finding import OK
from pcow_driver.common.finding import Finding
from pcow_driver.pmem import filesystem
from pcow_driver.pools import pool as pool_module
from pcow_driver.provision import boot
from pcow_driver.provision import durability
from pcow_driver.provision import ndctl
from pcow_driver.provision import provision

_BUS = '/sys/bus/nd'

# Options of the kernel, and what is lost without them.
_PMEM_OPTIONS = (
    (
        'FS_DAX',
        'no file system maps persistent memory directly: all stores go through the page cache',
    ),
    ('FS_DAX_PMD', 'memory is mapped in pieces of 4 KiB only'),
    ('BLK_DEV_PMEM', 'there are no /dev/pmem devices'),
)
_OTHER_OPTIONS = (
    (
        'USERFAULTFD',
        'there is no engine minor, and under KVM a store that QEMU cannot find stops the VM',
    ),
    ('MEMORY_FAILURE', 'a memory error kills QEMU, instead of being reported to the guest'),
)


def _kernel_config() -> dict[str, str] | None:
    """The kernel's configuration as the distribution or the kernel itself gives it; None if neither
    does.
    """
    try:
        with open(f'/boot/config-{platform.release()}', encoding='ascii', errors='replace') as f:
            text = f.read()
    except OSError:
        try:
            with gzip.open('/proc/config.gz', 'rt', encoding='ascii', errors='replace') as f:
                text = f.read()
        except OSError:
            return None
    return {
        key.removeprefix('CONFIG_'): value
        for key, equals, value in (line.partition('=') for line in text.splitlines())
        if equals and key.startswith('CONFIG_')
    }


def check_kernel_config() -> Iterator[Finding]:
    config = _kernel_config()
    if config is None:
        yield Finding(
            'kernel options',
            ADVICE,
            'no /boot/config file and no /proc/config.gz',
            (
                'nobody can tell what this kernel was built with: see the checks of pools and of '
                'userfaultfd instead'
            ),
        )
        return
    wanted = (*_OTHER_OPTIONS, *(_PMEM_OPTIONS if os.path.isdir(_BUS) else ()))
    lacking = [(name, why) for name, why in wanted if config.get(name) not in ('y', 'm')]
    if not lacking:
        yield Finding('kernel options', OK, ', '.join(name for name, _why in wanted))
    for name, why in lacking:
        yield Finding(
            'kernel options', ADVICE, f'CONFIG_{name} is not set', f'{why}: use a kernel with it'
        )


def check_regions() -> Iterator[Finding]:
    """Regions of persistent memory and their namespaces."""
    if not os.path.isdir(_BUS):
        yield Finding(
            'persistent memory',
            ADVICE,
            'this kernel has found none',
            (
                "pools can be made in DRAM ('pcowctl pool create NAME --memory --size SIZE') or on "
                "an ordinary file system"
            ),
        )
        return
    try:
        regions = ndctl.regions()
    except exception.PcowError as e:
        yield Finding(
            'persistent memory',
            ADVICE,
            str(e),
            'regions and namespaces cannot be looked at: install ndctl',
        )
        return
    for region in regions:
        try:
            yield from _region(region)
        except exception.RootNeeded as e:
            yield Finding(region.dev, ADVICE, str(e), 'sudo pcowctl doctor')
    yield from _interleave(regions)
    if not regions:
        yield Finding(
            'persistent memory',
            ADVICE,
            'no regions',
            'if there should be some, look at dmesg and at the firmware setup',
        )


def _interleave(regions: list[ndctl.Region]) -> Iterator[Finding]:
    """DIMMs side by side give the bandwidth of one each."""
    single = [region for region in regions if len(region.dimms) == 1]
    for size in sorted({region.size for region in single}):
        alike = [region.dev for region in single if region.size == size]
        if len(alike) > 1:
            yield Finding(
                'interleave',
                ADVICE,
                f'{", ".join(alike)} are of one size, and each of one DIMM',
                (
                    'a pool there has the bandwidth of one DIMM: if they are on one socket, '
                    'interleave them in the firmware setup '
                    '(which loses what is in them), or spread images over several pools'
                ),
            )


def _region(region: ndctl.Region) -> Iterator[Finding]:
    kept = durability.of('pmem', region)
    ways = (
        f'interleaved over {len(region.dimms)} DIMMs'
        if len(region.dimms) > 1
        else 'not interleaved'
    )
    found = (
        f'{units.format_size(region.size)}, {ways}, {units.format_size(region.available)} free; '
        f'survives {kept.survives}; '
        f'{kept.note}'
    )
    if ndctl.labels_are_damaged(region):
        yield Finding(
            region.dev,
            MISSING,
            f'{found}; its label areas ({", ".join(region.dimms)}) are damaged',
            (
                "its namespaces are out of sight, with what is in them: write a saved copy of the "
                "labels back ('ndctl write-labels'); "
                f"'pcowctl pool create NAME --region {region.dev} --force' gives them up"
            ),
        )
    elif region.size % region.align:
        yield Finding(
            region.dev,
            ADVICE,
            f'{found}; its size is no multiple of {units.format_size(region.align)}',
            ('part of it cannot be used: interleave DIMMs of one size in the firmware setup'),
        )
    elif (
        not region.labelled
        and ndctl.has_label_areas(region)
        and all(item.mode == 'raw' for item in region.namespaces)
    ):
        yield Finding(
            region.dev,
            ADVICE,
            f'{found}; its label areas are empty',
            (f"'pcowctl pool create NAME --region {region.dev}' initialises them"),
        )
    else:
        yield Finding(region.dev, OK, found)
    for namespace in region.namespaces:
        yield from _namespace(namespace)


def _namespace(namespace: ndctl.Namespace) -> Iterator[Finding]:
    found = (
        f'{namespace.mode}, {units.format_size(namespace.size)}, '
        f'{namespace.device or "no block device"}'
    )
    if not namespace.enabled:
        yield Finding(
            namespace.dev,
            ADVICE,
            f'{found}, disabled',
            (
                f"'ndctl enable-namespace {namespace.dev}'; if that fails, dmesg says why (damaged "
                f"labels or info block?)"
            ),
        )
    elif namespace.badblocks:
        yield Finding(
            namespace.dev,
            ADVICE,
            f'{found}, {namespace.badblocks} bad sectors',
            (
                "data in them is lost: 'ndctl list -M' shows them, 'ndctl clear-errors' makes the "
                "space usable again, "
                "'pcow-img check' finds the images that are affected"
            ),
        )
    elif namespace.mode != 'fsdax':
        yield Finding(
            namespace.dev,
            ADVICE,
            found,
            (
                f"images need mode fsdax: 'pcowctl pool create NAME --namespace {namespace.dev}' "
                f"changes it if nothing is in it"
            ),
        )
    elif namespace.align and namespace.align % units.SLAB_SIZE:
        yield Finding(
            namespace.dev,
            ADVICE,
            f'{found}, aligned to {units.format_size(namespace.align)}',
            ('memory is mapped in pieces of 4 KiB: make it anew with --align 2M'),
        )
    else:
        yield Finding(namespace.dev, OK, found)


def check_boot(pool: pool_module.Pool) -> Iterator[Finding]:
    """Whether a pool on persistent memory is there before guests are started."""
    mount = boot.not_mounted_at_boot(filesystem.mount_point(pool.path))
    if mount:
        own = os.path.realpath(pool.path) == mount.at and boot.may_be_mounted(mount.at)
        yield Finding(
            f'mount of pool {pool.name}',
            ADVICE,
            f'{mount.source} at {mount.at}: nothing mounts it there at boot',
            (
                f"'pcowctl pool import {pool.path}' writes the unit for it"
                if own
                else 'the pool is missing after a reboot, and its guests do not start: add it to '
                '/etc/fstab'
            ),
        )


def check_pool(pool: pool_module.Pool) -> Iterator[Finding]:
    """What a pool's file system does for mappings, tried out in it."""
    check = f'mappings in pool {pool.name}'
    source = provision.mount_source(filesystem.mount_point(pool.path))
    persistence = pool.persistence()
    if persistence == 'page-cache' and source.startswith('/dev/pmem'):
        yield Finding(
            check,
            MISSING,
            f'{pool.path} is on {source}, but not mounted with DAX',
            (
                'everything is copied through the page cache: mount it with -o dax=always; if that '
                'is refused, make the namespace mode '
                'fsdax'
            ),
        )
        return
    if pool.made_as == 'pmem' and persistence != 'pmem':
        yield Finding(
            check,
            MISSING,
            f'{pool.path} was class pmem when it was made, and is {persistence} now',
            (
                'what guests flush on NVDIMMs there is no longer durable: mount it with -o '
                'dax=always, or move it back to persistent '
                f'memory; if this is meant, delete "class" from '
                f'{os.path.join(pool.path, names.MARKER)}'
            ),
        )
        return
    if persistence != 'pmem':
        return
    try:
        behaviour = filesystem.probe(pool.path)
    except exception.ProbeFailed as e:
        yield Finding(check, ADVICE, str(e), 'free some space: mappings could not be tried out')
        return
    if behaviour.huge_mappings:
        yield Finding(check, OK, '2 MiB, MAP_SYNC')
    else:
        yield Finding(
            check,
            ADVICE,
            '4 KiB, MAP_SYNC',
            (
                'new extents are not aligned to 2 MiB: the pool is nearly full or fragmented, or '
                'its file system was not made by '
                "'pcowctl pool create'"
            ),
        )
