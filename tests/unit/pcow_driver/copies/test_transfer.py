# SPDX-License-Identifier: Apache-2.0
"""Templates as streams; volumes that go to other hosts are in
tests/unit/cinder_pcow/test_transfer.py.
"""

from collections.abc import Callable
import io
import os
from pathlib import Path
import stat
from typing import Any
from unittest import mock

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.copies import transfer
from pcow_driver.images import image
from pcow_driver.images import model
from pcow_driver.pools import registry
from pcow_driver.pools import scrubs
from tests.unit.pcow_driver import base

MIB = units.MIB
OF_THE_SERVICE = 'image-6d0f2b5e-7c1a-4e39-9b54-0a1f6c3d8e27-0123456789abcdef'


class SealedTest(base.TestCase):
    """A sealed image arrives sealed, with what its guest would see, as one file that stands on
    nothing.
    """

    def setUp(self) -> None:
        super().setUp()
        self.programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        self.configure(pcow_img=str(self.programs / 'pcow-img'))
        self.here, self.there = (
            registry.PoolRegistry().create(name, str(self.directory / name))
            for name in ('here', 'there')
        )

    def io(self, path: str, *commands: str) -> None:
        tool.run(
            str(self.programs / 'pcow-io'),
            *(word for command in commands for word in ('-c', command)),
            path,
        )

    def arrives(self, path: str) -> None:
        image.seal(path)
        stream = io.BytesIO()
        transfer.send(path, stream)
        stream.seek(0)
        arrived = transfer.receive(self.there, 't', stream)
        info = image.info(arrived)
        self.assertTrue(info.sealed)
        self.assertEqual((None, ()), (info.base_filename, info.snapshots))
        self.assertTrue(image.compare(path, 'pcow', arrived, 'pcow'))
        self.assertEqual(['t.pcow'], self.there.entries())

    def test_plain(self) -> None:
        path = self.here.create_image('t', size=2 * MIB)
        self.io(path, 'write -P 1 0 64k')
        self.arrives(path)

    def test_with_snapshots(self) -> None:
        path = self.here.create_image('t', size=2 * MIB)
        self.io(path, 'write -P 1 0 64k')
        image.snapshot_create(path, 's')
        self.io(path, 'write -P 2 64k 64k')
        self.arrives(path)

    def test_on_an_image(self) -> None:
        self.io(self.here.create_image('below', size=2 * MIB), 'write -P 1 0 64k')
        path = self.here.create_image('t', base='below')
        self.io(path, 'write -P 2 64k 64k')
        self.arrives(path)

    def test_checksums_of_what_is_made_one_file(self) -> None:
        """A template has them where it arrives, too."""
        below = self.here.create_image('below', size=8 * MIB)
        self.io(below, 'write -P 1 0 64k')
        image.seal(below, checksums=True)
        path = self.here.create_image('t', base='below')
        self.io(path, 'write -P 2 2M 64k')
        self.arrives(path)
        found = image.check_data(self.there.existing_path('t'))
        self.assertEqual((2 * 64 << 10, 0), (found.data_verified, found.data_without))
        # but none of damaged data: they would call it whole
        base.flip(below)
        stream = io.BytesIO()
        transfer.send(path, stream, accept_damage=True)
        self.assertIn(b'"damaged": true', stream.getvalue().partition(b'\n')[0])
        stream.seek(0)
        found = image.check_data(transfer.receive(self.there, 'damaged', stream))
        self.assertEqual(0, found.data_verified)
        self.assertEqual(['damaged'], scrubs.read(self.there.uuid).damaged())

    def test_on_a_template_of_the_image_service(self) -> None:
        """Whoever receives it could not put another below: it is sealed."""
        below = self.here.create_image(OF_THE_SERVICE, size=2 * MIB)
        self.io(below, 'write -P 1 0 64k')
        image.seal(below)
        path = self.here.create_image('t', base=OF_THE_SERVICE)
        self.io(path, 'write -P 2 64k 64k')
        self.arrives(path)

    def test_damaged_data(self) -> None:
        """The checksums of a template's data travel, and are compared where it arrives."""
        path = self.here.create_image('t', size=2 * MIB)
        self.io(path, 'write -P 1 0 64k')
        image.seal(path, checksums=True)
        content = Path(path).read_bytes()
        position = content.index(bytes([1]) * units.PAGE_SIZE)
        with open(path, 'r+b') as file:
            file.seek(position + 100)
            file.write(b'\2')
        stream = io.BytesIO()
        error = self.assertRaises(exception.TransferFailed, transfer.send, path, stream)
        self.assertIn(f'{path} is damaged: ', str(error))
        self.assertEqual(b'', stream.getvalue())
        self.assertEqual(['t'], scrubs.read(self.here.uuid).damaged())
        self.assertRaises(exception.ImageDamaged, self.here.create_image, 'new', base='t')
        scrubs.forget(self.here.uuid)
        # and again where it arrives
        sound = mock.patch.object(model.CheckResult, 'damage', None)
        with sound:
            transfer.send(path, stream)
        stream.seek(0)
        error = self.assertRaises(
            exception.TransferFailed, transfer.receive, self.there, 't', stream
        )
        self.assertIn('the image that has arrived is damaged: ', str(error))
        self.assertIn('it is not what its checksum was made of', str(error))
        self.assertEqual([], self.there.entries())
        # what is made one file for the stream is compared before
        self.here.create_image('top', base='t')
        error = self.assertRaises(
            exception.TransferFailed, transfer.send, self.here.existing_path('top'), io.BytesIO()
        )
        self.assertIn(f'{path} is damaged: ', str(error))
        self.assertEqual(['t'], scrubs.read(self.here.uuid).damaged())
        scrubs.forget(self.here.uuid)
        for name in ('top', 't'):
            stream = io.BytesIO()
            transfer.send(self.here.existing_path(name), stream, accept_damage=True)
            stream.seek(0)
            transfer.receive(self.there, name, stream)
        self.assertEqual(['t.pcow', 'top.pcow'], sorted(self.there.entries()))
        # it is known there from the beginning, also of what was made one file without checksums
        known = scrubs.read(self.there.uuid)
        self.assertEqual(['t', 'top'], known.damaged())
        self.assertIn('not what its checksum was made of', known.images['t'].findings[0])
        self.assertIn('it was made of damaged data', known.images['top'].findings[0])
        for name in ('top', 't'):
            self.assertRaises(exception.ImageDamaged, self.there.create_image, 'new', base=name)

    def test_damage_on_the_way_of_what_was_sent_as_it_is(self) -> None:
        """What is accepted is the damage that was there when it was sent."""
        path = self.here.create_image('t', size=2 * MIB)
        self.io(path, 'write -P 1 0 64k')
        image.seal(path, checksums=True)
        stream = io.BytesIO()
        transfer.send(path, stream, accept_damage=True)
        self.assertIn(b'"damaged": false', stream.getvalue().partition(b'\n')[0])


