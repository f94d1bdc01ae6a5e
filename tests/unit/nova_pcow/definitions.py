# SPDX-License-Identifier: Apache-2.0
"""Domains of which Nova's libvirt for tests keeps all of their definition, and which can be killed,
and go on from a checkpoint: no QEMU runs here.
"""

from __future__ import annotations

from typing import Any
import xml.etree.ElementTree as ET

import fixtures
from nova.tests.fixtures import libvirt as fakelibvirt

from pcow_driver.fixation import recover
from pcow_driver.virt import domain
from pcow_driver.virt import libvirt_call
from pcow_driver.virt import libvirt_xml
from pcow_driver.vm import checkpoint

MOMENT = 'pcow-fixation-20261128T015513221Z'


class Definitions(fixtures.Fixture):
    """``calls`` is what was done with the guests."""

    def _setUp(self) -> None:  # noqa: N802 - the name is given by fixtures
        self.calls = list[Any]()
        self.killed = self.paused_on_purpose = False
        self.has_run = True
        self.fails: Exception | None = None  # a start at a checkpoint
        make = fakelibvirt.Domain.__init__

        def init(one: Any, connection: Any, xml: str, *more: Any, **later: Any) -> None:
            make(one, connection, xml, *more, **later)
            one.kept = xml

        def destroy(one: Any) -> None:
            self.killed = False
            one._state = fakelibvirt.VIR_DOMAIN_SHUTOFF
            one._connection._mark_not_running(one)

        kind = 'pcow_driver.virt.domain.Domain'
        for name, new in (
            ('nova.tests.fixtures.libvirt.Domain.__init__', init),
            ('nova.tests.fixtures.libvirt.Domain.destroy', destroy),
            ('nova.tests.fixtures.libvirt.Domain.XMLDesc', lambda one, flags=0: one.kept),
            (f'{kind}.metadata', self._metadata),
            (f'{kind}.set_metadata', self._set_metadata),
            (f'{kind}.was_killed', lambda _found: self.killed),
            (f'{kind}.stopped_on_purpose', lambda _found: not self.killed),
            (f'{kind}.paused_on_purpose', lambda _found: self.paused_on_purpose),
            (f'{kind}.has_failed', lambda _found: False),
            (f'{kind}.has_run', lambda _found: self.has_run),
            (f'{kind}.saved', lambda _found: False),
            (f'{kind}.running', lambda found: found.active()),
            (f'{kind}.resume', lambda _found: self.calls.append('run')),
            (f'{kind}.arrive', lambda _found: self.calls.append('arrive')),
        ):
            self.useFixture(fixtures.MonkeyPatch(name, new))
        self.useFixture(fixtures.MockPatchObject(recover, 'last_moment', return_value=MOMENT))
        self.useFixture(fixtures.MockPatchObject(recover, 'keep_unsaved'))
        self.useFixture(fixtures.MockPatchObject(checkpoint, 'start_at', new=self._start_at))
        self.useFixture(
            fixtures.MockPatch('pcow_driver.vm.tree.checkpoints', new=lambda _found: [])
        )

    def end(self, found: domain.Domain, *, killed: bool = False) -> None:
        """As its QEMU does by itself, or with the host."""
        found._domain.destroy()
        self.killed = killed

    def _start_at(self, found: domain.Domain, name: str, *, run: bool) -> str:
        assert not run
        self.calls.append(name)
        if self.fails is not None:
            raise self.fails
        found._domain.create()
        return name

    @staticmethod
    def _metadata(found: Any, namespace: str, *, live: bool = False) -> str | None:
        assert not live
        for item in libvirt_xml.parse(found._domain.kept).findall(f'metadata/{{{namespace}}}*'):
            item.tag = item.tag.partition('}')[2]
            return ET.tostring(item, encoding='unicode')
        return None

    @staticmethod
    def _set_metadata(
        found: Any, namespace: str, _key: str, element: str | None, *, live: bool = False
    ) -> None:
        assert not live
        # as libvirt, which does not keep what stood there
        kept = libvirt_xml.with_metadata(found._domain.kept, namespace, element or '<none/>')
        if element is None:
            root = libvirt_xml.parse(kept)
            metadata = root.find('metadata')
            assert metadata is not None
            for item in metadata.findall(f'{{{namespace}}}*'):
                metadata.remove(item)
            kept = libvirt_xml.to_string(root)
        libvirt_call.bare(found._domain).kept = kept
