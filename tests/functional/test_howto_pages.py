# SPDX-License-Identifier: Apache-2.0
"""The commands of the how-to pages on templates, domains, snapshots, forks and checkpoints, typed
as they stand there, one page after the other, by an administrator of a host with a libvirtd.

What is not typed is named with its reason in ``_NOT_TYPED``. Backup and the tutorial have tests of
their own; pools of NVDIMMs, a second host and AppArmor need the VM lab (``tools/vm-test``).
"""

import os
from pathlib import Path
import re
import shutil
import subprocess
import sys

from pcow_driver.common import names
from pcow_driver.images import image
from tests.functional import images
from tests.functional import libvirt_vm

PAGES = images.TOP / 'doc/source/howto'
PLACES = {
    '/var/lib/pcow/pools/fast': 'pools/fast',
    '/var/lib/libvirt/images': 'images',
    # two are as good as sixteen, and this machine may have two processors
    '--count 16': '--count 2',
    # also where there is KVM: what runs is the same everywhere
    'domain-xml fast/web1': 'domain-xml fast/web1 --type qemu',
    # the guest of the tests has all in its initrd
    '--kernel vmlinuz': '--kernel vmlinuz --initrd initrd',
}
_NOT_TYPED = {
    r'^install |^systemctl |^cat etc/|^apparmor_parser ': 'changes the host: confinement, VM lab',
    r'--quiesce': 'wants the agent in the guest: test_virsh_snapshots',
    r'--grant|attach-device': 'wants a second image in XML by hand: test_virsh_snapshots',
    r'^virsh snapshot-list|^pcow-img snapshot -l -U': 'test_virsh_snapshots types these',
    r'^pcow-img rebase': 'is for a base that was changed: test_templates_protected',
    r'^<': 'XML',
}
_BLOCK = re.compile(r'::\n\n((?: {4}\S.*\n|\n)+)')
_SECONDS = 300


def commands(page: str) -> list[str]:
    text = (PAGES / f'{page}.rst').read_text()
    return [
        line.strip()
        for block in _BLOCK.findall(text)
        for line in block.splitlines()
        if line.strip() and not any(re.search(one, line.strip()) for one in _NOT_TYPED)
    ]