class ExchangedTest(base.TestCase):
    """Root sends what a service exchanges meanwhile, or receives what a service looks at."""

    def setUp(self) -> None:
        super().setUp()
        self.configure(
            pcow_img=str(Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin')) / 'pcow-img')
        )
        self.pool = registry.PoolRegistry().create('here', str(self.directory / 'here'))
        self.path = self.pool.create_image('image', size=2 * MIB)
        self.secret = self.directory / 'secret'
        self.secret.write_text('precious')

    def exchanged(self, exchange: Callable[[str], None]) -> io.BytesIO:
        """What is sent if that comes when pcow-img has looked."""
        real, stream = image.info, io.BytesIO()

        def look(path: str, **options: Any) -> Any:
            found = real(path, **options)
            if path == self.path:
                os.unlink(path)
                exchange(path)
            return found

        with (
            mock.patch.object(image, 'info', look),
            mock.patch.object(transfer, 'template_below', lambda _path: None),
        ):
            self.assertRaises(exception.ImageInUse, transfer.send, self.path, stream)
        return stream

    def test_link(self) -> None:
        for owner in (0, 65534):
            self.pool.create_image(f'i{owner}', size=2 * MIB)
            self.path = self.pool.existing_path(f'i{owner}')

            def link(path: str, owner: int = owner) -> None:
                os.symlink(self.secret, path)
                os.chown(path, owner, owner, follow_symlinks=False)

            self.assertEqual(b'', self.exchanged(link).getvalue())

    def test_fifo(self) -> None:
        self.assertEqual(b'', self.exchanged(os.mkfifo).getvalue())

    def test_other_file(self) -> None:
        self.assertEqual(b'', self.exchanged(lambda path: os.link(self.secret, path)).getvalue())

    def test_other_image(self) -> None:
        other = self.pool.create_image('other', size=2 * MIB)
        self.assertEqual(b'', self.exchanged(lambda path: os.link(other, path)).getvalue())

    def test_nothing(self) -> None:
        self.assertEqual(b'', self.exchanged(lambda _path: None).getvalue())

    def test_link_of_root(self) -> None:
        """To the image, as the operator named it."""
        link = self.directory / 'link'
        link.symlink_to(self.path)
        (self.directory / 'link2').symlink_to('link')
        stream = io.BytesIO()
        transfer.send(str(self.directory / 'link2'), stream)
        self.assertTrue(stream.getvalue())

    def test_nobody_reads_what_was_not_checked(self) -> None:
        stream, modes = io.BytesIO(), []
        transfer.send(self.path, stream)
        stream.seek(0)
        real = image.check_data

        def check(path: str) -> model.CheckResult:
            modes.append(stat.S_IMODE(os.stat(path).st_mode))
            return real(path)

        for umask, mode in ((0o022, 0o640), (0o077, 0o600)):
            self.addCleanup(os.umask, os.umask(umask))
            stream.seek(0)
            with mock.patch.object(image, 'check_data', check):
                arrived = transfer.receive(self.pool, f'new{mode}', stream)
            self.assertEqual(mode, stat.S_IMODE(os.stat(arrived).st_mode))
        self.assertEqual([0o600, 0o600], modes)
