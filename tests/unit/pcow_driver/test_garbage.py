# SPDX-License-Identifier: Apache-2.0
"""What "pcowctl pool garbage" finds and deletes; pool, images and libvirt (its test driver, with a domain in a file) are real."""

import os
from pathlib import Path
import time

from pcow_driver import domain
from pcow_driver import exception
from pcow_driver import garbage
from pcow_driver import registry
from tests.unit.pcow_driver import base

_NODE = '''<node><domain type='test'><name>vm</name><maxMemory slots='4'>4194304</maxMemory><memory>1048576</memory>
<vcpu>1</vcpu><os><type>hvm</type></os><cpu><numa><cell id='0' cpus='0' memory='1048576'/></numa></cpu><devices>
<memory model='nvdimm' access='shared'><source><path>{0}</path></source>
<target><size unit='KiB'>67584</size><node>0</node></target></memory></devices></domain></node>'''


class UnusedImageTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        self.node = self.directory / 'node.xml'
        self.name('/no/such.pcow')
        self.configure(pcow_img=str(programs / 'pcow-img'), libvirt_uri=f'test://{self.node}')
        self.pool = registry.PoolRegistry().create('p', str(self.directory / 'p'))

    def name(self, path: str) -> None:
        """Let a domain of libvirt name this image."""
        self.node.write_text(_NODE.format(path), encoding='utf-8')

    def make(self, name: str, *, age: float = 2 * 3600) -> str:
        path = self.pool.create_image(name, size=2 << 20)
        os.utime(path, (time.time() - age,) * 2)
        return path

    def find(self) -> list[garbage.Finding]:
        return garbage.find(self.pool, domain.all_images())

    def test_found_and_deleted(self) -> None:
        path = self.make('mine')
        self.assertEqual([(garbage.Kind.UNUSED_IMAGE, path)], [(one.kind, one.path) for one in self.find()])
        garbage.delete(self.pool, self.find()[0])
        self.assertEqual([], self.pool.entries())

    def test_what_belongs_to_cinder_and_nova(self) -> None:
        """A detached volume, and a server that waits elsewhere for its confirmation, are in no domain of this host."""
        self.make('volume-6d0f2b5e-7c1a-4e39-9b54-0a1f6c3d8e27')
        self.make('server-6d0f2b5e-7c1a-4e39-9b54-0a1f6c3d8e27-root')
        self.assertEqual([], self.find())

    def test_young_one_may_be_for_a_domain_that_is_being_made(self) -> None:
        self.make('mine', age=60)
        self.assertEqual([], self.find())

    def test_needed_by_now(self) -> None:
        path = self.make('mine')
        found, = self.find()
        self.name(path)
        self.assertRaises(exception.ImageInUse, garbage.delete, self.pool, found)
        self.node.unlink()                             # nobody knows
        self.assertRaises(exception.LibvirtFailed, garbage.delete, self.pool, found)
        self.name('/no/such.pcow')
        os.utime(path)
        self.assertRaises(exception.ImageInUse, garbage.delete, self.pool, found)
        self.assertEqual(['mine.pcow'], self.pool.entries())
