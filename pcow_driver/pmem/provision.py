# SPDX-License-Identifier: Apache-2.0
"""Plans that make or end a pool together with what it stands on: namespace, file system, mount, unit, registration."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil

from pcow_driver import exception
from pcow_driver import names
from pcow_driver import pool
from pcow_driver import registry
from pcow_driver import tool
from pcow_driver import units
from pcow_driver.pmem import device as device_module
from pcow_driver.pmem import filesystem
from pcow_driver.pmem import mount_unit
from pcow_driver.pmem import ndctl
from pcow_driver.pmem import plan as plan_module

ALIGNMENTS = (units.SLAB_SIZE, units.GIB)


def _ndctl(command: tuple[str, ...]) -> None:
    ndctl.run(command)


@dataclasses.dataclass
class Request:
    """A pool on persistent memory that somebody asks for; exactly one of ``region``, ``namespace`` and ``device``."""

    name: str
    directory: str                     # mount point
    filesystem: str                    # one of filesystem.KINDS
    region: str | None = None
    namespace: str | None = None
    device: str | None = None          # a block device that has DAX already
    size: int | None = None            # bytes; only with a region
    align: int = units.SLAB_SIZE
    force: bool = False                # destroy what is there


class _Making:
    """State that steps hand to later ones."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.plan = plan_module.Plan()
        self.device = request.device or '/dev/pmemN'    # as it is shown before it is known

    # -- the device --------------------------------------------------------------------------------------------------

    def from_region(self) -> None:
        region = ndctl.find_region(str(self.request.region))
        if region.labelled:
            wanted = self.request.size or region.align
            if region.available < wanted:
                raise exception.DeviceRefused(device=region.dev, reason=(
                    f'{units.format_size(region.available)} of it are free and {units.format_size(wanted)} are needed; '
                    f'take one of its namespaces ({self._names(region)}), or a smaller --size'))
            filesystem.check_size(self.request.filesystem, self.request.size or region.available)
        elif ndctl.labels_are_damaged(region) or ndctl.has_label_areas(region):
            self._init_labels(region)
        else:
            if self.request.size is not None:
                raise exception.DeviceRefused(device=region.dev, reason=(
                    'its DIMMs have no label areas, so that it cannot be divided: leave out --size'))
            if len(region.namespaces) != 1:
                raise exception.DeviceRefused(device=region.dev, reason='it has no namespace; look at ndctl list -Ri')
            self._reconfigure(region, region.namespaces[0])
            return
        command = ndctl.create_namespace_command(region, self.request.size, self.request.align, f'pcow-{self.request.name}'[:60])
        self.plan.add(plan_module.command_line(*command), lambda: self._take(ndctl.created(ndctl.run(command))), self._destroy)
        # By the labels the space is free, but a super block that is still there deserves a question.
        self.plan.add('[no known file system may be there]', self._check_signature)

    def _check_signature(self) -> None:
        found = None if self.request.force else device_module.signature(self.device)
        if found:
            raise exception.DeviceRefused(device=f'the free space of {self.request.region}', reason=(
                f'{found} of an earlier namespace is still there; give --force to destroy that'))

    def _names(self, region: ndctl.Region) -> str:
        return ', '.join(item.dev for item in region.namespaces) or 'none'

    def _init_labels(self, region: ndctl.Region) -> None:
        """Only the label-less namespace is lost by this; it must hold nothing."""
        if ndctl.labels_are_damaged(region) and not self.request.force:
            raise exception.DeviceRefused(device=region.dev, reason=(
                f'the label areas of {", ".join(region.dimms)} are damaged, so that nobody knows which namespaces it has: write '
                "a saved copy back ('ndctl write-labels'), or give --force to lose what may be in it"))
        for item in region.namespaces:
            self._check_content(item)
        for command in ndctl.init_labels_commands(region):
            self.plan.add(plan_module.command_line(*command), functools.partial(_ndctl, command))

    def _check_content(self, namespace: ndctl.Namespace) -> None:
        if namespace.mode == 'devdax' and not self.request.force:
            raise exception.DeviceRefused(device=namespace.dev, reason='it is in mode devdax, whose users leave no mark; '
                                                                        'give --force to destroy what may be in it')
        if not namespace.enabled or not namespace.device:
            if not self.request.force:
                raise exception.DeviceRefused(device=namespace.dev, reason=(
                    f"it is disabled, so that nobody can see what it holds: 'ndctl enable-namespace {namespace.dev}', or --force"))
            return
        device_module.check_formattable(namespace.device, force=self.request.force)

    def from_namespace(self) -> None:
        region, namespace = ndctl.find_namespace(str(self.request.namespace))
        if self.request.size is not None:
            raise exception.UsageInvalid(reason='--size goes with --region: an existing namespace has a size')
        self._reconfigure(region, namespace)

    def _reconfigure(self, region: ndctl.Region, namespace: ndctl.Namespace) -> None:
        if namespace.badblocks and not self.request.force:
            raise exception.DeviceRefused(device=namespace.dev, reason=(
                f'it has {namespace.badblocks} bad sectors: look at ndctl list -M, clear them (ndctl clear-errors), or give '
                '--force'))
        self._check_content(namespace)
        filesystem.check_size(self.request.filesystem, namespace.size)
        if namespace.mode == 'fsdax' and namespace.align == self.request.align and namespace.device:
            self.device = namespace.device     # as it should be: adopted
            return
        command = ndctl.reconfigure_command(namespace, self.request.align)
        self.plan.add(plan_module.command_line(*command), lambda: self._take(ndctl.created(ndctl.run(command))))

    def _take(self, namespace: ndctl.Namespace) -> None:
        if not namespace.device:
            raise exception.DeviceRefused(device=namespace.dev, reason='it has no block device: is the module nd_pmem loaded?')
        self._created = namespace.dev
        self.device = namespace.device

    def _destroy(self) -> None:
        _ndctl(ndctl.destroy_command(self._created))

    def from_device(self) -> None:
        device = str(self.request.device)
        device_module.check_formattable(device, force=self.request.force)

    # -- the file system ---------------------------------------------------------------------------------------------

    def file_system(self) -> None:
        kind, directory = self.request.filesystem, self.request.directory
        self.plan.add_command(lambda: filesystem.make_command(kind, self.device, f'pcow-{self.request.name}'), filesystem.run)
        if not os.path.isdir(directory):
            self.plan.add(plan_module.command_line('mkdir', '-p', directory), lambda: os.makedirs(directory),
                          lambda: os.rmdir(directory))
        self.plan.add_command(lambda: filesystem.mount_command(kind, self.device, directory), filesystem.run,
                              lambda: filesystem.run(filesystem.umount_command(directory)))
        if kind == 'xfs':
            hint = filesystem.extent_hint_command(directory)
            self.plan.add(plan_module.command_line(*hint), lambda: filesystem.run(hint))
        self.plan.add('[map a file there: MAP_SYNC and 2 MiB mappings must work]', lambda: check_behaviour(directory))

    def unit(self) -> None:
        directory = self.request.directory
        path, _link = mount_unit.paths(directory)
        self.plan.add(f'[write and enable {path}, which mounts it at boot]', self._install_unit,
                      lambda: mount_unit.uninstall(directory))
        if os.path.isdir('/run/systemd/system'):
            self.plan.add('systemctl daemon-reload', lambda: filesystem.run(('systemctl', 'daemon-reload')))

    def _install_unit(self) -> None:
        request = self.request
        what = 'UUID=' + tool.run(tool.find_system('blkid', 'util-linux'), '--probe', '--match-tag', 'UUID', '--output', 'value',
                                  self.device).strip()
        mount_unit.install(request.directory, mount_unit.text(
            request.name, what, request.directory, request.filesystem, filesystem.MOUNT_OPTIONS))

    def register(self) -> None:
        request = self.request
        self.plan.steps += plan_directory(request.name, request.directory).steps


