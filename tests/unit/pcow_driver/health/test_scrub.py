# SPDX-License-Identifier: Apache-2.0
"""Scrubs of a pool: real images, whose data are damaged."""

import json
import os
from pathlib import Path
import subprocess
import sys
from unittest import mock

from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.copies import fork
from pcow_driver.health import scrub
from pcow_driver.images import image
from pcow_driver.pools import capacity
from pcow_driver.pools import device
from pcow_driver.pools import registry
from pcow_driver.pools import scrubs
from pcow_driver.templates import template
from tests.unit.pcow_driver import base

MIB = units.MIB
# where the first data of an image lies: behind the three slabs at the begin of its group
DATA = 6 * MIB
# and where the page bitmaps do
BITMAPS = 1 * MIB


class ScrubTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        self.configure(
            pcow_img=str(self.programs / 'pcow-img'), pcow_io=str(self.programs / 'pcow-io')
        )
        directory = self.directory / 'p'
        directory.mkdir()
        registry.PoolRegistry().create('p', str(directory))
        self.pool = registry.PoolRegistry().get('p')
        for name in ('a', 'b', 'plain'):
            self._image(name)
        for name in ('a', 'b'):
            image.seal(self.pool.existing_path(name), checksums=True)
        self.told: list[str] = []

    def _image(self, name: str) -> None:
        self.pool.create_image(name, size=8 * MIB)
        self._write(name, '0')

    def _write(self, name: str, offset: str) -> None:
        subprocess.run(
            [
                self.programs / 'pcow-io',
                '-c',
                f'write -P 7 {offset} 64k',
                self.pool.existing_path(name),
            ],
            check=True,
            capture_output=True,
        )

    def _damage(self, name: str, offset: int = DATA) -> None:
        with open(self.pool.existing_path(name), 'r+b') as f:
            f.seek(offset)
            byte = f.read(1)
            f.seek(offset)
            f.write(bytes([byte[0] ^ 1]))

    def _scrub(self, **kw: bool) -> scrubs.Scrub:
        self.told.clear()
        return scrub.scrub(self.pool, tell=lambda name, _result: self.told.append(name), **kw)

    def test_whole(self) -> None:
        self.assertEqual('never', scrubs.read(self.pool.uuid).told())
        found = self._scrub()
        self.assertEqual(found, scrubs.read(self.pool.uuid))
        self.assertEqual(['a', 'b', 'plain'], self.told)
        self.assertEqual([], found.damaged())
        self.assertFalse(found.is_interrupted)
        self.assertEqual(64 << 10, found.images['a'].verified)
        self.assertEqual(
            (0, 64 << 10), (found.images['plain'].verified, found.images['plain'].without)
        )
        usage = capacity.usage(self.pool)
        self.assertEqual((found.ended_seconds, ()), (usage.scrubbed, usage.damaged))
        self.assertGreater(usage.scrubbed, 1_600_000_000)

    def test_metadata(self) -> None:
        """Of an image that nobody has open. In class page-cache a writer takes all checksums."""
        self._damage('plain', BITMAPS)
        found = self._scrub()
        self.assertEqual(['plain'], found.damaged())
        self.assertIn('the page of bitmaps at byte', found.images['plain'].findings[0])
        self._damage('plain', BITMAPS)
        self.assertEqual([], self._scrub().damaged())

    def test_what_a_check_would_find(self) -> None:
        """Without the lock, as a server may start meanwhile: copies in the mirror, and bitmaps of
        an image without one.
        """
        self._damage('plain', 2 * MIB + BITMAPS)
        path = self.pool.image_path('old')
        subprocess.run(
            [self.programs / 'pcow-img', 'create', '-q', '-o', 'mirror=off', path, '8M'], check=True
        )
        self._write('old', '0')
        image.snapshot_create(path, 's')
        with open(path, 'r+b') as f:
            f.seek(BITMAPS)
            f.write(bytes(4096))
        self.assertEqual(['old', 'plain'], self._scrub().damaged())

    def test_damage_is_refused(self) -> None:
        self._damage('a', DATA + 5000)
        # nobody has looked yet
        self.pool.create_image('early', base='a')
        with self.assertLogs('pcow_driver.health.scrub', 'ERROR') as log:
            self.assertEqual(['a'], self._scrub().damaged())
        self.assertIn('guest byte 0 of the active layer', log.output[0])
        error = self.assertRaises(exception.ImageDamaged, self.pool.create_image, 'c', base='a')
        self.assertIn('pcowctl pool scrub p --accept a', str(error))
        self.assertFalse((self.directory / 'p/c.pcow').exists())
        self.pool.create_image('d', base='b')
        usage = capacity.usage(self.pool)
        self.assertEqual(('a',), usage.damaged)
        self.assertIn('pcow_pool_damaged_images{pool="p"} 1\n', capacity.prometheus([usage]))
        # the very bytes that were there
        self._damage('a', DATA + 5000)
        self.assertEqual([], self._scrub().damaged())
        self.pool.create_image('c', base='a')

    def test_forks_and_devices_are_refused(self) -> None:
        path = self.pool.existing_path('plain')
        image.snapshot_create(path, 's')
        subprocess.run([self.programs / 'pcow-img', 'checksum', '-q', path], check=True)
        device.create(self.pool, 'device', 4 * MIB)
        self._write('device', '3M')
        image.seal(self.pool.existing_path('device'), checksums=True)
        self._damage('plain')
        self._damage('device', DATA + 3 * MIB)
        self.assertEqual(['device', 'plain'], self._scrub().damaged())
        self.assertRaises(exception.ImageDamaged, fork.fork, path, 's', 'f')
        self.assertRaises(exception.ImageDamaged, device.create_on, self.pool, 'o', 'device')

    def _chain(self) -> None:
        """web2 on a snapshot of web1, which stands on the template a."""
        self.pool.create_image('web1', base='a')
        image.snapshot_create(self.pool.existing_path('web1'), 's1')
        fork.fork(self.pool.existing_path('web1'), 's1', 'web2')
        image.snapshot_create(self.pool.existing_path('web2'), 's2')

    def test_chain_is_refused(self) -> None:
        """Damage far below is damage, too."""
        self._chain()
        self._damage('a')
        self.assertEqual(['a'], self._scrub().damaged())
        path = self.pool.existing_path('web1')
        for refused in (
            lambda: self.pool.create_image('web3', base='web1'),
            lambda: self.pool.create_image('web3', base='web2'),
            lambda: fork.fork(path, 's1', 'web3'),
            lambda: fork.check_sound(self.pool.existing_path('web2')),
        ):
            error = self.assertRaises(exception.ImageDamaged, refused)
            self.assertIn('/a.pcow, on which web', str(error))
            self.assertIn('pcowctl pool scrub p --accept a', str(error))
        self.assertFalse((self.directory / 'p/web3.pcow').exists())
        self.pool.create_image('other', base='b')
        scrub.accept(self.pool, 'a')
        self.pool.create_image('web3', base='web1')
        fork.fork(path, 's1', 'web4')

    def test_chain_by_a_link(self) -> None:
        """The list has no symbolic links."""
        self._chain()
        web = self.directory / 'p/web.pcow'
        web.symlink_to('web1.pcow')
        self._damage('a')
        self._scrub()
        self.assertRaises(exception.ImageDamaged, fork.fork, str(web), 's1', 'c')

    def test_fork_of_a_running_guest(self) -> None:
        """Before a snapshot is taken for it."""
        self._chain()
        self._damage('a')
        self._scrub()
        found = mock.Mock()
        found.select.return_value.path = self.pool.existing_path('web1')
        self.assertRaises(exception.ImageDamaged, fork.fork_live, found, 'web3')
        found.snapshot_create.assert_not_called()

    def test_export_is_refused(self) -> None:
        target = str(self.directory / 'out')
        self._damage('a')
        path = self.pool.existing_path('a')
        error = self.assertRaises(exception.ToolFailed, fork.export, path, target, 'raw')
        self.assertIn('--accept-damage', str(error))
        fork.export(path, target, 'raw', accept_damage=True)

    def test_template(self) -> None:
        """All of what a build makes can be judged."""
        source = self.directory / 'source.raw'
        source.write_bytes(os.urandom(MIB))
        template.build(self.pool, 'debian', str(source), 'raw')
        found = self._scrub().images['debian']
        self.assertGreater(found.verified, MIB)
        self.assertEqual((0, ()), (found.without, found.findings))
        self._damage('debian', DATA + 2 * MIB + 5000)
        self.assertRaises(exception.ImageDamaged, self._scrub_and_create, 'server', base='debian')

    def _scrub_and_create(self, name: str, base: str) -> None:
        self._scrub()
        device.create_on(self.pool, name, base)

    def test_accepted(self) -> None:
        self._damage('a')
        self.assertRaises(exception.UsageInvalid, scrub.accept, self.pool, 'a')
        self._scrub()
        scrub.accept(self.pool, 'a')
        self.pool.create_image('c', base='a')
        self.assertEqual([], self._scrub().damaged())
        self.pool.create_image('d', base='a')
        # in another way
        with open(self.pool.existing_path('a'), 'r+b') as f:
            f.seek(DATA - 2 * MIB + 3 * 64)
            f.write(b'x')
        self.assertEqual(['a'], self._scrub().damaged())

    def test_another_file(self) -> None:
        """What is put in the place of a damaged one is not that one."""
        self._damage('a')
        self._scrub()
        path = self.pool.existing_path('a')
        image.convert(self.pool.existing_path('b'), 'pcow', f'{path}.new')
        os.replace(f'{path}.new', path)
        self.pool.create_image('c', base='a')

    def test_resumed(self) -> None:
        real = image.check_data

        def interrupted(path: str, **kw: object) -> object:
            if path.endswith('b.pcow'):
                raise KeyboardInterrupt
            return real(path, **kw)  # type: ignore[arg-type]

        with mock.patch.object(image, 'check_data', interrupted):
            self.assertRaises(KeyboardInterrupt, self._scrub)
        self.assertTrue(scrubs.read(self.pool.uuid).is_interrupted)
        self.assertIn('never; begun again', scrubs.read(self.pool.uuid).told())
        self._scrub(resume=True)
        self.assertEqual(['b', 'plain'], self.told)
        # it came to its end
        self._scrub(resume=True)
        self.assertEqual(['a', 'b', 'plain'], self.told)
        self.pool.delete_image('plain')
        self.assertEqual({'a', 'b'}, {*self._scrub().images})

    def test_beside_a_writer(self) -> None:
        path = self.pool.existing_path('plain')
        image.snapshot_create(path, 's')
        subprocess.run([self.programs / 'pcow-img', 'checksum', '-q', path], check=True)
        with base.opened(path, self.programs / 'pcow-io'):
            self.assertEqual(64 << 10, self._scrub().images['plain'].verified)

    def test_state_that_cannot_be_read(self) -> None:
        self._scrub()
        for text in ('', '[]', '{"begun": ""}', '{"begun": 1, "ended": 2, "images": [3]}', '\0'):
            (self.directory / 'state/scrubs' / f'{self.pool.uuid}.json').write_text(text)
            self.assertEqual(scrubs.Scrub(), scrubs.read(self.pool.uuid))
            self.pool.create_image(f'x{len(text)}', base='a')

    def test_command(self) -> None:
        config = self.directory / 'pcow.conf'
        config.write_text(
            f'[pcow]\nstate_path = {self.directory}/state\npcow_img = {self.programs}/pcow-img\n'
        )

        def run(*args: str) -> tuple[int, str]:
            done = subprocess.run(
                [sys.executable, '-m', 'pcow_driver.cli.app', '--config-file', str(config), *args],
                cwd=base.TOP,
                capture_output=True,
                text=True,
                check=False,
            )
            return done.returncode, done.stdout + done.stderr

        # as the timer does
        unit = (base.TOP / 'etc/systemd/system/pcow-scrub@.service').read_text()
        line = next(line for line in unit.splitlines() if line.startswith('ExecStart='))
        code, text = run(*line.replace('%i', 'p').split()[1:])
        self.assertEqual(0, code, text)
        self.assertIn('OK a: 64 KiB verified, 0 B without a checksum\n', text)
        self._damage('a')
        code, text = run('pool', 'scrub', 'p')
        self.assertEqual(2, code, text)
        self.assertIn('DAMAGED a: 0 B verified', text)
        self.assertIn('DAMAGED p: a\n', text)
        code, text = run('pool', 'show', 'p', '-f', 'json')
        self.assertEqual('a', json.loads(text)['damaged'])
        self.assertIn('UTC', json.loads(text)['last scrub'])
        code, text = run('pool', 'check', 'p')
        self.assertEqual(2, code, text)
        self.assertIn('a scrub has found these damaged: a', text)
        self.assertEqual(0, run('pool', 'scrub', 'p', '--accept', 'a')[0])
        self.assertEqual(0, run('pool', 'scrub', 'p')[0])
        self.assertEqual(1, run('pool', 'scrub', 'none')[0])
