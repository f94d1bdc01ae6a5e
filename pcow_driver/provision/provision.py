# SPDX-License-Identifier: Apache-2.0
"""Plans that make a pool together with what it stands on: namespace, file system, mount, unit,
registration.
"""

from __future__ import annotations

import dataclasses
import os

from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.common import units
from pcow_driver.pmem import block_device as device_module
from pcow_driver.pmem import filesystem
from pcow_driver.pmem import mount_unit
from pcow_driver.pools import registry
from pcow_driver.privileged import checks
from pcow_driver.privileged import filesystems
from pcow_driver.privileged import namespaces
from pcow_driver.provision import adopt
from pcow_driver.provision import boot
from pcow_driver.provision import ndctl
from pcow_driver.provision import plan as plan_module

_NAMESPACE_NAME_BYTES = 60  # ndctl(1) takes 63


@dataclasses.dataclass
class Request:
    """A pool on persistent memory that somebody asks for; exactly one of ``region``, ``namespace``
    and ``device``.
    """

    name: str
    directory: str  # mount point
    filesystem: str  # one of filesystem.KINDS
    region: str | None = None
    namespace: str | None = None
    device: str | None = None  # a block device that has DAX already
    size: int | None = None  # bytes; only with a region
    align: int = units.SLAB_SIZE
    force: bool = False  # destroy what is there
    owner: adopt.Owner | None = None  # of the pool; None: root