def check_behaviour(directory: str) -> None:
    """:raises ProbeFailed: MAP_SYNC or mappings of 2 MiB do not work there"""
    behaviour = filesystem.probe(directory)
    if not behaviour.map_sync:
        raise exception.ProbeFailed(path=directory, reason=(
            'MAP_SYNC does not work, so that stores would not be durable: the device has no DAX (a namespace of mode raw or '
            'sector?), or the kernel none for this file system'))
    if not behaviour.huge_mappings:
        raise exception.ProbeFailed(path=directory, reason=(
            'memory is mapped in pieces of 4 KiB: the namespace is not aligned to 2 MiB (ndctl list -N shows align), or the '
            'file system gives no aligned extents'))


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
    if request.align not in ALIGNMENTS:
        raise exception.UsageInvalid(reason='--align is 2M or 1G: mappings of 2 MiB need one of them')
    _check_directory(request.directory)
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
        raise exception.DeviceRefused(device=directory, reason='something is mounted there already')
    if os.path.isdir(directory) and os.listdir(directory):
        raise exception.DeviceRefused(device=directory, reason='the directory is not empty: mounting would hide what is in it')


def plan_memory(name: str, directory: str, size: int) -> plan_module.Plan:
    """A pool in DRAM (tmpfs): gone when the host goes down.

    :param size: bytes that it may take at most
    """
    names.check_name('pool', name)
    registry.PoolRegistry().check_unknown(name)
    _check_directory(directory)
    plan = plan_module.Plan()
    options = f'size={size},huge=advise,mode=0711'
    command = ('mount', '-t', 'tmpfs', '-o', options, f'pcow-{name}', directory)
    if not os.path.isdir(directory):
        plan.add(plan_module.command_line('mkdir', '-p', directory), lambda: os.makedirs(directory), lambda: os.rmdir(directory))
    plan.add(plan_module.command_line(*command), lambda: filesystem.run(command),
             lambda: filesystem.run(filesystem.umount_command(directory)))
    plan.steps += plan_directory(name, directory).steps
    return plan


