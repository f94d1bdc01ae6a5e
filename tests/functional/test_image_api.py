# SPDX-License-Identifier: Apache-2.0
"""pcow_driver.images.image with the real pcow-img and pcow-io (from PCOW_BIN_DIR or build/bin)."""

import os
from pathlib import Path
import shutil
import subprocess
import tempfile
import unittest

from pcow_driver.common import conf
from pcow_driver.common import exception
from pcow_driver.images import image

TOP = Path(__file__).resolve().parents[2]
BIN = Path(os.environ.get('PCOW_BIN_DIR') or TOP / 'build/bin').resolve()
MIB = 1 << 20


class ImageTest(unittest.TestCase):
    def setUp(self) -> None:
        self.assertTrue((BIN / 'pcow-img').exists(), f'{BIN} has no pcow-img: run tools/build')
        conf.CONF([], default_config_files=[])
        conf.CONF.set_override('pcow_img', str(BIN / 'pcow-img'), 'pcow')
        self.addCleanup(conf.CONF.clear_override, 'pcow_img', 'pcow')
        self.directory = tempfile.mkdtemp(prefix='pcow-test-', dir='/dev/shm')
        self.addCleanup(shutil.rmtree, self.directory, ignore_errors=True)
        self.base, self.top = self.path('base,1.pcow'), self.path('top.pcow')

    def path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def io(self, path: str, *commands: str) -> None:
        words = [word for command in commands for word in ('-c', command)]
        done = subprocess.run(
            [BIN / 'pcow-io', *words, path], capture_output=True, text=True, check=False
        )
        self.assertEqual(0, done.returncode, done)

    def make_chain(self) -> None:
        image.create(self.base, 8 * MIB)
        self.io(self.base, 'write -P 1 0 64k', 'write -P 2 4M 64k')
        image.create_overlay(self.top, self.base)
        self.io(self.top, 'write -P 3 4M 4k')

    def test_info_and_chain(self) -> None:
        self.make_chain()
        top, base = image.chain(self.top)
        self.assertEqual(
            (8 * MIB, 2, 'base,1.pcow', self.base, base.uuid, 'volatile'),
            (
                top.virtual_size,
                top.chain_depth,
                top.base_filename,
                top.base_path,
                top.base_uuid,
                top.persistence,
            ),
        )
        self.assertEqual(base, image.info(self.base))
        self.assertEqual('volatile', image.probe(self.directory))

    def test_cluster_size(self) -> None:
        image.create(self.base, 2 * MIB, cluster_size=4096)
        self.assertEqual(4096, image.info(self.base).cluster_size)
        with self.assertRaises(exception.ToolFailed):
            image.create(self.top, 2 * MIB, cluster_size=5000)
        self.assertFalse(os.path.exists(self.top))

    def test_map(self) -> None:
        self.make_chain()
        extents = image.map_extents(self.top)
        self.assertEqual(8 * MIB, sum(extent.length for extent in extents))
        at = {extent.start: extent for extent in extents}
        self.assertEqual((1, self.base), (at[0].depth, at[0].filename))
        self.assertEqual((0, self.top), (at[4 * MIB].depth, at[4 * MIB].filename))

    def test_convert_and_compare(self) -> None:
        self.make_chain()
        raw, back = self.path('x.raw'), self.path('back.pcow')
        image.convert(self.top, 'pcow', raw, 'raw')
        image.convert(raw, 'raw', back, cluster_size=4096)
        self.assertTrue(image.compare(self.top, 'pcow', back, 'pcow'))
        self.assertTrue(image.compare(self.top, 'pcow', raw, 'raw'))
        self.assertFalse(image.compare(self.top, 'pcow', self.base, 'pcow'))
        with self.assertRaises(exception.ToolFailed):
            image.compare(self.top, 'pcow', raw, 'pcow')
        with self.assertRaises(exception.ImageExists):
            image.convert(raw, 'raw', back)
        measured = image.measure(raw, 'raw')
        self.assertLessEqual(measured.required, measured.fully_allocated)

    def test_convert_a_snapshot(self) -> None:
        self.make_chain()
        image.snapshot_create(self.top, 'one')
        self.io(self.top, 'write -P 9 0 4k')
        image.convert(self.top, 'pcow', self.path('one.pcow'), snapshot='one')
        self.io(self.path('one.pcow'), 'read -P 1 0 64k', 'read -P 3 4M 4k')

    def test_rebase_keeps_what_the_guest_sees(self) -> None:
        self.make_chain()
        before = self.path('before.raw')
        image.convert(self.top, 'pcow', before, 'raw')
        image.rebase(self.top, None)
        self.assertEqual(1, len(image.chain(self.top)))
        self.assertTrue(image.compare(self.top, 'pcow', before, 'raw'))
        image.rebase(self.top, self.base)
        self.assertEqual(2, len(image.chain(self.top)))
        self.assertTrue(image.compare(self.top, 'pcow', before, 'raw'))

    def test_unsafe_rebase_after_a_rename(self) -> None:
        self.make_chain()
        renamed = self.path('renamed.pcow')
        os.rename(self.base, renamed)
        with self.assertRaises(exception.ToolFailed):
            image.chain(self.top)
        image.rebase(self.top, renamed, unsafe=True)
        self.assertEqual(renamed, image.chain(self.top)[1].filename)
        self.io(self.top, 'read -P 1 0 64k', 'read -P 3 4M 4k')
        # the base is known to have a child again
        self.assertEqual(image.info(renamed).uuid, image.info(self.top).base_uuid)

    def test_commit(self) -> None:
        self.make_chain()
        image.commit(self.top)
        self.io(self.base, 'read -P 1 0 64k', 'read -P 3 4M 4k', 'read -P 2 4100k 60k')
        self.assertTrue(image.check(self.base).clean)

    def test_repair_that_loses(self) -> None:
        self.make_chain()
        Path(self.top).unlink()  # one without a mirror, which would mend it
        subprocess.run(
            [
                *(BIN / 'pcow-img', 'create', '-q', '-o', 'mirror=off'),
                *('-b', Path(self.base).name, self.top),
            ],
            check=True,
        )
        self.io(self.top, 'write -P 2 1M 64k')
        own = next(item for item in image.map_extents(self.top) if item.depth == 0 and item.present)
        slab = (own.offset or 0) >> 21
        with open(self.top, 'r+b') as file:  # the owner word of its only slab
            file.seek((64 << 10) + slab * 8)
            file.write(b'\xff' * 8)
        found = image.check(self.top)
        refused = image.check(self.top, repair=True)
        self.assertEqual((False, True), (found.refused, refused.refused))
        self.assertEqual((found.lost, 0), (refused.lost, refused.corruptions_fixed))
        self.assertEqual((1, 'data'), (len(found.lost), found.lost[0].kind))
        done = image.check(self.top, repair=True, accept_loss=True)
        self.assertTrue(done.clean)
        self.assertEqual(f'{self.top}.rescue', done.rescue)
        self.assertTrue(os.path.exists(f'{self.top}.rescue'))

    def test_resize(self) -> None:
        self.make_chain()
        image.resize(self.top, 16 * MIB)
        self.assertEqual(16 * MIB, image.info(self.top).virtual_size)
        with self.assertRaises(exception.ToolFailed):
            image.resize(self.top, 2 * MIB)
        image.resize(self.top, 2 * MIB, shrink=True)
        self.assertEqual(2 * MIB, image.info(self.top).virtual_size)
        with self.assertRaises(exception.InvalidSize):
            image.resize(self.top, 3 * MIB)

    def test_seal(self) -> None:
        self.make_chain()
        image.rebase(self.top, None)
        image.seal(self.top)
        self.assertTrue(image.info(self.top).sealed)
        with self.assertRaises(exception.ToolFailed):
            image.snapshot_create(self.top, 'one')
        image.unseal(self.top)
        image.snapshot_create(self.top, 'one')

    def test_missing(self) -> None:
        for function in (
            image.info,
            image.chain,
            image.check,
            image.map_extents,
            image.commit,
            image.seal,
            image.unseal,
            image.snapshot_list,
        ):
            with self.assertRaises(exception.ImageNotFound):
                function(self.path('missing.pcow'))

    def test_foreign(self) -> None:
        foreign = self.path('foreign.pcow')
        for content in (b'', b'QFI\xfb' + bytes(8192), bytes(3 * MIB), os.urandom(3 * MIB)):
            Path(foreign).write_bytes(content)
            for function in (image.info, image.check, image.map_extents, image.snapshot_list):
                with self.assertRaises(exception.ToolFailed) as caught:
                    function(foreign)
                self.assertIn('foreign.pcow', str(caught.exception))
            self.assertEqual(content, Path(foreign).read_bytes())


if __name__ == '__main__':
    unittest.main()