class _Making:
    """State that steps hand to later ones."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.plan = plan_module.Plan()
        self.device = request.device or '/dev/pmemN'  # as it is shown before it is known
        # what a new file system may destroy
        self._destroys = filesystems.ANYTHING if request.force else filesystems.NOTHING

    # -- the device
    # ----------------------------------------------------------------------------------------------

    def from_region(self) -> None:
        region = ndctl.find_region(str(self.request.region))
        if region.labelled:
            wanted = self.request.size or region.align
            if region.available < wanted:
                raise exception.DeviceRefused(
                    device=region.dev,
                    reason=(
                        f'{units.format_size(region.available)} of it are free and '
                        f'{units.format_size(wanted)} are needed; '
                        f'take one of its namespaces ({self._names(region)}), or a smaller --size'
                    ),
                )
            filesystem.check_size(self.request.filesystem, self.request.size or region.available)
        elif ndctl.labels_are_damaged(region) or ndctl.has_label_areas(region):
            self._init_labels(region)
        else:
            if self.request.size is not None:
                raise exception.DeviceRefused(
                    device=region.dev,
                    reason=(
                        'its DIMMs have no label areas, so that it cannot be divided: leave out '
                        '--size'
                    ),
                )
            if len(region.namespaces) != 1:
                raise exception.DeviceRefused(
                    device=region.dev, reason='it has no namespace; look at ndctl list -Ri'
                )
            self._reconfigure(region, region.namespaces[0])
            return
        size = units.round_up(self.request.size, region.align) if self.request.size else None
        new = (
            region.dev,
            size,
            self.request.align,
            names.shortened(f'pcow-{self.request.name}', _NAMESPACE_NAME_BYTES),
        )
        self.plan.add(
            plan_module.command_line(*namespaces.create_command(*new)),
            lambda: self._take(ndctl.created(namespaces.create(*new))),
            self._destroy,
        )
        # By the labels the space is free, but a super block that is still there deserves a
        # question.
        self.plan.add('[no known file system may be there]', self._check_signature)
        if not self.request.force:
            self._destroys = filesystems.UNKNOWN

    def _check_signature(self) -> None:
        found = None if self.request.force else filesystems.signature(self.device)
        if found:
            raise exception.DeviceRefused(
                device=f'the free space of {self.request.region}',
                reason=(
                    f'{found} of an earlier namespace is still there; give --force to destroy that'
                ),
            )

    def _names(self, region: ndctl.Region) -> str:
        return ', '.join(item.dev for item in region.namespaces) or 'none'

    def _init_labels(self, region: ndctl.Region) -> None:
        """Only the label-less namespace is lost by this; it must hold nothing."""
        if ndctl.labels_are_damaged(region) and not self.request.force:
            raise exception.DeviceRefused(
                device=region.dev,
                reason=(
                    f'the label areas of {", ".join(region.dimms)} are damaged, so that nobody '
                    f'knows which namespaces it has: write '
                    "a saved copy back ('ndctl write-labels'), or give --force to lose what may be "
                    "in it"
                ),
            )
        if not region.namespaces and not self.request.force:
            raise exception.DeviceRefused(
                device=region.dev,
                reason=(
                    'none of its namespaces is to be seen, as when it is disabled, so that nobody '
                    'knows what they hold: '
                    f"'ndctl enable-region {region.dev}', or give --force to lose what may be in "
                    f"them"
                ),
            )
        for item in region.namespaces:
            self._check_content(item)
        dimms, overwrite = region.dimms, ndctl.labels_are_damaged(region)
        self.plan.add(
            plan_module.command_line(*namespaces.disable_region_command(region.dev)),
            lambda: namespaces.disable_region(region.dev),
            lambda: namespaces.enable_region(region.dev),
        )
        self.plan.add(
            plan_module.command_line(*namespaces.init_labels_command(dimms, overwrite)),
            lambda: namespaces.init_labels(list(dimms), overwrite),
        )
        self.plan.add(
            plan_module.command_line(*namespaces.enable_region_command(region.dev)),
            lambda: namespaces.enable_region(region.dev),
        )

    def _check_content(self, namespace: ndctl.Namespace) -> None:
        namespaces.check_unused(namespace.dev)
        if namespace.mode == 'devdax' and not self.request.force:
            raise exception.DeviceRefused(
                device=namespace.dev,
                reason='it is in mode devdax, whose users leave no mark; '
                'give --force to destroy what may be in it',
            )
        if not namespace.enabled or not namespace.device:
            if not self.request.force:
                raise exception.DeviceRefused(
                    device=namespace.dev,
                    reason=(
                        f"it is disabled, so that nobody can see what it holds: 'ndctl "
                        f"enable-namespace {namespace.dev}', or --force"
                    ),
                )
            return
        filesystems.check_formattable(namespace.device, self.request.force)

    def from_namespace(self) -> None:
        region, namespace = ndctl.find_namespace(str(self.request.namespace))
        if self.request.size is not None:
            raise exception.UsageInvalid(
                reason='--size goes with --region: an existing namespace has a size'
            )
        self._reconfigure(region, namespace)

    def _reconfigure(self, region: ndctl.Region, namespace: ndctl.Namespace) -> None:
        if namespace.badblocks and not self.request.force:
            raise exception.DeviceRefused(
                device=namespace.dev,
                reason=(
                    f'it has {namespace.badblocks} bad sectors: look at ndctl list -M, clear them '
                    f'(ndctl clear-errors), or give '
                    '--force'
                ),
            )
        self._check_content(namespace)
        filesystem.check_size(self.request.filesystem, namespace.size)
        if namespace.mode == 'fsdax' and namespace.align == self.request.align and namespace.device:
            device_module.check_dax(namespace.device)
            self.device = namespace.device  # as it should be: adopted
            return
        if not self.request.force:
            # it was looked at above, and is another device afterwards
            self._destroys = filesystems.UNKNOWN
        change = (namespace.dev, self.request.align)
        self.plan.add(
            plan_module.command_line(*namespaces.reconfigure_command(*change)),
            lambda: self._take(ndctl.created(namespaces.reconfigure(*change, self.request.force))),
        )

    def _take(self, namespace: ndctl.Namespace) -> None:
        if not namespace.device:
            raise exception.DeviceRefused(
                device=namespace.dev, reason='it has no block device: is the module nd_pmem loaded?'
            )
        self._created = namespace.dev
        self.device = namespace.device

    def _destroy(self) -> None:
        namespaces.destroy(self._created)

    def from_device(self) -> None:
        device = checks.device(str(self.request.device))
        device_module.check_dax(device)
        filesystems.check_formattable(device, self.request.force)

    # -- the file system
    # ---------------------------------------------------------------------------------------------

    def file_system(self) -> None:
        kind, directory, label = (
            self.request.filesystem,
            self.request.directory,
            f'pcow-{self.request.name}',
        )
        self.plan.add_command(
            lambda: filesystem.make_command(kind, self.device, label),
            lambda _command: filesystems.make(kind, self.device, label, self._destroys),
        )
        _add_directory(self.plan, directory)
        self.plan.add_command(
            lambda: filesystem.mount_command(kind, self.device, directory),
            lambda _command: filesystems.mount(kind, self.device, directory),
            lambda: filesystems.unmount(directory),
        )
        if kind == 'xfs':
            adopt.add_extent_hint(self.plan, directory)
        self.plan.add(
            '[map a file there: MAP_SYNC and 2 MiB mappings must work]',
            lambda: check_behaviour(directory),
        )

    def unit(self) -> None:
        request = self.request
        mount_unit.check_free(request.directory)
        boot.add_unit(
            self.plan, request.name, lambda: self.device, request.directory, request.filesystem
        )

    def register(self) -> None:
        adopt.add_registration(self.plan, self.request.name, self.request.directory)
        adopt.add_owner(self.plan, self.request.directory, self.request.owner)


def _add_directory(plan: plan_module.Plan, directory: str) -> None:
    if not os.path.isdir(directory):
        plan.add(
            plan_module.command_line('mkdir', '-p', directory),
            lambda: filesystems.make_directory(directory),
            lambda: filesystems.remove_directory(directory),
        )


def check_behaviour(directory: str) -> None:
    """:raises ProbeFailed: MAP_SYNC or mappings of 2 MiB do not work there"""
    behaviour = filesystem.probe(directory)
    if not behaviour.map_sync:
        raise exception.ProbeFailed(
            path=directory,
            reason=(
                'MAP_SYNC does not work, so that stores would not be durable: the device has no '
                'DAX (a namespace of mode raw or '
                'sector?), or the kernel none for this file system'
            ),
        )
    if not behaviour.huge_mappings:
        raise exception.ProbeFailed(
            path=directory,
            reason=(
                'memory is mapped in pieces of 4 KiB: the namespace is not aligned to 2 MiB (ndctl '
                'list -N shows align), or the '
                'file system gives no aligned extents'
            ),
        )


def plan_create(request: Request) -> plan_module.Plan:
    """What has to be done for a pool on persistent memory.  Looks at the host and changes nothing.

    :raises DeviceRefused: it would destroy something, or is in use
    :raises RegionNotFound:
    :raises NamespaceNotFound:
    :raises PoolExists:
    :raises UsageInvalid:
    """
    names.check_name('pool', request.name)
    registry.PoolRegistry().check_unknown(request.name)
    if sum(item is not None for item in (request.region, request.namespace, request.device)) != 1:
        raise exception.UsageInvalid(reason='give one of --region, --namespace and --device')
    if request.filesystem not in filesystem.KINDS:
        raise exception.UsageInvalid(reason=f'--fs is one of {", ".join(filesystem.KINDS)}')
    if request.align not in namespaces.ALIGNMENTS:
        raise exception.UsageInvalid(
            reason='--align is 2M or 1G: mappings of 2 MiB need one of them'
        )
    _check_directory(request.directory)
    mount_unit.check_name(request.directory)
    making = _Making(request)
    if request.region is not None:
        making.from_region()
    elif request.namespace is not None:
        making.from_namespace()
    else:
        making.from_device()
    making.file_system()
    making.unit()
    making.register()
    return making.plan


def _check_directory(directory: str) -> None:
    if not os.path.isabs(directory):
        raise exception.UsageInvalid(reason=f'{directory} must be an absolute path')
    if os.path.ismount(directory):
        raise exception.DeviceRefused(
            device=directory,
            reason=(
                'something is mounted there already: unmount it; if it is what a create left that '
                'was killed, '
                f"'pcowctl pool create NAME {directory}' finishes that"
            ),
        )
    if os.path.isdir(directory) and os.listdir(directory):
        raise exception.DeviceRefused(
            device=directory, reason='the directory is not empty: mounting would hide what is in it'
        )
    checks.mount_point(directory)


def plan_memory(
    name: str, directory: str, size: int, *, huge: bool = False, owner: adopt.Owner | None = None
) -> plan_module.Plan:
    """A pool in DRAM (tmpfs): gone when the host goes down.

    :param size: bytes that it may take at most
    :param huge: of pages of 2 MiB
    :param owner: of the pool, if it is not root's
    """
    names.check_name('pool', name)
    registry.PoolRegistry().check_unknown(name)
    _check_directory(directory)
    plan = plan_module.Plan()
    _add_directory(plan, directory)
    plan.add(
        plan_module.command_line(*filesystem.mount_memory_command(name, size, directory, huge)),
        lambda: filesystems.mount_memory(name, size, directory, huge),
        lambda: filesystems.unmount(directory),
    )
    adopt.add_registration(plan, name, directory)
    adopt.add_owner(plan, directory, owner)
    return plan


def plan_extend(name: str, size: int | None) -> plan_module.Plan:
    """Make a pool's file system larger, with everything in it in place.

    :param size: new size in bytes of a pool in DRAM; None for others, which grow up to their device
    :raises PoolNotFound:
    :raises UsageInvalid: that pool cannot grow, or not like this
    """
    found = registry.PoolRegistry().get(name)
    kind, source = filesystem.mounted(found.path)
    plan = plan_module.Plan()
    if kind == 'tmpfs':
        if size is None:
            raise exception.UsageInvalid(reason=f'the pool {name} is in DRAM: give its new --size')
        if size <= found.capacity().total:
            raise exception.UsageInvalid(
                reason=f'the pool {name} has {units.format_size(found.capacity().total)} already'
            )
        new = size
        plan.add(
            plan_module.command_line(*filesystem.resize_memory_command(found.path, new)),
            lambda: filesystems.resize_memory(found.path, new),
        )
    elif size is not None:
        raise exception.UsageInvalid(
            reason='--size is for pools in DRAM; others grow up to the size of their device'
        )
    elif kind in filesystem.KINDS:
        plan.add(
            plan_module.command_line(*filesystem.grow_command(kind, source, found.path)),
            lambda: filesystems.grow(found.path),
        )
    else:
        raise exception.UsageInvalid(
            reason=f'the pool {name} is a directory of a larger file system: extend that'
        )
    return plan


def mount_source(path: str) -> str:
    """The device that is mounted at ``path``; '' if none is."""
    return filesystem.mounted(path)[1]
