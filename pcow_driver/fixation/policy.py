# SPDX-License-Identifier: Apache-2.0
"""What the owner of a domain wants of its persistence, in the metadata of the domain.

It goes where the domain goes, and with it. A connection of libvirt is one thread's.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any
import xml.etree.ElementTree as ET

from pcow_driver.common import exception
from pcow_driver.fixation import records
from pcow_driver.pools import room
from pcow_driver.virt import domain
from pcow_driver.virt import libvirt_host
from pcow_driver.virt import libvirt_xml
from pcow_driver.vm import state_room

AUTO = 'auto'
OFF = 'off'
FIXATE = 'fixate'
STOP = 'stop'
ON_SHUTDOWN = (FIXATE, STOP)
MAX_INTERVAL = 24 * 3600
MAX_PRIORITY = 1000

_TAG = 'protect'
_KEY = 'pcow'
_YES, _NO = 'yes', 'no'


@dataclasses.dataclass(frozen=True)
class Policy:
    """Of one domain."""

    interval: int | str = AUTO  # seconds between automatic checkpoints, AUTO or OFF
    on_shutdown: str = FIXATE
    priority: int = 0  # of a fixation that has little time: the highest first
    guest_hook: bool = False  # the guest is told before and after it
    # Of a domain that another program starts: which one, and the last run (of a record) that is
    # over, so that nothing of it is gone on from. See :mod:`pcow_driver.fixation.owned`.
    owner: str = ''
    over: str = ''

    def check(self) -> None:
        """:raises UsageInvalid:"""
        if isinstance(self.interval, int) and not 1 <= self.interval <= MAX_INTERVAL:
            raise exception.UsageInvalid(
                reason=f'the interval {self.interval} s is not from 1 s to {MAX_INTERVAL} s'
            )
        if not isinstance(self.interval, int) and self.interval not in (AUTO, OFF):
            raise exception.UsageInvalid(
                reason=f"the interval is '{self.interval}': give seconds (10s), {AUTO} or {OFF}"
            )
        if self.on_shutdown not in ON_SHUTDOWN:
            raise exception.UsageInvalid(
                reason=f"'{self.on_shutdown}' is none of {', '.join(ON_SHUTDOWN)}"
            )
        if abs(self.priority) > MAX_PRIORITY:
            raise exception.UsageInvalid(
                reason=f'the priority {self.priority} is not from -{MAX_PRIORITY} to {MAX_PRIORITY}'
            )

    def to_xml(self) -> str:
        values = {
            'interval': str(self.interval),
            'on-shutdown': self.on_shutdown,
            'priority': str(self.priority),
            'guest-hook': _YES if self.guest_hook else _NO,
            'owner': self.owner,
            'over': self.over,
        }
        element = ET.Element(_TAG, {key: value for key, value in values.items() if value})
        return ET.tostring(element, encoding='unicode')

    @classmethod
    def from_xml(cls, text: str) -> Policy:
        """:raises UsageInvalid: somebody has written what is none"""
        try:
            element = libvirt_xml.parse(text)
            found = cls(
                interval=parse_interval(element.get('interval', AUTO)),
                on_shutdown=element.get('on-shutdown', FIXATE),
                priority=int(element.get('priority', '0')),
                guest_hook=_is_yes(element.get('guest-hook', _NO)),
                owner=element.get('owner', ''),
                over=element.get('over', ''),
            )
        except (exception.XmlInvalid, ValueError) as e:
            raise exception.UsageInvalid(reason=f'the protection {text}: {e}') from None
        found.check()
        return found


def _is_yes(text: str) -> bool:
    if text not in (_YES, _NO):
        raise ValueError(f"guest-hook is '{text}': {_YES} or {_NO}")
    return text == _YES


def parse_interval(text: str) -> int | str:
    """'10s', '10', 'auto' or 'off'; what is none of them is left for :meth:`Policy.check`."""
    digits = text.removesuffix('s')
    return int(digits) if digits.isascii() and digits.isdigit() else text


def get(found: domain.Domain) -> Policy | None:
    """None: it is not protected.

    :raises UsageInvalid: what stands there is no policy
    """
    text = found.metadata(libvirt_xml.PROTECTION_NAMESPACE)
    return None if text is None else Policy.from_xml(text)


def put(found: domain.Domain, wanted: Policy) -> None:
    """Protect it from now on, and after each start.

    :raises UsageInvalid:
    :raises DomainInvalid: its RAM is no image, or libvirt starts it by itself, or Nova
    :raises NoRoom: the operator's limits have no room for what QEMU keeps for its last checkpoint
    """
    wanted.check()
    if found.ram() is None:
        raise exception.DomainInvalid(
            domain=found.name,
            reason=(
                'its RAM is no pcow image, so nothing of it can be kept: define it with '
                'pcowctl domain-xml --ram'
            ),
        )
    found.writable()
    if not wanted.owner and found.metadata(libvirt_xml.NOVA_NAMESPACE) is not None:
        raise exception.DomainInvalid(
            domain=found.name,
            reason=(
                'it is a server of Nova, which starts it after a boot of the host, and it would '
                'boot instead of going on: give it a flavor with pcow:persist=true (openstack '
                'server resize)'
            ),
        )
    if found.autostart():
        raise exception.DomainInvalid(
            domain=found.name,
            reason=(
                f'libvirt starts it when the host comes up, and it would boot instead of going on: '
                f'virsh autostart --disable {found.name}; a protected domain is started all the '
                f'same'
            ),
        )
    if wanted.on_shutdown == FIXATE:
        spare = functools.partial(state_room.of_spare, found)
        with libvirt_host.errors(), room.for_more(*found.writable(), beside=spare):
            found.set_metadata(libvirt_xml.PROTECTION_NAMESPACE, _KEY, wanted.to_xml())
    else:
        found.set_metadata(libvirt_xml.PROTECTION_NAMESPACE, _KEY, wanted.to_xml())


def change(found: domain.Domain, **wanted: Any) -> None:
    """As :func:`put`, of what it has already, or the defaults, with these fields changed.

    :param interval: as :func:`parse_interval`
    """
    if 'interval' in wanted:
        wanted['interval'] = parse_interval(wanted['interval'])
    put(found, dataclasses.replace(get(found) or Policy(), **wanted))


def remove(found: domain.Domain) -> None:
    """It has not to run any more; its checkpoints stay.

    :raises StateInvalid: nothing was changed, or its record could not be deleted
    """
    with records.alone(found.uuid):
        records.check_mine(found.uuid)
        found.set_metadata(libvirt_xml.PROTECTION_NAMESPACE, _KEY, None)
        records.forget(found.uuid)


def write(found: domain.Domain, wanted: Policy | None) -> None:
    """Of its owner, who has looked whether it can be: this and no more.

    :param wanted: None: it is not protected, and has not to go on
    """
    text = None if wanted is None else wanted.to_xml()
    found.set_metadata(libvirt_xml.PROTECTION_NAMESPACE, _KEY, text)


def in_definition(xml: str, wanted: Policy) -> str:
    """The same of a domain that is about to be defined.

    :raises XmlInvalid:
    """
    return libvirt_xml.with_metadata(xml, libvirt_xml.PROTECTION_NAMESPACE, wanted.to_xml())
