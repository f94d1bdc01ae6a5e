# SPDX-License-Identifier: Apache-2.0
"""Machines that go on from a checkpoint of another one, beside it.

Each image of a child is a new one that stands on the parent's part of the checkpoint, in the same
pool. The checkpoint is kept as long as there is a child; the parent may run, be reverted, be off.
A connection of libvirt is one thread's.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import os
import time
from typing import Any

from oslo_log import log as logging

from pcow_driver.common import exception
from pcow_driver.common import interrupt
from pcow_driver.common import names
from pcow_driver.copies import fork as image_fork
from pcow_driver.images import image_locks
from pcow_driver.virt import domain
from pcow_driver.virt import fork_xml
from pcow_driver.virt import guest_hook
from pcow_driver.virt import libvirt_host
from pcow_driver.vm import checkpoint
from pcow_driver.vm import model
from pcow_driver.vm import ram
from pcow_driver.vm import tree

LOG = logging.getLogger(__name__)

_NUMBER = '{n}'
_GUEST_SECONDS = 120.0  # for keys and the like


def child_names(pattern: str, count: int) -> list[str]:
    """Names of ``count`` children: ``{n}`` in the pattern is the number of each, from 1 on.

    :raises UsageInvalid: several would have one name
    """
    if count < 1:
        raise exception.UsageInvalid(reason=f'--count {count}: give at least 1')
    if count > 1 and _NUMBER not in pattern:
        raise exception.UsageInvalid(
            reason=f'--name {pattern}: {count} forks need {_NUMBER} in it, their number'
        )
    return [pattern.replace(_NUMBER, str(number)) for number in range(1, count + 1)]


def fork(
    connection: Any,
    parent: domain.Domain,
    name: str | None,
    children: Sequence[str],
    *,
    insecure: bool = False,
    with_hook: bool = False,
) -> Iterator[model.Forked]:
    """Start domains that go on from the parent's checkpoint ``name``, one by one.

    One that fails leaves nothing; those before it run on.

    :param name: None: one of this moment, called ``fork-`` and the first child's name; it stays,
        unless no child came of it
    :param children: their names
    :param insecure: also if the guest cannot learn that it was forked: parent and children then
        make the same random numbers, and the same keys
    :param with_hook: the guest of each has its clock put right and is told who it is; one whose
        hook does not end well does not stay
    :raises CheckpointNotFound:
    :raises DomainInvalid: the guest has no generation id, or a device that a fork cannot have
    :raises DomainExists: a child's name is taken
    :raises ImageExists:
    :raises NoRoom: the operator's limits have no room for it
    :raises ImageDamaged: a scrub has found an image damaged, or what it stands on
    :raises QmpFailed: QEMU cannot, and says why
    :raises GuestHookFailed: of ``with_hook``
    """
    if name is not None:
        names.check_snapshot_name(name)
        if all(one.name != name for one in tree.checkpoints(parent)):
            raise exception.CheckpointNotFound(domain=parent.name, name=name)
    xml = parent.definition()
    if not insecure and not fork_xml.has_generation_id(xml):
        raise exception.DomainInvalid(
            domain=parent.name,
            reason=(
                'its guest would not learn that it was forked, and make the same random numbers '
                'and keys as its parent: define it with <genid/>, or give --insecure'
            ),
        )
    fork_xml.check(xml, parent.writable())
    for child in children:
        if libvirt_host.exists(connection, child):
            raise exception.DomainExists(domain=child)
    for path in parent.writable():
        image_fork.check_sound(path)
    with contextlib.ExitStack() as stack:
        if name is None:
            name = f'fork-{children[0]}'
            checkpoint.take(parent, name)
            stack.callback(_take_back, parent, name)
        for child in children:
            made = _fork(connection, parent, name, child, xml, with_hook)
            stack.pop_all()
            yield made


def _take_back(parent: domain.Domain, name: str) -> None:
    with interrupt.clearing_up():
        checkpoint.delete(parent, name)


def _fork(
    connection: Any, parent: domain.Domain, name: str, child: str, xml: str, with_hook: bool
) -> model.Forked:
    begun = time.monotonic_ns()
    with contextlib.ExitStack() as stack:
        images = {}
        for path in parent.writable():
            images[path] = image_fork.fork(
                path,
                name,
                _image_name(parent, path, child),
                cluster_size=image_fork.VM_CLUSTER_SIZE,
            )
            stack.callback(_unlink, images[path])
        made = domain.Domain.define(connection, fork_xml.fork(xml, child, images))
        stack.callback(made.undefine)
        with made.started():
            made.qmp('pcow-checkpoint-revert')
        took = time.monotonic_ns() - begun
        if with_hook:
            made.run_guest_hook(guest_hook.Event.FORKED, child, made.uuid, seconds=_GUEST_SECONDS)
        stack.pop_all()
    return model.Forked(name=child, images=tuple(images.values()), time=took)


def _unlink(path: str) -> None:
    """Of a child that did not start. Whoever has it open, as its QEMU that does not end, keeps it;
    why the child did not start is told then as well.
    """
    with interrupt.clearing_up():
        try:
            with image_locks.alone(path):
                os.unlink(path)
        except exception.ImageNotFound:
            pass
        except (exception.ImageInUse, OSError) as e:
            LOG.warning('The image of a child that did not start stays: %s', e)


def _image_name(parent: domain.Domain, path: str, child: str) -> str:
    """As that of the parent, with the child's name in place of the parent's."""
    if path == parent.ram():
        return ram.name_of(child)
    image = os.path.basename(path).removesuffix(names.IMAGE_SUFFIX)
    return child if image == parent.name or len(parent.images()) == 1 else f'{child}-{image}'
