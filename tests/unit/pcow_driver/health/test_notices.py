# SPDX-License-Identifier: Apache-2.0
"""What a domain that runs is told of the damage of what it stands on; images are real, and the
domain is a stand-in.
"""

import os
from pathlib import Path
from unittest import mock

from pcow_driver.health import notices
from pcow_driver.images import image
from pcow_driver.virt import libvirt_xml
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
        notices._update_one(
            self.domain, str(self.pool), {self.path(name): ['lost'] for name in damaged}
        )
        return sorted(Path(path).stem for path in notices._parse(self.told))

    def test_told_and_taken_back(self) -> None:
        tops = [self.path('a'), self.path('b')]
        self.assertEqual(['a-base'], self.update(tops, 'a-base', 'other'))
        self.assertEqual(['a-base', 'b'], self.update(tops, 'b', 'a-base'))
        self.assertEqual([], self.update(tops))

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
