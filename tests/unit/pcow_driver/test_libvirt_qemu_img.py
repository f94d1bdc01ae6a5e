# SPDX-License-Identifier: Apache-2.0
"""What libvirtd runs in place of qemu-img; with pcow images:
tests/functional/test_virsh_snapshots.py.
"""

import os
import subprocess

import fixtures

from tests.unit.pcow_driver import base

PROGRAM = base.TOP / 'etc/libvirt/bin/qemu-img'
XML = """<domain type='kvm'><name>web1</name><devices>
 <disk type='file' device='disk'><source file='{disk}'/></disk>
 <disk type='file' device='disk'><source file='/pool/read-only.qcow2'/><readonly/></disk>
 <disk type='file' device='cdrom'/>
 <memory model='nvdimm' access='shared'><source><path>{image}</path></source><target/></memory>
 <memory model='virtio-pmem' access='shared'><source><path>{data}</path></source><target/></memory>
 <memory model='nvdimm' access='shared'><source><path>/dev/dax0.0</path></source><target/></memory>
</devices></domain>"""


program = base.load_script(PROGRAM)


class QemuImgTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.disk, self.other = self.directory / 'disk.qcow2', self.directory / 'other.qcow2'
        self.image, self.data = self.directory / 'vm.pcow', self.directory / 'data.pcow'
        domains = self.directory / 'domains'
        domains.mkdir()
        (domains / 'web1.xml').write_text(
            XML.format(disk=self.disk, image=self.image, data=self.data)
        )
        self.useFixture(fixtures.MockPatchObject(program, 'DOMAINS', str(domains)))
        self.pools = [self.directory / 'active', self.directory / 'defined']
        for directory in self.pools:
            directory.mkdir()
        self.useFixture(
            fixtures.MockPatchObject(program, 'STORAGE_POOLS', tuple(map(str, self.pools)))
        )

    def define(self, name: str, disk: str, *, image: str = '') -> None:
        memory = (
            f"<memory model='nvdimm'><source><path>{image}</path></source></memory>"
            if image
            else ''
        )
        (self.directory / 'domains' / f'{name}.xml').write_text(
            f"<domain><name>{name}</name><devices><disk type='volume' "
            f"device='disk'>{disk}</disk>{memory}</devices></domain>"
        )

    def test_disks_and_images(self) -> None:
        (parts,) = program.domains()
        images = [str(self.image), str(self.data)]
        self.assertEqual(('web1', [str(self.disk)], images, [], False, ''), tuple(parts))

    def test_a_domain_that_cannot_be_read(self) -> None:
        """No guess for a disk that may be its; all else goes on."""
        volume = f"<source file='{self.other}'/>"
        for damage in (
            b'',
            b'<domain>',
            b'<?xml version="1.0" encoding="nosuch"?><domain/>',
            bytes(64),
        ):
            (self.directory / 'domains' / 'bad.xml').write_bytes(damage)
            (self.directory / 'domains' / 'db.xml').unlink(missing_ok=True)
            for words in (
                ['create', '-f', 'qcow2', 'new', '1G'],
                ['create', '-f', 'qcow2', '-b', str(self.other), 'new'],
                ['info', str(self.disk)],
            ):
                self.assertFalse(program.serve(words))
            self.assertRaisesRegex(
                program.Refused,
                'would leave out',
                program.serve,
                ['create', '-f', 'qcow2', '-b', str(self.disk), 'new'],
            )
            for option in program.OPERATIONS:
                self.assertRaisesRegex(
                    program.Refused,
                    'bad.xml cannot be read.*virsh define',
                    program.serve,
                    ['snapshot', option, 's', str(self.other)],
                )
            self.define('db', volume)
            for option in program.OPERATIONS:
                self.assertFalse(program.serve(['snapshot', option, 's', str(self.other)]))
            self.assertEqual('web1', program.whose(str(self.disk), None).name)

    def test_a_snapshot_that_cannot_be_read(self) -> None:
        """Of one domain: it keeps no other from its own."""
        snapshots = self.directory / 'snapshots'
        self.useFixture(fixtures.MockPatchObject(program, 'SNAPSHOTS', str(snapshots)))
        (snapshots / 'web1').mkdir(parents=True)
        (snapshots / 'web1' / 's.xml').touch()
        self.define('db', f"<source file='{self.other}'/>")
        self.assertFalse(program.serve(['snapshot', '-a', 's', str(self.other)]))
        self.assertRaisesRegex(
            program.Refused, 's.xml cannot be read', program.whose, str(self.disk), 's'
        )
        self.assertEqual('web1', program.whose(str(self.disk), 'another').name)

    def test_volumes_of_storage_pools(self) -> None:
        """As libvirt has them: an active pool inside <poolstate>, which counts before what is
        defined for its next start.
        """
        volumes = self.directory / 'volumes'
        volumes.mkdir()
        (volumes / 'v.qcow2').touch()
        pool = "<pool type='dir'><name>fast</name><target><path>{}</path></target></pool>"
        self.define('web2', "<source pool='fast' volume='v.qcow2'/>", image='/pool/web2.pcow')

        def web2() -> tuple[list[str], list[str]]:
            return next(
                (parts.disks, parts.unknown) for parts in program.domains() if parts.name == 'web2'
            )

        self.assertEqual(([], ['volume v.qcow2 of the storage pool fast']), web2())
        (self.pools[1] / 'fast.xml').write_text(pool.format(volumes))
        self.assertEqual(([str(volumes / 'v.qcow2')], []), web2())
        (self.pools[0] / 'fast.xml').write_text(
            f'<poolstate>{pool.format(self.directory)}</poolstate>'
        )
        self.assertEqual(([], ['volume v.qcow2 of the storage pool fast']), web2())
        (self.directory / 'v.qcow2').touch()
        self.assertEqual(([str(self.directory / 'v.qcow2')], []), web2())
        for broken in ('<poolstate>', '<poolstate><pool/></poolstate>'):
            (self.pools[0] / 'fast.xml').write_text(broken)
            self.assertEqual(([], ['volume v.qcow2 of the storage pool fast']), web2())

    def test_a_volume_that_cannot_be_found(self) -> None:
        """It could be any disk but those of other domains."""
        self.define('web2', "<source pool='san' volume='unit:0:0:1'/>", image='/pool/web2.pcow')
        for option in program.OPERATIONS:
            words = ['snapshot', option, 's', str(self.other)]
            refused = str(self.assertRaises(program.Refused, program.serve, words))
            for text in (
                str(self.other),
                'volume unit:0:0:1 of the storage pool san',
                'web2',
                '/pool/web2.pcow',
                'by its path',
            ):
                self.assertIn(text, refused)
        (self.directory / 'domains' / 'db.xml').write_text(
            f"<domain><name>db</name><devices><disk device='disk'><source "
            f"file='{self.other}'/></disk></devices></domain>"
        )
        for option in program.OPERATIONS:
            self.assertFalse(program.serve(['snapshot', option, 's', str(self.other)]))
        self.define('web2', "<source pool='san' volume='unit:0:0:1'/>")
        self.assertFalse(program.serve(['snapshot', '-c', 's', '/not/known']))

    def test_disks_alone(self) -> None:
        for words in (
            ['-b', str(self.disk)],
            ['-o', f'backing_fmt=qcow2,backing_file={self.disk}'],
        ):
            refused = self.assertRaises(
                program.Refused, program.serve, ['create', '-f', 'qcow2', *words, 'new']
            )
            self.assertIn(f'would leave out {self.image}, {self.data}', str(refused))
        self.assertFalse(program.serve(['create', '-f', 'qcow2', '-b', str(self.other), 'new']))
        self.assertFalse(program.serve(['create', '-f', 'qcow2', str(self.disk), '1M']))

    def test_backing_file_with_a_comma(self) -> None:
        self.assertEqual('a,b', program.backing_file(['-o', 'backing_file=a,,b,backing_fmt=qcow2']))

    def test_all_else_is_for_the_real_one(self) -> None:
        for words in (
            ['info', str(self.disk)],
            ['snapshot', '-l', str(self.disk)],
            ['snapshot', '-c', 's', str(self.other)],
        ):
            self.assertFalse(program.serve(words))
        self.assertNotEqual(str(PROGRAM), os.path.realpath(program.real_qemu_img()))

    def qemu_img(self, *words: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join((str(PROGRAM.parent), os.environ['PATH']))
        return subprocess.run(
            ('qemu-img', *words),
            check=False,
            env=dict(os.environ, PATH=path),
            timeout=60,
            capture_output=True,
            text=True,
        )

    def test_runs_the_real_one(self) -> None:
        for words in (
            ('create', '-q', '-f', 'qcow2', str(self.other), '1M'),
            ('snapshot', '-c', 's', str(self.other)),
        ):
            self.assertEqual(0, self.qemu_img(*words).returncode)
        self.assertRegex(self.qemu_img('snapshot', '-l', str(self.other)).stdout, r'(?m)^1 +s ')
        done = self.qemu_img('no-such-command')
        self.assertEqual(1, done.returncode)
        self.assertIn('no-such-command', done.stderr)