def plan_directory(name: str, directory: str) -> plan_module.Plan:
    """A pool in an existing file system; the directory is made if it is missing."""
    names.check_name('pool', name)
    registry.PoolRegistry().check_unknown(name)
    plan = plan_module.Plan()
    plan.add(f'[write {os.path.join(directory, pool.MARKER)} and register pool {name}]', lambda: _register(name, directory))
    return plan


def _register(name: str, directory: str) -> None:
    registry.PoolRegistry().create(name, directory)


def plan_destroy(name: str) -> plan_module.Plan:
    """Undo a pool with everything under it: registration, unit, mount, and the namespace if it is one.

    :raises PoolNotEmpty: images are in it
    :raises PoolNotFound:
    """
    pools = registry.PoolRegistry()
    found = pools.get(name)
    if not os.path.ismount(found.path):
        raise exception.PoolInvalid(path=found.path, reason='it is a directory in a larger file system: remove without --destroy')
    left = found.entries()
    if left:
        raise exception.PoolNotEmpty(name=name, count=len(left), entries=', '.join(left[:3]) + (', ...' if left[3:] else ''))
    source = mount_source(found.path)
    namespace = ndctl.of_blockdev(source) if source.startswith('/dev/pmem') and shutil.which('ndctl') else None
    plan = plan_module.Plan()
    plan.add(f'pcowctl pool remove {name}', lambda: pools.remove(name))
    if mount_unit.installed(found.path):
        plan.add(f'rm {" ".join(mount_unit.paths(found.path))}', lambda: mount_unit.uninstall(found.path))
    umount = filesystem.umount_command(found.path)
    plan.add(plan_module.command_line(*umount), lambda: filesystem.run(umount))
    if namespace:
        # What is made here next must not look as if it carried somebody's data.
        wipe = ('wipefs', '--all', source)
        plan.add(plan_module.command_line(*wipe), lambda: filesystem.run(wipe))
        command = ndctl.destroy_command(namespace[1].dev)
        plan.add(plan_module.command_line(*command), functools.partial(_ndctl, command))
    return plan


def plan_extend(name: str, size: int | None) -> plan_module.Plan:
    """Make a pool's file system larger, with everything in it in place.

    :param size: new size in bytes of a pool in DRAM; None for others, which grow up to their device
    :raises PoolNotFound:
    :raises UsageInvalid: that pool cannot grow, or not like this
    """
    found = registry.PoolRegistry().get(name)
    kind, source = mount_kind(found.path), mount_source(found.path)
    plan = plan_module.Plan()
    if kind == 'tmpfs':
        if size is None:
            raise exception.UsageInvalid(reason=f'the pool {name} is in DRAM: give its new --size')
        if size <= found.capacity().total:
            raise exception.UsageInvalid(reason=f'the pool {name} has {units.format_size(found.capacity().total)} already')
        command: tuple[str, ...] = ('mount', '-o', f'remount,size={size}', found.path)
    elif size is not None:
        raise exception.UsageInvalid(reason='--size is for pools in DRAM; others grow up to the size of their device')
    elif kind == 'xfs':
        command = ('xfs_growfs', '-d', found.path)
    elif kind == 'ext4':
        command = ('resize2fs', source)
    else:
        raise exception.UsageInvalid(reason=f'the pool {name} is a directory of a larger file system: extend that')
    plan.add(plan_module.command_line(*command), lambda: filesystem.run(command))
    return plan


def mount_kind(path: str) -> str:
    """Type of the file system that is mounted at ``path``; '' if none is."""
    return _mount(path)[0]


def mount_source(path: str) -> str:
    """The device that is mounted at ``path``; '' if none is."""
    return _mount(path)[1]


def _mount(path: str) -> tuple[str, str]:
    """Type and source of the newest mount at ``path`` (/proc/self/mountinfo, see proc(5))."""
    found = ('', '')
    with open('/proc/self/mountinfo', encoding='utf-8') as f:
        for line in f:
            fields, _dash, rest = line.partition(' - ')
            mount_point = fields.split()[4].encode().decode('unicode_escape')
            if mount_point == os.path.realpath(path):
                found = (rest.split()[0], rest.split()[1])
    return found
