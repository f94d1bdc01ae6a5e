# SPDX-License-Identifier: Apache-2.0
"""What is in a guest's memory is read by its owner and by QEMU, by no other user of the host."""

import io
import os
from pathlib import Path
import stat
import subprocess
from typing import Any
from unittest import mock

from pcow_driver.common import access
from pcow_driver.common import exception
from pcow_driver.copies import fork
from pcow_driver.copies import transfer
from pcow_driver.pools import device
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import registry
from pcow_driver.templates import template
from tests.unit.pcow_driver import base


class AccessTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        self.configure(pcow_img=str(programs / 'pcow-img'), pcow_io=str(programs / 'pcow-io'))
        for directory in (self.directory, *self.directory.parents):
            if directory.stat().st_mode & 0o077 == 0:
                directory.chmod(0o755)
        mask = os.umask(0)  # nothing depends on it
        self.addCleanup(os.umask, mask)
        self.pool = registry.PoolRegistry().create('p', str(self.directory / 'p'))

    def made(self) -> list[str]:
        """Images, one by each way."""
        raw = self.directory / 'source.raw'
        raw.write_bytes(os.urandom(1 << 20))
        built = template.build(self.pool, 't', str(raw), 'raw')
        volume = device.create(self.pool, 'volume', 4 << 20)
        vm = self.pool.create_image('vm', base='t')
        fork.export(volume, str(self.directory / 'out.raw'), 'raw')
        fork.export(volume, str(self.directory / 'out.pcow'), 'pcow')
        stream = io.BytesIO()
        transfer.send(volume, stream)
        stream.seek(0)
        return [
            built,
            volume,
            vm,
            transfer.receive(self.pool, 'received', stream),
            str(self.directory / 'out.raw'),
            str(self.directory / 'out.pcow'),
        ]

    def test_modes(self) -> None:
        for path in self.made():
            self.assertEqual(oct(0o640), oct(stat.S_IMODE(os.stat(path).st_mode)), path)

    def test_another_user(self) -> None:
        volume = device.create(self.pool, 'volume', 4 << 20)

        def run(groups: str, *command: str) -> bytes:
            return subprocess.run(
                ['setpriv', '--reuid=nobody', '--regid=nogroup', groups, *command],
                check=False,
                capture_output=True,
            ).stderr

        self.assertIn(b'Permission denied', run('--clear-groups', 'cat', volume))
        self.assertIn(b'Permission denied', run('--clear-groups', 'stat', volume))
        self.assertIn(b'Permission denied', run(f'--groups={access.QEMU_GROUP}', 'cat', volume))
        os.chown(volume, 65534, -1)  # as libvirt does
        self.assertEqual(b'', run(f'--groups={access.QEMU_GROUP}', 'cat', volume))

    def test_source_of_another_user(self) -> None:
        """It, or another file under its name, changes after it was accepted (S9)."""
        secret, source = self.directory / 'secret', self.directory / 'source'
        for foreign in (True, False):
            secret.write_bytes(b'secret' * 1000)
            source.unlink(missing_ok=True)
            source.write_bytes(b'public' * 1000)
            os.chown(source, 65534 if foreign else 0, -1)
            inspect = template.inspect_source

            def change(
                path: str, source_format: str, *, inspect: Any = inspect, foreign: bool = foreign
            ) -> template.Source:
                found: template.Source = inspect(path, source_format)
                if foreign:
                    source.write_bytes(secret.read_bytes())
                else:
                    os.replace(secret, source)
                return found

            with mock.patch.object(template, 'inspect_source', change):
                path = template.build(self.pool, f't{foreign}', str(source), 'raw')
            fork.export(path, str(self.directory / f'out{foreign}'), 'raw')
            content = (self.directory / f'out{foreign}').read_bytes()
            self.assertEqual(
                (True, False), (b'publicpublic' in content, b'secretsecret' in content)
            )
        fifo = self.directory / 'fifo'
        os.mkfifo(fifo)
        self.assertRaises(
            exception.SourceRejected, template.build, self.pool, 'f', str(fifo), 'raw'
        )

    def test_source_that_takes_all_of_the_memory(self) -> None:
        """The counts of its clusters would need 3.5 GiB (CVE-2015-5162)."""
        source = self.directory / 'x.qcow2'
        subprocess.run(
            ['qemu-img', 'create', '-q', '-f', 'qcow2', '-o', 'cluster_size=512', source, '1M'],
            check=True,
        )
        os.truncate(source, 900 << 30)
        error = self.assertRaises(
            exception.SourceRejected, template.build, self.pool, 't', str(source), 'qcow2'
        )
        self.assertIn('has met its limit of 1 GiB of memory', str(error))
        self.assertEqual([], self.pool.entries())

    def test_source_behind_a_link(self) -> None:
        """Root follows those of root alone, in the place of the file and on the way to it."""
        theirs, private = self.directory / 'theirs', self.directory / 'private'
        theirs.mkdir()
        os.chown(theirs, 65534, -1)
        private.mkdir(mode=0o700)
        (private / 'secret').write_bytes(b'secret' * 1000)
        for number, (name, target, source) in enumerate(
            (
                ('x.raw', private / 'secret', 'x.raw'),
                ('way', private, 'way/secret'),
                ('again', theirs / 'x.raw', 'again'),
                ('back', Path('../private'), 'back/./secret'),
            )
        ):
            link = theirs / name
            link.symlink_to(target)
            os.chown(link, 65534, -1, follow_symlinks=False)
            error = self.assertRaises(
                exception.SourceRejected,
                template.build,
                self.pool,
                f'no{number}',
                str(theirs / source),
                'raw',
            )
            self.assertIn('a symbolic link of another user', str(error))
            os.chown(link, 0, -1, follow_symlinks=False)
            template.build(self.pool, f't{number}', str(theirs / source), 'raw')
        loop = self.directory / 'loop'
        loop.symlink_to('loop')
        for path in (loop, self.directory, private / 'none', Path('/')):
            self.assertRaises(
                exception.SourceRejected, template.build, self.pool, 'no', str(path), 'raw'
            )

    def test_no_such_group(self) -> None:
        with mock.patch.object(access, 'QEMU_GROUP', 'no-such-group'):
            pool_module.make('q', str(self.directory / 'q'))
        self.assertEqual(0o711, stat.S_IMODE((self.directory / 'q').stat().st_mode))
