# SPDX-License-Identifier: Apache-2.0
"""Errors. ``str(error)`` is one sentence for a person: what is wrong with which thing, and the way
out.
"""

from typing import Any

from pcow_driver.common import text


class PcowError(Exception):
    """Base of all errors of this package.

    ``msg_fmt`` is filled with the keyword arguments, which stay readable as :attr:`details`. They
    may be given as one dictionary as well, so that an error that came from another process
    (oslo.privsep) can be made again of its ``args``. ``hint``, which may be left out, is what was
    probably meant. Some of it was said by other programs, and by guests: a terminal obeys none.
    """

    msg_fmt = '%(reason)s'
    # another host, or this one later, could do what was asked for
    is_of_host = True

    def __init__(self, given: dict[str, Any] | None = None, /, **details: Any) -> None:
        self.details = {**(given or {}), **details}
        super().__init__(self.details)

    def __str__(self) -> str:
        return text.one_line(self.msg_fmt % {'hint': '', **self.details})


class ToolNotFound(PcowError):
    msg_fmt = '%(tool)s was not found: install it, or set [pcow] %(option)s to its path'


class BootShimMissing(PcowError):
    msg_fmt = (
        'the boot shim %(name)s was not found: build it (tools/build), set [pcow] boot_shim to its '
        'directory, or bring a kernel beside the image (--kernel; of an image in Glance the '
        'properties kernel_id and ramdisk_id)'
    )


class PackageMissing(PcowError):
    msg_fmt = '%(tool)s was not found: install it (apt install %(package)s)'


class ToolFailed(PcowError):
    """A program ended with an error; ``details`` has tool, exit_code and message (what
    it printed).
    """

    msg_fmt = '%(message)s'


class ChecksumsRefused(ToolFailed):
    """Data is known to be damaged, and new checksums would call it whole."""


class ToolLimited(PcowError):
    is_of_host = False
    msg_fmt = '%(tool)s has met its limit of %(limit)s, which no sound image comes near'


class ToolCrashed(PcowError):
    msg_fmt = (
        '%(tool)s has crashed (%(signal)s): it has a fault, or its limit of %(limit)s is the reason'
    )


class ToolOutputInvalid(PcowError):
    msg_fmt = (
        '%(tool)s printed something that this version does not understand (%(reason)s): install '
        'matching versions'
    )


class InvalidName(PcowError):
    is_of_host = False
    msg_fmt = 'the %(kind)s name %(name)r cannot be used: %(reason)s'


class InvalidSize(PcowError):
    is_of_host = False
    msg_fmt = 'the size %(size)s cannot be used: %(reason)s'


class SizeMissing(InvalidSize):
    msg_fmt = 'the image %(name)s needs a size, as it stands on no template: --size, or --template'


class ImageNotFound(PcowError):
    msg_fmt = 'there is no image %(path)s%(hint)s'


class ImageExists(PcowError):
    msg_fmt = '%(path)s exists already: choose another name or delete it first'


class ImageInUse(PcowError):
    msg_fmt = 'the image %(path)s cannot be deleted: %(reason)s'


class ImageHasChildren(ImageInUse):
    """Others stand on it, or cannot be read and may."""


class ImageProtected(PcowError):
    msg_fmt = (
        '%(path)s is immutable, as templates are, and this user cannot change that (%(reason)s): '
        'become root'
    )


class ImageDamaged(PcowError):
    """What stands on it would be damaged, too."""

    msg_fmt = (
        '%(path)s%(above)s is damaged, so nothing new may stand on it (found '
        '%(when)s: %(finding)s): put a whole copy in its place and run pcowctl pool scrub '
        '%(pool)s, or '
        'accept the damage with pcowctl pool scrub %(pool)s --accept %(name)s'
    )


class DataDamaged(PcowError):
    """A copy of it would have no checksum that tells."""

    msg_fmt = (
        '%(path)s is damaged (%(finding)s), and is not copied as if it were whole: put a whole '
        'copy in its place (see the runbook of a damaged image), or %(otherwise)s'
    )


class RamInvalid(PcowError):
    msg_fmt = "%(path)s cannot be the guest's RAM: %(reason)s: name another image, or delete it"


class DeviceInvalid(PcowError):
    """An image that a guest could not use as a persistent memory device with DAX."""

    msg_fmt = '%(path)s is no device image: %(reason)s'


class DeviceTooLarge(PcowError):
    """More than its owner was given."""

    msg_fmt = (
        '%(path)s says that it holds %(size)s of data, and %(owner)s gives %(allowed)s: a QEMU '
        'that was taken over can write that, and what was cut off or resized by hand can leave it. '
        '%(way_out)s, or give up what is beyond: pcowctl image resize --shrink %(path)s %(end)s'
    )


