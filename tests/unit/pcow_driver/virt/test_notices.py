# SPDX-License-Identifier: Apache-2.0
"""What a domain that runs is told of the damage of what it stands on; images are real, and the
domain is a stand-in.
"""

import contextlib
import os
from pathlib import Path
from unittest import mock

from pcow_driver.common import exception
from pcow_driver.images import image
from pcow_driver.pools import registry
from pcow_driver.pools import scrubs
from pcow_driver.virt import domain
from pcow_driver.virt import libvirt_host
from pcow_driver.virt import libvirt_xml
from pcow_driver.virt import notices
from tests.unit.pcow_driver import base


class NoticesTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        self.configure(pcow_img=str(programs / 'pcow-img'))
        self.pool = self.directory / 'pool'
        self.pool.mkdir()
        for name in ('a', 'b'):
            image.create(self.path(f'{name}-base'), 2 << 20)
            image.create_overlay(self.path(name), self.path(f'{name}-base'))
        self.domain = mock.MagicMock()
        self.domain.name = 'vm'
        self.domain.ram.return_value = None
        self.domain.metadata.side_effect = lambda *_args, **_options: self.told
        self.domain.set_metadata.side_effect = self.tell
        self.told: str | None = None

    def path(self, name: str) -> str:
        return str(self.pool / f'{name}.pcow')

    def tell(self, _namespace: str, _key: str, element: str | None, *, live: bool) -> None:
        assert live
        self.told = element

    def update(self, tops: list[str], *damaged: str) -> list[str]:
        """The images of whose damage the domain, which has these, is told."""
        self.domain.images.return_value = [
            libvirt_xml.Nvdimm(path=path, size=2 << 20, alias='a') for path in tops
        ]
        notices._update(
            self.domain, {str(self.pool): {self.path(name): ['lost'] for name in damaged}}
        )
        return sorted(Path(path).stem for path in notices._parse(self.told))

    def test_told_and_taken_back(self) -> None:
        tops = [self.path('a'), self.path('b')]
        self.assertEqual(['a-base'], self.update(tops, 'a-base', 'other'))
        self.assertEqual(['a-base', 'b'], self.update(tops, 'b', 'a-base'))
        self.assertEqual([], self.update(tops))

    def connected(self) -> contextlib.ExitStack:
        """Meanwhile this is the domain that libvirt has."""
        stack = contextlib.ExitStack()
        for module, name, value in (
            (libvirt_host, 'connect', contextlib.nullcontext),
            (libvirt_host, 'names_of_all', lambda _connection: ['vm']),
            (domain, 'Domain', lambda _connection, _name: self.domain),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        return stack

    def has(self, *names: str) -> None:
        self.domain.images.return_value = [
            libvirt_xml.Nvdimm(path=self.path(name), size=2 << 20, alias='a') for name in names
        ]

    def result(self, name: str, *findings: str) -> scrubs.Result:
        return scrubs.Result(os.stat(self.path(name)).st_ino, scrubs.now(), findings=findings)

    def test_told_where_it_is_found(self) -> None:
        pool = registry.PoolRegistry().create('p', str(self.pool))
        self.has('a')
        with self.connected():
            notices.keep(pool, 'a-base', self.result('a-base', 'lost'))
            self.assertEqual({self.path('a-base'): 'lost'}, notices._parse(self.told))
            self.assertEqual(['a-base'], scrubs.read(pool.uuid).damaged())
            # and what is found later of another leaves that as it is
            notices.keep(pool, 'b', self.result('b', 'lost'))
            self.assertEqual({self.path('a-base'): 'lost'}, notices._parse(self.told))
            notices.keep(pool, 'a-base', self.result('a-base'))
            self.assertIsNone(self.told)

    def test_told_where_it_cannot_be_kept(self) -> None:
        pool = registry.PoolRegistry().create('p', str(self.pool))
        self.has('a')
        refused = exception.StateInvalid(path='scrubs', reason='Permission denied')
        with (
            self.connected(),
            mock.patch.object(scrubs, 'put', side_effect=refused),
            self.assertLogs('pcow_driver.virt.notices', 'WARNING') as log,
        ):
            notices.keep(pool, 'a-base', self.result('a-base', 'lost'))
        self.assertIn('What was found of a-base is not kept', log.output[0])
        self.assertEqual({self.path('a-base'): 'lost'}, notices._parse(self.told))

    def test_domain_that_starts(self) -> None:
        """What it knows from another host, or another time, goes."""
        pool = registry.PoolRegistry().create('p', str(self.pool))
        self.has('a')
        old = {'/other/host/x.pcow': 'lost', self.path('b'): 'lost'}
        with self.connected():
            self.told = notices._format(old)
            notices.tell_domain('vm')
            self.assertIsNone(self.told)
            scrubs.put(pool.uuid, 'a-base', self.result('a-base', 'lost'))
            self.told = notices._format(old)
            notices.tell_domain('vm')
            self.assertEqual({self.path('a-base'): 'lost'}, notices._parse(self.told))
            self.told = None
            notices.tell_domain('vm')
            self.assertEqual({self.path('a-base'): 'lost'}, notices._parse(self.told))

    def test_beside_an_image_of_a_directory_that_is_gone(self) -> None:
        tops = ['/no/such/directory/c.pcow', self.path('a')]
        self.assertEqual(['a-base'], self.update(tops, 'a-base'))

    def test_beside_an_image_that_cannot_be_read(self) -> None:
        """Of it the domain goes on to know what it knew, as long as that is damaged."""
        tops = [self.path('a'), self.path('b')]
        self.assertEqual(['a-base'], self.update(tops, 'a-base'))
        with open(self.path('a'), 'r+b') as f:
            f.write(bytes(4096))
        self.assertEqual(
            ['a', 'a-base', 'b-base'], self.update(tops, 'a', 'a-base', 'b-base', 'other')
        )
        self.assertEqual(['b-base'], self.update(tops, 'b-base'))
