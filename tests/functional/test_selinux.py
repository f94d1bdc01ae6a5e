# SPDX-License-Identifier: Apache-2.0
"""The module for SELinux, compiled, and linked with Debian's policy: what it names is there, and
nothing in it is never allowed.

No kernel runs it here.
"""

import bz2
import hashlib
from pathlib import Path
import re
import shutil
import subprocess
import tempfile

import testtools

from pcow_driver.virt import disk_server
from pcow_driver.virt import disk_xml
from tests.functional import images
from tools.lib.quickstart import apt
from tools.lib.quickstart import guest
from tools.lib.quickstart import state
from tools.lib.quickstart import teardown

SOURCE = images.TOP / 'etc/selinux/pcow.te'
CONTEXTS = images.TOP / 'etc/selinux/pcow.fc'
POLICY = 'selinux-policy-default'
MODULES = ('base', 'virt', 'qemu')


class ModuleTest(testtools.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.directory = Path(tempfile.mkdtemp(prefix='pcow-test-'))
        self.addCleanup(shutil.rmtree, self.directory)

    def run_tool(self, *words: object) -> str:
        """What a program says; it must succeed."""
        done = subprocess.run(
            [*map(str, words)],
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors='replace',
            timeout=300,
            check=False,
        )
        self.assertEqual(0, done.returncode, done.stdout)
        return done.stdout

    def package(self, text: str) -> Path:
        (self.directory / 'pcow.te').write_text(text)
        self.run_tool('checkmodule', '-M', '-m', '-o', 'pcow.mod', 'pcow.te')
        self.run_tool('semodule_package', '-o', 'pcow.pp', '-m', 'pcow.mod', '-f', CONTEXTS)
        return self.directory / 'pcow.pp'

    def policy(self) -> Path:
        """The modules of Debian's policy."""
        run = state.Run.create()
        self.addCleanup(teardown.tear_down, run)
        version = apt.version(POLICY)

        def unpack(part: Path) -> None:
            download = part.with_name('download')
            download.mkdir()
            self.run_tool('dpkg-deb', '-x', apt.download(POLICY, version, download), part)

        key = hashlib.sha256(version.encode()).hexdigest()[:16]
        return guest.Cache(run).get(f'{POLICY}-{key}', unpack) / 'usr/share/selinux/default'

    def link(self, package: Path) -> str:
        source = self.policy()
        for name in MODULES:
            (self.directory / f'{name}.pp').write_bytes(
                bz2.decompress((source / f'{name}.pp.bz2').read_bytes())
            )
        words = ['semodule_link', '-o', 'linked', *(f'{name}.pp' for name in MODULES), package.name]
        done = subprocess.run(
            words, cwd=self.directory, capture_output=True, text=True, timeout=300, check=False
        )
        return done.stderr if done.returncode else ''

    def test_module(self) -> None:
        self.assertEqual('', self.link(self.package(SOURCE.read_text())))
        self.run_tool('semodule_expand', 'linked', 'expanded')

    def test_mistakes_would_be_found(self) -> None:
        wrong = SOURCE.read_text().replace(
            'attribute virt_domain;', 'attribute virt_domain;\n    type no_such_type_t;'
        )
        self.assertIn('no_such_type_t', self.link(self.package(wrong)))

    def test_types_of_files(self) -> None:
        known = {*re.findall(r'^type (\w+);', SOURCE.read_text(), re.MULTILINE), 'virt_image_t'}
        for line in CONTEXTS.read_text().splitlines():
            if not line.startswith('#'):
                self.assertRegex(
                    line,
                    r'^/\S+\t(?:-c)?\tsystem_u:object_r:\w+:s0$|^/\S+\tsystem_u:object_r:\w+:s0$',
                )
                self.assertIn(line.split(':')[2], known)

    def test_sockets_of_disks(self) -> None:
        """Wherever the code has them; what is in /run the code labels itself."""
        places = [re.compile(line.split('\t')[0]) for line in self.contexts('pcow_disk_t')]
        for path in (
            '/var/lib/pcow/disks/0123456789abcdef/socket',
            disk_xml.socket_path('6f0c1c52-5d1e-4c0b-9a3f-2b7e4f90d1a6', 'vda'),
        ):
            self.assertTrue(any(place.fullmatch(path) for place in places), path)
        self.assertIn(disk_server._LABEL.rstrip(b'\0').decode(), self.contexts('pcow_disk_t')[0])

    @staticmethod
    def contexts(kind: str) -> list[str]:
        """Lines of one type."""
        return [line for line in CONTEXTS.read_text().splitlines() if f':{kind}:' in line]

    def test_no_guest_changes_a_base(self) -> None:
        (rule,) = re.findall(
            r'^allow virt_domain pcow_base_t:file (.*);', SOURCE.read_text(), re.MULTILINE
        )
        self.assertEqual('{ getattr ioctl lock map open read }', rule)