class ExportFailed(PcowError):
    msg_fmt = 'the export in %(path)s: %(reason)s'


class TransferFailed(PcowError):
    msg_fmt = 'the transfer of the image %(name)s: %(reason)s'


class NotATemplate(PcowError):
    msg_fmt = '%(path)s is not a template (not sealed): use the image commands for it'


class IsATemplate(PcowError):
    msg_fmt = '%(path)s is a template: use the template commands for it'


class SourceRejected(PcowError):
    is_of_host = False
    msg_fmt = '%(path)s cannot become a template: %(reason)s'


class PoolNotFound(PcowError):
    msg_fmt = "there is no pool %(name)s%(hint)s: 'pcowctl pool list' names those that are known"


class PoolExists(PcowError):
    msg_fmt = 'the pool name %(name)s is taken by %(path)s: choose another'


class PoolInvalid(PcowError):
    msg_fmt = '%(path)s is not a usable pool: %(reason)s'


class PoolNotEmpty(PcowError):
    msg_fmt = (
        'the pool %(name)s still holds %(count)d entries (%(entries)s): delete them first, '
        'or only forget the pool (--forget)'
    )


class PoolDraining(PcowError):
    msg_fmt = (
        "the pool %(name)s takes nothing new ('pcowctl pool drain --end %(name)s' changes that): "
        "choose another"
    )


class NoRoom(PcowError):
    msg_fmt = (
        '%(size)s more cannot be provisioned in the pool %(name)s: %(provisioned)s of %(limit)s '
        'are provisioned already '
        "(over-commit %(overcommit)g, see 'pcowctl pool set'): delete images, extend the pool, or "
        "raise its limit"
    )


class NoSpace(PcowError):
    msg_fmt = (
        '%(size)s cannot be stored in the pool %(name)s: %(free)s are free beside what is '
        'kept for guests: delete images, or extend the pool'
    )


class RegionNotFound(PcowError):
    msg_fmt = 'there is no region %(name)s of persistent memory; there are: %(known)s'


class NamespaceNotFound(PcowError):
    msg_fmt = 'there is no namespace %(name)s; there are: %(known)s'


class DeviceRefused(PcowError):
    """A block device or namespace that must not be formatted as it is."""

    msg_fmt = '%(device)s is left alone: %(reason)s'


class ProbeFailed(PcowError):
    """A file system does not do what images need of it."""

    msg_fmt = '%(path)s: %(reason)s'


class StateInvalid(PcowError):
    msg_fmt = 'the state file %(path)s cannot be used: %(reason)s'


class LockHeld(PcowError):
    msg_fmt = 'the lock %(path)s is not given up: %(holder)s'


class XmlInvalid(PcowError):
    msg_fmt = 'the domain XML cannot be used: %(reason)s'


class SeedInvalid(PcowError):
    msg_fmt = '%(path)s is no seed for cloud-init: %(reason)s'


class LibvirtFailed(PcowError):
    msg_fmt = 'libvirt (%(uri)s): %(reason)s'


class NoAnswer(LibvirtFailed):
    """A call of libvirt was given up. ``details`` has domain: None if libvirt itself was asked."""

    call: Any = None  # of pcow_driver.virt.libvirt_call
    msg_fmt = (
        '%(whom)s does not answer: %(call)s has not ended after %(seconds)d s, and may still be '
        'done: %(way_out)s'
    )


class DomainInvalid(PcowError):
    msg_fmt = 'the domain %(domain)s: %(reason)s'


class DomainExists(PcowError):
    msg_fmt = 'there is a domain %(domain)s already: choose another name'


class CheckpointNotFound(PcowError):
    msg_fmt = (
        "the domain %(domain)s has no checkpoint %(name)s: 'pcowctl vm tree %(domain)s' lists them"
    )


class StillFrozen(DomainInvalid):
    """What was asked for is done, but the guest's file systems cannot be thawed."""


class GuestHookFailed(PcowError):
    msg_fmt = 'the domain %(domain)s: %(reason)s'


class QmpFailed(PcowError):
    """QEMU answered a command with an error; ``details`` has command, error_class and
    description.
    """

    msg_fmt = '%(command)s: %(description)s'


class ConfigInvalid(PcowError):
    msg_fmt = 'the configuration cannot be used: %(reason)s'


class ConversionDirUnusable(PcowError):
    msg_fmt = (
        '[pcow] conversion_dir %(path)s: %(reason)s: make room in it, let this user write there, '
        'or name another directory'
    )


class PathRefused(PcowError):
    """A way that somebody else could lead elsewhere."""

    msg_fmt = '%(path)s is not used: %(reason)s'


class RootNeeded(PcowError):
    msg_fmt = 'only root may do this (%(what)s): sudo pcowctl ...'


class UsageInvalid(PcowError):
    msg_fmt = '%(reason)s; --help shows how to call it'