class HowtoPagesTest(libvirt_vm.HostTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.place = self.host.directory / 'howto'
        self.pool = self.host.place.scratch / 'fast'
        for directory in ('bin', 'pools', 'images'):
            (self.place / directory).mkdir(parents=True)
        (self.place / 'pools/fast').symlink_to(self.pool)
        (self.place / 'vmlinuz').symlink_to(self.host.kernel)
        (self.place / 'initrd').symlink_to(self.host.initrd)
        self._make_shim()
        self._make_disk()
        self.environment = os.environ | {
            'PATH': f'{self.place}/bin:{os.environ["PATH"]}',
            'LIBVIRT_DEFAULT_URI': self.host.daemon.uri,
            'LC_ALL': 'C',
        }
        self._make_pcowctl()
        self.type_in(f'pcowctl pool create fast {self.pool}')
        self.addCleanup(self._remove_pool)

    def _remove_pool(self) -> None:
        self.type_in('pcowctl pool remove --forget fast')
        shutil.rmtree(self.pool)

    def _make_shim(self) -> None:
        """What a domain without a kernel boots: the guest of these tests."""
        self.shim = self.place / 'shim'
        self.shim.mkdir()
        (self.shim / 'kernel').symlink_to(self.host.kernel)
        (self.shim / 'initrd').symlink_to(self.host.initrd)

    def _make_disk(self) -> None:
        disk = self.place / 'debian12.raw'
        libvirt_vm.run('/sbin/mkfs.ext4', '-q', '-b', '4096', disk, '56M')
        libvirt_vm.run(
            'qemu-img', 'convert', '-f', 'raw', '-O', 'qcow2', disk, self.place / 'debian12.qcow2'
        )
        disk.unlink()

    def _make_pcowctl(self) -> None:
        config = self.place / 'pcow.conf'
        config.write_text(
            self.host.place.config.read_text()
            + f'boot_shim = {self.shim}\n'
            + f'emulator = {images.program("qemu-system-x86_64")}\n'
        )
        program = self.place / 'bin/pcowctl'
        program.write_text(
            f'#!/bin/sh\nexec {Path(sys.prefix) / "bin/pcowctl"} --config-file {config} "$@"\n'
        )
        program.chmod(0o755)

    def type_in(self, line: str) -> str:
        for place, here in PLACES.items():
            line = line.replace(place, here)
        done = subprocess.run(
            ['bash', '-c', f'set -o pipefail; {line}'],
            cwd=self.place,
            env=self.environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=_SECONDS,
            check=False,
        )
        self.assertEqual(0, done.returncode, f'{line}: {done.stdout}{done.stderr}')
        return done.stdout

    def type_all(self, lines: list[str], at_least: int) -> dict[str, str]:
        """What each has printed."""
        self.assertGreaterEqual(len(lines), at_least, lines)
        return {line: self.type_in(line) for line in lines}

    def remove_domains(self, *but: str) -> None:
        """Forks and copies of web1 too."""
        for name in set(self.type_in('virsh list --all --name').split()) - set(but):
            if self.type_in(f'virsh domstate {name}').strip() != 'shut off':
                self.type_in(f'virsh destroy {name}')
            self.type_in(f'virsh undefine {name}')

    def images(self) -> set[str]:
        return {path.name.removesuffix(names.IMAGE_SUFFIX) for path in self.pool.glob('*.pcow')}

    def make_domain(self, *options: str) -> None:
        self.type_in(f'pcowctl domain-xml fast/web1 {" ".join(options)} >web1.xml')
        self.type_in('virsh define web1.xml')
        self.type_in('virsh start web1')

    def test_pages(self) -> None:
        self.addCleanup(self.remove_domains)
        self._templates()
        self._libvirt()
        self._snapshots()
        self._forks()
        self._checkpoints()

    def _templates(self) -> None:
        lines = commands('templates')
        last = lines.index('pcowctl image delete fast/web1')
        said = self.type_all(lines, 9)
        self.assertIn('scratch', said['pcowctl image list fast'])
        self.assertIn('debian12', said['pcowctl image show fast/web1'])
        self.assertEqual(8 << 30, image.info(str(self.pool / 'scratch.pcow')).virtual_size)
        self.assertEqual({'scratch'}, self.images())
        # for the pages that follow
        self.type_all([line for line in lines[:last] if 'scratch' not in line], 4)

    def _libvirt(self) -> None:
        lines = commands('libvirt')
        disk = lines.index('pcowctl domain-xml fast/web1 --bus virtio | virsh define /dev/stdin')
        back = next(number for number, line in enumerate(lines) if line.startswith('uuid='))
        self.type_all(lines[:disk], 3)
        self.assertEqual('running', self.type_in('virsh domstate web1').strip())
        self.type_in('virsh destroy web1')
        # one shell: a line uses what the one before has set
        self.type_in('\n'.join(['set -e', *lines[back:]]))
        self.assertIn('<disk ', self.type_in('virsh dumpxml web1'))
        self.assertIn('nvdimm', (self.place / 'web1-before.xml').read_text())
        self.type_in('virsh undefine web1')

    def _snapshots(self) -> None:
        lines = commands('snapshots')
        made = next(number for number, line in enumerate(lines) if 'domain-xml' in line)
        for line in lines[: made + 1]:
            self.type_in(line)
        self.type_in('virsh define web1.xml')
        self.type_in('virsh start web1')
        said = self.type_all(lines[made + 1 :], 7)
        self.assertIn('release-4', said['pcowctl snapshot list --domain web1'])
        self.assertIn('release-4', self.type_in('pcowctl snapshot list --domain web1'))
        # the page on forks has its first name
        self.type_in('pcowctl snapshot rename --domain web1 release-4 before-upgrade')

    def _forks(self) -> None:
        self.type_all(commands('forks'), 3)
        self.assertLessEqual({'web1-test', 'web2'}, self.images())
        self.assertEqual('running', self.type_in('virsh domstate web1').strip())
        self.remove_domains()
        for name in ('web1-test', 'web2', 'web1'):
            self.type_in(f'pcowctl image delete fast/{name}')

    def _checkpoints(self) -> None:
        self.type_in('pcowctl image create fast/web1 --template debian12')
        lines = commands('checkpoints')
        end = next(i for i, line in enumerate(lines) if 'delete-checkpoint' in line)
        fork = next(i for i, line in enumerate(lines) if ' vm fork ' in line)
        said = self.type_all(lines[:end], 6)
        self.assertIn('warm', said['pcowctl vm tree web1'])
        self.type_all(lines[fork : fork + 2], 2)
        running = set(self.type_in('virsh list --name').split())
        self.assertEqual({'web1', 'web1-1', 'web1-2', 'copy'}, running)
        # "A domain that is off"
        self.type_in('virsh destroy web1')
        self.type_in(lines[-1])
        self.assertEqual('running', self.type_in('virsh domstate web1').strip())
        self.remove_domains('web1')
        for name in sorted(self.images() - {'debian12', 'web1', 'web1-ram'}):
            self.type_in(f'pcowctl image delete fast/{name}')
        self.type_in(lines[end])
        self.assertNotIn('warm', self.type_in('pcowctl vm tree web1'))
