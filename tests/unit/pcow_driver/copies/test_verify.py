# SPDX-License-Identifier: Apache-2.0
"""Damage that must not pass into a copy; images are real."""

import dataclasses
import os
from pathlib import Path
import subprocess
import threading
import time
from unittest import mock

from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.copies import clone
from pcow_driver.copies import fork
from pcow_driver.copies import verify
from pcow_driver.health import scrub
from pcow_driver.images import image
from pcow_driver.pools import device
from pcow_driver.pools import registry
from pcow_driver.pools import scrubs
from pcow_driver.virt import notices
from tests.unit.pcow_driver import base

MIB = units.MIB
# where the first data of an image lies: behind the three slabs at the begin of its group
DATA = 6 * MIB


class VerifyTest(base.TestCase):
    """The image ``top`` on the template ``below``."""

    def setUp(self) -> None:
        super().setUp()
        self.programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        self.configure(pcow_img=str(self.programs / 'pcow-img'))
        self.pool = registry.PoolRegistry().create('p', str(self.directory / 'p'))
        path = self.pool.create_image('below', size=8 * MIB)
        self.io(path, 'write -P 7 0 1M')
        image.seal(path, checksums=True)
        self.top = self.pool.create_image('top', base='below')
        self.io(self.top, 'write -P 8 2M 64k')

    def io(self, path: str, command: str) -> None:
        subprocess.run(
            [self.programs / 'pcow-io', '-c', command, path], check=True, capture_output=True
        )

    def flip(self, name: str, offset: int = DATA + 5000) -> None:
        with open(self.pool.existing_path(name), 'r+b') as f:
            f.seek(offset)
            byte = f.read(1)
            f.seek(offset)
            f.write(bytes([byte[0] ^ 1]))

    def test_whole(self) -> None:
        verify.check_chain(self.top)
        self.assertIsNone(verify.damaged_in_chain(self.top))
        self.assertEqual(scrubs.Scrub(), scrubs.read(self.pool.uuid))

    def test_damage_below(self) -> None:
        """It is found before a scrub has looked, and known from then on."""
        self.flip('below')
        with mock.patch.object(notices, 'tell') as tell:
            error = self.assertRaises(exception.DataDamaged, verify.check_chain, self.top)
        tell.assert_called_once_with(self.pool)
        self.assertIn('p/below.pcow is damaged (the 2 MiB from guest byte 0', str(error))
        self.assertIn('pcowctl pool scrub p --accept below', str(error))
        self.assertEqual(['below'], scrubs.read(self.pool.uuid).damaged())
        self.assertRaises(exception.ImageDamaged, self.pool.create_image, 'c', base='top')
        scrub.accept(self.pool, 'below')
        with self.assertLogs('pcow_driver.copies.verify', 'WARNING') as log:
            verify.check_chain(self.top)
        self.assertIn('as that is accepted', log.output[0])
        # in another way
        self.flip('below', DATA - 2 * MIB + 3 * 64)
        self.assertRaises(exception.DataDamaged, verify.check_chain, self.top)

    def test_what_a_command_has_found(self) -> None:
        """Nothing is raised; it is known from then on, and what is accepted stays so."""
        verify.note_damage(self.top)
        below = self.pool.existing_path('below')
        verify.note_damage(below)
        self.assertEqual(scrubs.Scrub(), scrubs.read(self.pool.uuid))
        self.flip('below')
        verify.note_damage(self.top)
        self.assertEqual([], scrubs.read(self.pool.uuid).damaged())
        with mock.patch.object(notices, 'tell') as tell:
            verify.note_damage(below)
        tell.assert_called_once_with(self.pool)
        self.assertEqual(['below'], scrubs.read(self.pool.uuid).damaged())
        scrub.accept(self.pool, 'below')
        with mock.patch.object(notices, 'tell') as tell:
            verify.note_damage(below)
        tell.assert_not_called()

    def test_what_an_option_accepts(self) -> None:
        """A command looks at nothing that was accepted for other uses."""
        self.flip('below')
        error = self.assertRaises(exception.DataDamaged, verify.check_chain_for_command, self.top)
        self.assertIn('or give --accept-damage', str(error))
        self.assertEqual(['below'], scrubs.read(self.pool.uuid).damaged())

    def export(self) -> None:
        fork.export(self.top, str(self.directory / 'out'), 'raw')

    def test_export(self) -> None:
        """pcow-img refuses; where the damage lies is known from then on, and accepted damage stays
        accepted.
        """
        self.flip('below')
        with mock.patch.object(notices, 'tell') as tell:
            error = self.assertRaises(exception.ToolFailed, self.export)
        tell.assert_called_once_with(self.pool)
        self.assertIn('below.pcow is damaged', str(error))
        self.assertEqual(['below'], scrubs.read(self.pool.uuid).damaged())
        self.assertRaises(exception.ImageDamaged, self.pool.create_image, 'c', base='top')
        scrub.accept(self.pool, 'below')
        self.assertRaises(exception.ToolFailed, self.export)
        self.assertEqual([], scrubs.read(self.pool.uuid).damaged())

    def test_export_that_fails_otherwise(self) -> None:
        """Nothing is read once more for that."""
        self.flip('below')
        with (
            mock.patch.object(scrubs, 'compare') as compare,
            base.opened(self.top, self.programs / 'pcow-io'),
        ):
            self.assertRaises(exception.ToolFailed, self.export)
        compare.assert_not_called()

    def test_export_by_a_link(self) -> None:
        """The list has no symbolic links."""
        (self.directory / 'link.pcow').symlink_to(self.pool.existing_path('below'))
        self.flip('below')
        with self.assertRaises(exception.ToolFailed):
            fork.export(str(self.directory / 'link.pcow'), str(self.directory / 'out'), 'raw')
        self.assertEqual(['below'], scrubs.read(self.pool.uuid).damaged())

    def test_nothing_hides_the_damage(self) -> None:
        """It cannot be kept, nor told, nor looked at once more."""
        self.flip('below')
        for failing, error in (
            ((notices, 'keep'), exception.PcowError(reason='no')),
            ((notices, 'keep'), OSError('no')),
            ((scrubs, 'compare'), exception.PcowError(reason='no')),
        ):
            with (
                mock.patch.object(*failing, side_effect=error),
                self.assertLogs('pcow_driver.copies.verify', 'WARNING'),
            ):
                refused = self.assertRaises(exception.ToolFailed, self.export)
            self.assertIn('below.pcow is damaged', str(refused))

    def test_copy(self) -> None:
        """As a volume goes to another pool of its host."""
        device.create(self.pool, 'device', 4 * MIB)
        path = self.pool.existing_path('device')
        self.io(path, 'write -P 9 3M 64k')
        image.seal(path, checksums=True)
        self.flip('device', DATA + 3 * MIB)
        self.assertRaises(exception.ToolFailed, clone.copy, path, self.pool, 'copy', 4 * MIB)
        self.assertEqual(['device'], scrubs.read(self.pool.uuid).damaged())

    def test_snapshot_beside_a_writer(self) -> None:
        image.snapshot_create(self.top, 's')
        subprocess.run([self.programs / 'pcow-img', 'checksum', '-q', self.top], check=True)
        with base.opened(self.top, self.programs / 'pcow-io'):
            verify.check_chain(self.top)
            self.flip('top')
            error = self.assertRaises(exception.DataDamaged, verify.check_chain, self.top)
            self.assertIn("of snapshot 's'", str(error))

    def test_bitmaps_of_an_image_without_a_mirror(self) -> None:
        """What they told of would be read as what lies below, or as zeros."""
        path = self.pool.image_path('old')
        create = [str(self.programs / 'pcow-img'), *'create -q -o mirror=off'.split(), path, '8M']
        subprocess.run(create, check=True)
        self.io(path, 'write -P 7 0 64k')
        image.snapshot_create(path, 's')
        with open(path, 'r+b') as f:
            f.seek(MIB)
            f.write(bytes(4096))
        self.assertRaises(exception.DataDamaged, verify.check_chain, path)

    def test_outside_of_a_pool(self) -> None:
        elsewhere = self.directory / 'x'
        elsewhere.mkdir()
        os.link(self.pool.existing_path('below'), elsewhere / 'below.pcow')
        self.flip('below')
        error = self.assertRaises(
            exception.DataDamaged, verify.check_chain, str(elsewhere / 'below.pcow')
        )
        self.assertIn('or copy it by hand (pcow-img convert)', str(error))

    def forget(self) -> None:
        """As another process, or the next command."""
        verify._LOOKED_AT.clear()

    def compared_at(self, *hours: int, problem: str = '') -> list[int]:
        """When it is compared by a service that may note nothing, which makes something on it at
        each of these.
        """
        self.forget()
        compared: list[int] = []
        passed = [0]

        def compare(path: str, *, sealed: bool, rate: int = 0) -> scrubs.Result:
            compared.append(*passed)
            return scrubs.Result(1, '2026-01-01T00:00:00+00:00', problem=problem)

        refused = exception.PcowError(reason="it is root's")
        with (
            mock.patch.object(scrubs, 'compare', compare),
            mock.patch.object(scrubs, 'put', side_effect=refused),
            mock.patch('pcow_driver.copies.verify.time.monotonic', lambda: passed[0] * 3600.0),
        ):
            for passed[0] in hours:
                verify.compare_if_due(self.pool, 'top')
        return compared

    def test_each_day_once(self) -> None:
        """However often, and not at all as long as it cannot be read."""
        self.assertEqual([0, 24], self.compared_at(0, 1, 13, 23, 24, 36, 47))
        self.assertEqual([0, 1, 2], self.compared_at(0, 1, 2, problem='Input/output error'))

    def test_several_at_once(self) -> None:
        """One compares, the others wait for what it finds."""
        compared: list[str] = []

        def compare(path: str, *, sealed: bool, rate: int = 0) -> scrubs.Result:
            compared.append(path)
            time.sleep(0.2)
            return scrubs.Result(os.stat(path).st_ino, '2026-01-01T00:00:00+00:00')

        ends: list[float] = []

        def make() -> None:
            verify.compare_if_due(self.pool, 'top')
            ends.append(time.monotonic())

        self.forget()
        begun = time.monotonic()
        with mock.patch.object(scrubs, 'compare', compare):
            threads = [threading.Thread(target=make) for _ in range(4)]
            for one in threads:
                one.start()
            for one in threads:
                one.join()
        self.assertEqual(1, len(compared))
        self.assertGreater(min(ends), begun + 0.2)

    def test_template_that_nobody_has_looked_at(self) -> None:
        """By whoever makes something on it, once a day."""
        image.snapshot_create(self.top, 's')
        compared: list[str] = []
        real = scrubs.compare

        def compare(path: str, *, sealed: bool, rate: int = 0) -> scrubs.Result:
            compared.append(os.path.basename(path))
            return real(path, sealed=sealed, rate=rate)

        with mock.patch.object(scrubs, 'compare', compare):
            for name in ('one', 'two'):
                fork.fork(self.top, 's', name)
            self.assertEqual(['below.pcow'], compared)
            self.forget()
            fork.fork(self.top, 's', 'three')
            self.assertEqual(['below.pcow'], compared)
            self.flip('below')
            self.forget()
            fork.fork(self.top, 's', 'four')  # it was compared just now
            old = dataclasses.replace(
                scrubs.read(self.pool.uuid).images['below'], checked='2026-01-01T00:00:00+00:00'
            )
            scrubs.put(self.pool.uuid, 'below', old)
            self.configure(compare_templates_after=0)
            fork.fork(self.top, 's', 'five')
            self.configure(compare_templates_after=86400)
            self.forget()
            self.assertRaises(exception.ImageDamaged, fork.fork, self.top, 's', 'six')
        self.assertEqual(['below.pcow'] * 2, compared)
        self.assertFalse((self.directory / 'p/six.pcow').exists())
        # whole again, in the very file: known by the next comparison, or scrub
        self.flip('below')
        scrubs.put(self.pool.uuid, 'below', old)
        self.forget()
        fork.fork(self.top, 's', 'six')

    def test_clone_of_a_device(self) -> None:
        device.create(self.pool, 'device', 4 * MIB)
        path = self.pool.existing_path('device')
        self.io(path, 'write -P 9 3M 64k')
        image.seal(path, checksums=True)
        self.flip('device', DATA + 3 * MIB)
        self.assertRaises(
            exception.ImageDamaged,
            clone.on_base,
            self.pool,
            'device',
            self.pool,
            'c',
            4 * MIB,
            max_chain=8,
        )
        self.assertEqual(['device'], scrubs.read(self.pool.uuid).damaged())

    def test_what_cannot_be_kept(self) -> None:
        """The finding is root's to write; it is refused, and told, all the same."""
        self.flip('below')
        refuse = exception.StateInvalid(path='/state', reason='Permission denied')
        with (
            mock.patch.object(scrubs, 'put', side_effect=refuse),
            mock.patch.object(notices, 'tell') as tell,
            self.assertLogs('pcow_driver.virt.notices', 'WARNING'),
        ):
            self.assertRaises(exception.DataDamaged, verify.check_chain, self.top)
        ((pool, found),) = (call.args for call in tell.call_args_list)
        self.assertEqual((self.pool, ['below']), (pool, [*found]))

    def test_copy_without_the_page_map(self) -> None:
        """That goes by NBD."""
        device.create(self.pool, 'device', 4 * MIB)
        path = self.pool.existing_path('device')
        self.io(path, 'write -P 9 3M 64k')
        image.seal(path, checksums=True)
        self.flip('device', DATA + 3 * MIB)
        window = device.Window(4 * MIB, 4 * MIB)
        with mock.patch.object(device, 'window', return_value=window):
            self.assertRaises(exception.DataDamaged, clone.copy, path, self.pool, 'copy', 4 * MIB)
        self.assertEqual(['below', 'device', 'top'], sorted(i.name for i in self.pool.listed()))
