# SPDX-License-Identifier: Apache-2.0
"""A guest's file systems, written out and frozen by its agent for the moment of a snapshot.

A guest that stays frozen hangs at its next write. So it is thawed whatever ends the moment, also
where the call that freezes was interrupted, or has given up waiting: the agent may have frozen by
then.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import time
from typing import Any

from oslo_log import log as logging

from pcow_driver.common import exception
from pcow_driver.common import interrupt
from pcow_driver.virt import libvirt_call
from pcow_driver.virt import libvirt_xml

LOG = logging.getLogger(__name__)

_NO_AGENT = (
    'its file systems cannot be frozen, as no agent answers in the guest: install qemu-guest-agent '
    'in the guest and give '
    'the domain a channel org.qemu.guest_agent.0, or leave out --quiesce'
)


_SECONDS = 5  # for an answer
_FREEZE_SECONDS = 60  # a guest that writes much has much to write out


@contextlib.contextmanager
def _in_time(domain: Any, libvirt: Any, seconds: int) -> Iterator[None]:
    """The agent has so many seconds for each answer; libvirt waits for it without end otherwise. It
    keeps that for the domain, so it is put back for others. What is asked for goes before: a guest
    is also thawed where this cannot be set.
    """
    with contextlib.suppress(libvirt.libvirtError, exception.NoAnswer):
        domain.agentSetResponseTimeout(seconds, 0)
    try:
        yield
    finally:
        with interrupt.clearing_up(), contextlib.suppress(libvirt.libvirtError, exception.NoAnswer):
            domain.agentSetResponseTimeout(libvirt.VIR_DOMAIN_AGENT_RESPONSE_TIMEOUT_BLOCK, 0)


@contextlib.contextmanager
def frozen(name: str, domain: Any, libvirt: Any) -> Iterator[None]:
    """The file systems of a running guest are frozen; thawed at the end whatever happens, which no
    signal cuts short. One whose QEMU does not answer is when it does.

    :param domain: virDomain, as a :class:`pcow_driver.virt.libvirt_call.Proxy`
    :param libvirt: the binding
    :raises DomainInvalid: no agent answers, or it cannot freeze
    :raises StillFrozen: the block ended well, and it cannot thaw
    """
    if not libvirt_xml.has_agent(domain.XMLDesc(0)):
        raise exception.DomainInvalid(domain=name, reason=_NO_AGENT)
    said = 'may still be frozen'
    to_thaw = True
    try:
        try:
            with _in_time(domain, libvirt, _FREEZE_SECONDS):
                domain.fsFreeze()
        except exception.NoAnswer as e:
            _thaw_later(name, domain, e)
            to_thaw = False
            raise
        except libvirt.libvirtError as e:
            # An agent that answers so has frozen nothing, or thawed it; if somebody else had it
            # frozen, it stays so for him.
            to_thaw = "'guest-fsfreeze-freeze'" not in str(e)
            raise exception.DomainInvalid(
                domain=name,
                reason=(
                    f'its file systems cannot be frozen ({e}): see to the agent in the guest, or '
                    f'leave out --quiesce'
                ),
            ) from None
        said = 'are frozen'
        yield
        with interrupt.clearing_up():
            to_thaw = False
            try:
                _thaw(domain, libvirt)
            except (libvirt.libvirtError, exception.NoAnswer) as e:
                raise exception.StillFrozen(
                    domain=name,
                    reason=(
                        f"the snapshot was made, but the guest's file systems are frozen and "
                        f"cannot be thawed ({e}): try "
                        f"'virsh domfsthaw {name}'"
                    ),
                ) from None
    except BaseException as error:
        own = libvirt_call.unanswered(error, name)
        if not to_thaw:
            pass
        elif own is not None:
            _thaw_later(name, domain, own)
        else:
            with interrupt.clearing_up():
                try:
                    _thaw(domain, libvirt)
                except (libvirt.libvirtError, exception.NoAnswer) as e:
                    LOG.error(
                        "the domain %s: the guest's file systems %s and cannot be thawed (%s): try "
                        "'virsh domfsthaw %s'",
                        name,
                        said,
                        e,
                        name,
                    )
        raise


def _thaw_later(name: str, domain: Any, error: exception.NoAnswer) -> None:
    """When what its QEMU has not answered has ended; its agent answers then, too."""
    bare = libvirt_call.bare(domain)

    def thaw(_answer: Any) -> None:
        bare.agentSetResponseTimeout(_FREEZE_SECONDS, 0)
        bare.fsThaw()

    libvirt_call.afterwards(error, thaw)
    LOG.warning(
        "The domain %s: the guest's file systems may be frozen, and it does not answer: they are "
        "thawed when it does. If this process ends before: 'virsh domfsthaw %s'",
        name,
        name,
    )


def _thaw(domain: Any, libvirt: Any) -> None:
    with _in_time(domain, libvirt, _FREEZE_SECONDS):
        domain.fsThaw()


def set_clock(name: str, domain: Any, libvirt: Any) -> bool:
    """Have a running guest take the host's time.

    :return: whether its agent has
    """
    try:
        if not libvirt_xml.has_agent(domain.XMLDesc(0)):
            return False
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        with _in_time(domain, libvirt, _SECONDS):
            domain.setTime({'seconds': seconds, 'nseconds': nanoseconds}, 0)
    except (libvirt.libvirtError, exception.NoAnswer) as e:
        LOG.warning('%s: its clock cannot be set: %s', name, e)
        return False
    return True
