# SPDX-License-Identifier: Apache-2.0
"""pcowctl domain-xml"""

import argparse
import dataclasses
import os
import uuid as uuidlib

from cliff import command

from pcow_driver.cli import common
from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.images import model
from pcow_driver.pools import device
from pcow_driver.virt import boot
from pcow_driver.virt import disk_xml
from pcow_driver.virt import domain_xml
from pcow_driver.virt import libvirt_xml
from pcow_driver.virt import seed
from pcow_driver.vm import ram

# what a guest on a disk has not: it is booted by firmware, and virsh keeps its state with no disk
_OF_MEMORY = ('kernel', 'initrd', 'cmdline', 'carrier-disk', 'pmem', 'device', 'volatile', 'ram')


def _joined(*words: str | None) -> str:
    return ' '.join(filter(None, words))


def _with_ram(domain: domain_xml.Domain, reference: str) -> domain_xml.Domain:
    """The image is made last, when nothing else is refused any more."""
    whole = reference if '/' in reference else f'{reference}/{ram.name_of(domain.name)}'
    pool, name = common.split_reference(whole)
    domain = dataclasses.replace(domain, ram=pool.image_path(name))
    domain.check()
    ram.provide(pool, name, domain.memory)
    return domain


class DomainXml(command.Command):
    """Print libvirt XML of a guest with its root on a pcow image."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('image', help=common.IMAGE_HELP)
        parser.add_argument('--name', help='Name of the domain; default: that of the image.')
        parser.add_argument(
            '--uuid',
            help='UUID of the domain, for one that is defined already (virsh domuuid); default: '
            'a new one.',
        )
        parser.add_argument(
            '--bus',
            choices=disk_xml.BUSES,
            default=disk_xml.PMEM,
            help="How the guest sees the image: 'pmem', as persistent memory, or 'virtio', as a "
            'disk from which firmware boots, for a guest that knows no persistent memory; '
            'default: pmem. An image may change from one to the other while its guest is off.',
        )
        parser.add_argument(
            '--firmware',
            choices=domain_xml.FIRMWARES,
            help="With --bus virtio: what boots the guest; 'efi' is UEFI without secure boot; "
            'default: bios.',
        )
        parser.add_argument(
            '--kernel',
            help='Kernel file of the guest; default: the boot shim ([pcow] boot_shim), which takes '
            'the kernel that the boot loader in the image would take.',
        )
        parser.add_argument('--initrd', help='Initial RAM disk of that kernel.')
        parser.add_argument(
            '--cmdline',
            help=f'Kernel command line; default: {domain_xml.DEFAULT_CMDLINE}, and swiotlb=noforce '
            'where the guest has less than 2.75 GiB of RAM. Without --kernel: words that are added '
            'to that of the guest.',
        )
        parser.add_argument(
            '--memory',
            type=common.size_argument,
            default=units.GIB,
            help='RAM of the guest; default: 1G.',
        )
        parser.add_argument(
            '--ram',
            metavar='POOL[/NAME]',
            help='Have an image of this pool be the RAM, for checkpoints of the whole VM; it is '
            'made if it does not exist. NAME: by default that of the domain and '
            f'{names.RAM_SUFFIX}.',
        )
        parser.add_argument('--vcpus', type=int, default=1, help='Default: 1.')
        parser.add_argument(
            '--type',
            choices=domain_xml.TYPES,
            default=domain_xml.default_type(),
            help="'qemu' is emulation (TCG); default: 'kvm' if this host has /dev/kvm.",
        )
        parser.add_argument(
            '--emulator', help='QEMU with the pcow backend; default: [pcow] emulator.'
        )
        parser.add_argument('--machine', default='q35', help='Machine type; default: q35.')
        parser.add_argument(
            '--serial-file', metavar='FILE', help='Write the console to a file rather than a pty.'
        )
        parser.add_argument(
            '--carrier-disk',
            metavar='FILE',
            help='A small qcow2 disk to hold VM state for virsh snapshots.',
        )
        parser.add_argument(
            '--seed',
            metavar='FILE',
            help='A file system (ISO 9660 or FAT, label cidata) from which cloud-init in the guest '
            'takes user, keys and name; the guest has it as a read-only disk.',
        )
        parser.add_argument(
            '--network', choices=domain_xml.NETWORKS, default='none', help='Default: none.'
        )
        parser.add_argument('--pmem', action='store_true', help='Write <pmem/>.')
        parser.add_argument(
            '--device',
            choices=libvirt_xml.MODELS,
            help='How the guest sees the image; default: virtio-pmem if the pool is class '
            'page-cache, where an '
            'nvdimm cannot keep its promise that what the guest has flushed is durable, else '
            'nvdimm.',
        )
        parser.add_argument(
            '--volatile',
            action='store_true',
            help='Make it an nvdimm on class page-cache as well: a crash of the host may lose what '
            'the guest has '
            'flushed.',
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        def absolute(path: str | None) -> str | None:
            return None if path is None else os.path.abspath(path)

        for path in (parsed_args.kernel, parsed_args.initrd, parsed_args.carrier_disk):
            if path is not None and not os.path.isfile(path):
                raise exception.UsageInvalid(reason=f'{path} is not a file')
        if parsed_args.initrd is not None and parsed_args.kernel is None:
            raise exception.UsageInvalid(reason='--initrd is for --kernel')
        if parsed_args.seed is not None:
            seed.check(parsed_args.seed)
        path = common.image_path(parsed_args.image)
        info = image.info(path, force_share=True)
        if info.sealed:
            raise exception.UsageInvalid(
                reason=(
                    f"{path} is a template, no guest may write to it: 'pcowctl image create' makes "
                    f"an image on it"
                )
            )
        name = parsed_args.name or os.path.basename(path).removesuffix(names.IMAGE_SUFFIX)
        common_parts = domain_xml.Domain(
            name=name,
            memory=parsed_args.memory,
            vcpus=parsed_args.vcpus,
            type=parsed_args.type,
            emulator=absolute(parsed_args.emulator) or tool.find('emulator', build_first=True),
            machine=parsed_args.machine,
            uuid=None if parsed_args.uuid is None else disk_xml.check_uuid(parsed_args.uuid),
            serial_file=absolute(parsed_args.serial_file),
            carrier_disk=absolute(parsed_args.carrier_disk),
            seed=absolute(parsed_args.seed),
            network=parsed_args.network,
        )
        complete = _on_disk if parsed_args.bus == disk_xml.VIRTIO else _in_memory
        domain = complete(common_parts, parsed_args, path, info)
        if parsed_args.ram is not None:
            domain = _with_ram(domain, parsed_args.ram)
        self.app.stdout.write(domain.to_xml())


def _in_memory(
    domain: domain_xml.Domain, parsed_args: argparse.Namespace, path: str, info: model.ImageInfo
) -> domain_xml.Domain:
    """The image is a memory device, and QEMU loads a kernel."""
    if parsed_args.firmware is not None:
        raise exception.UsageInvalid(
            reason='no firmware boots from persistent memory: --firmware is for --bus virtio'
        )
    page_cache = info.persistence == 'page-cache'
    model_name = parsed_args.device or (
        'virtio-pmem' if page_cache and not parsed_args.volatile else 'nvdimm'
    )
    if page_cache and model_name == 'nvdimm' and not parsed_args.volatile:
        raise exception.UsageInvalid(
            reason=(
                f"the pool of {path} is page cache: an nvdimm there loses what the guest has "
                f"flushed when the host crashes; "
                "take --device virtio-pmem, or say --volatile if that may be"
            )
        )
    options = boot.memory_options(parsed_args.memory)  # all its devices are virtio
    if parsed_args.kernel is None:
        start = boot.shim(_joined(options, parsed_args.cmdline))
    else:
        start = boot.Start(
            kernel=os.path.abspath(parsed_args.kernel),
            initrd=None if parsed_args.initrd is None else os.path.abspath(parsed_args.initrd),
            cmdline=(
                _joined(domain_xml.DEFAULT_CMDLINE, options)
                if parsed_args.cmdline is None
                else parsed_args.cmdline
            ),
        )
    return dataclasses.replace(
        domain,
        nvdimms=[
            libvirt_xml.Nvdimm(
                path=path, size=info.virtual_size, pmem=parsed_args.pmem, model=model_name
            )
        ],
        kernel=start.kernel,
        initrd=start.initrd,
        cmdline=start.cmdline,
        volatile=page_cache and parsed_args.volatile,
    )


def _on_disk(
    domain: domain_xml.Domain, parsed_args: argparse.Namespace, path: str, info: model.ImageInfo
) -> domain_xml.Domain:
    """The image is a disk, from which firmware boots."""
    for option in _OF_MEMORY:
        if getattr(parsed_args, option.replace('-', '_')):
            raise exception.UsageInvalid(reason=f'--{option} does not go with --bus virtio')
    device.window(path, force_share=True)  # it is served from the end of its info block
    return dataclasses.replace(
        domain,
        uuid=domain.uuid or str(uuidlib.uuid4()),
        disks=[disk_xml.Disk(path=path, size=info.virtual_size)],
        firmware=parsed_args.firmware or domain_xml.FIRMWARES[0],
    )
