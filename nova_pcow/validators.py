# SPDX-License-Identifier: Apache-2.0
"""Validators of the extra specs ``pcow:*`` for Nova's API: unknown and malformed ones are rejected
when they are set.
"""

from nova.api.validation.extra_specs import base

from nova_pcow.common import flavor
from pcow_driver.virt import disk_xml


def register() -> list[base.ExtraSpecValidator]:
    """What Nova calls in the module that its entry point
    ``nova.api.extra_spec_validators`` names.
    """
    return [
        base.ExtraSpecValidator(
            name=flavor.ROOT_SPEC,
            description='Whether the root of the server is in persistent memory. The root has the '
            'disk size of the flavor; if that '
            'is 0, what resources:CUSTOM_PCOW_MB leaves beside the data devices and the RAM.',
            value={'type': bool, 'description': 'Whether the root is in persistent memory.'},
        ),
        base.ExtraSpecValidator(
            name=flavor.BUS_SPEC,
            description='How the guest sees its root: as persistent memory, or as an ordinary disk '
            'from which firmware boots. The image property of the same name wins.',
            value={
                'type': str,
                'description': f'One of {", ".join(disk_xml.BUSES)}.',
                'enum': list(disk_xml.BUSES),
            },
        ),
        base.ExtraSpecValidator(
            name=flavor.RAM_SPEC,
            description='Whether the RAM of the guest is an image in the pool of its root, so that '
            'checkpoints of the whole server can be taken on its host. It needs pcow:root.',
            value={'type': bool, 'description': 'Whether the RAM is an image.'},
        ),
        base.ExtraSpecValidator(
            name=flavor.PERSIST_SPEC,
            description='Whether the server goes on where it was after a shutdown or a power '
            'failure of its host, or a crash of its QEMU, without a boot. It needs pcow:ram, and '
            'on its host pcow-protect.service, pcow-fixate.service and [DEFAULT] '
            'resume_guests_state_on_host_boot.',
            value={'type': bool, 'description': 'Whether the server goes on.'},
        ),
        base.ExtraSpecValidator(
            name=flavor.DATA_SPEC,
            description=f'Sizes of additional persistent memory devices, at most '
            f'{flavor.MAX_DATA_DEVICES}.',
            value={
                'type': str,
                'description': 'MiB of each device, even numbers with commas between them.',
                'pattern': flavor.DATA_PATTERN,
            },
        ),
        base.ExtraSpecValidator(
            name=flavor.FORMAT_SPEC,
            description='File systems of the additional devices: one for all, or one for each.',
            value={
                'type': str,
                'description': f'One of {", ".join(flavor.FORMATS)} for each device, with commas '
                f'between them.',
                'pattern': flavor.FORMAT_PATTERN,
            },
        ),
    ]
