# SPDX-License-Identifier: Apache-2.0
"""Images whose base is gone: they are news for whoever has them, and deleted only if
nobody does.
"""

import os
from pathlib import Path
import subprocess
import time
import xml.etree.ElementTree as ET

from pcow_driver.common import exception
from pcow_driver.health import garbage
from pcow_driver.pools import registry
from pcow_driver.virt import disk_xml
from pcow_driver.virt import libvirt_host
from tests.unit import libvirt_node
from tests.unit.pcow_driver import base


class OrphanTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        self.node = self.directory / 'node.xml'
        self.name('/no/such.pcow')
        self.configure(pcow_img=str(self.programs / 'pcow-img'), libvirt_uri=f'test://{self.node}')
        self.pool = registry.PoolRegistry().create('p', str(self.directory / 'p'))
        self.base = Path(self.pool.create_image('base', size=2 << 20))
        self.kept = self.directory / 'kept'

    def name(self, path: str) -> None:
        """Let a domain of libvirt name this image."""
        self.node.write_text(libvirt_node.xml(path), encoding='utf-8')

    def orphan(self, name: str, *, age: float = 2 * 3600) -> tuple[str, garbage.Finding]:
        """An image and what is found of it."""
        path = self.pool.create_image(name, base='base')
        os.utime(path, (time.time() - age,) * 2)
        self.base.rename(self.kept)
        (found,) = (
            one
            for one in garbage.find(self.pool, libvirt_host.all_images())
            if one.kind is garbage.Kind.ORPHAN
        )
        self.assertEqual(path, found.path)
        return path, found

    def kept_because(self, found: garbage.Finding, reason: str) -> None:
        for action in (garbage.look_again, garbage.delete):
            self.assertIn(
                reason, str(self.assertRaises(exception.ImageInUse, action, self.pool, found))
            )
        self.assertTrue(os.path.exists(found.path))

    def test_deleted(self) -> None:
        path, found = self.orphan('mine')
        self.assertTrue(os.path.exists(path))
        garbage.delete(self.pool, found)
        self.assertEqual([], self.pool.entries())

    def test_template(self) -> None:
        path = self.pool.create_image('mine', base='base')
        subprocess.run([self.programs / 'pcow-img', 'seal', '-q', path], check=True)
        os.utime(path, (time.time() - 7200,) * 2)
        self.base.rename(self.kept)
        (found,) = garbage.find(self.pool, libvirt_host.all_images())
        garbage.delete(self.pool, found)
        self.assertEqual([], self.pool.entries())

    def test_open(self) -> None:
        """A guest goes on when the name of its base is gone."""
        path = self.pool.create_image('mine', base='base')
        with base.opened(path, self.programs / 'pcow-io'):
            os.utime(path, (time.time() - 7200,) * 2)
            self.base.rename(self.kept)
            (found,) = garbage.find(self.pool, libvirt_host.all_images())
            self.assertRaises(exception.ImageInUse, garbage.delete, self.pool, found)
        self.assertTrue(os.path.exists(path))

    def test_base_is_back(self) -> None:
        path, found = self.orphan('mine')
        self.kept.rename(self.base)
        self.assertIn(
            'is there',
            str(self.assertRaises(exception.ImageInUse, garbage.delete, self.pool, found)),
        )
        self.assertTrue(os.path.exists(path))

    def test_young(self) -> None:
        """A pool that is being brought back may have an image before its base."""
        _path, found = self.orphan('mine', age=60)
        self.kept_because(found, 'minutes ago')

    def test_of_a_service(self) -> None:
        _path, found = self.orphan('server-6d0f2b5e-7c1a-4e39-9b54-0a1f6c3d8e27-root')
        self.kept_because(found, 'Nova')

    def test_of_a_domain(self) -> None:
        path, found = self.orphan('mine')
        self.name(path)
        self.kept_because(found, 'a domain of libvirt names it')
        self.node.unlink()
        self.assertRaises(exception.LibvirtFailed, garbage.delete, self.pool, found)
        self.assertTrue(os.path.exists(path))

    def test_a_domain_that_cannot_be_read(self) -> None:
        path, found = self.orphan('mine')
        text = ET.tostring(disk_xml.metadata([disk_xml.Disk(path, 2 << 20)]), encoding='unicode')
        node = libvirt_node.xml('/no/such.pcow').replace('</metadata>', f'{text}</metadata>')
        self.node.write_text(node.replace(path, 'no-path'), encoding='utf-8')
        error = self.assertRaises(exception.DomainInvalid, garbage.delete, self.pool, found)
        self.assertIn('vm', str(error))
        self.assertIn('no-path', str(error))
        self.assertTrue(os.path.exists(path))

    def test_another_stands_on_it(self) -> None:
        path = self.pool.create_image('mine', base='base')
        self.pool.create_image('above', base='mine')
        os.utime(path, (time.time() - 7200,) * 2)
        self.base.rename(self.kept)
        (found,) = (
            one
            for one in garbage.find(self.pool, libvirt_host.all_images())
            if one.kind is garbage.Kind.ORPHAN
        )
        self.assertIn(
            'stand on it',
            str(self.assertRaises(exception.ImageInUse, garbage.delete, self.pool, found)),
        )
        self.assertTrue(os.path.exists(path))
