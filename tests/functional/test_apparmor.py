# SPDX-License-Identifier: Apache-2.0
"""The rules for AppArmor, compiled in the place where libvirt's profiles include them; nothing is
loaded into the kernel.
"""

from pathlib import Path
import shutil
import subprocess
import tempfile

import testtools

from tests.functional import images

RULES = images.TOP / 'etc/apparmor.d/local/abstractions/libvirt-qemu-pcow'
DAEMON_RULES = images.TOP / 'etc/apparmor.d/local/usr.sbin.libvirtd-pcow'
PROFILES = Path('/etc/apparmor.d')
DOMAIN = """#include <tunables/global>
profile libvirt-6f0c1c52-0000-0000-0000-000000000000 flags=(attach_disconnected) {
  #include <abstractions/libvirt-qemu>
  "/var/lib/pcow/pools/fast/vm1.pcow" rwk,
}
"""


class RulesTest(testtools.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.base = Path(tempfile.mkdtemp(prefix='pcow-test-')) / 'apparmor.d'
        self.addCleanup(shutil.rmtree, self.base.parent)
        shutil.copytree(PROFILES, self.base, symlinks=True)
        self.local = self.base / 'local/abstractions/libvirt-qemu'
        self.local.parent.mkdir(parents=True, exist_ok=True)
        (self.base / 'domain').write_text(DOMAIN)

    def parse(self, *options: str, profile: str = 'domain') -> subprocess.CompletedProcess[str]:
        command = [
            '/usr/sbin/apparmor_parser',
            '--skip-cache',
            '--base',
            str(self.base),
            *options,
            str(self.base / profile),
        ]
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors='replace',
            timeout=60,
            check=False,
        )

    def test_rules_are_part_of_a_domains_profile(self) -> None:
        self.local.write_text(RULES.read_text())
        done = self.parse('--skip-kernel-load')
        self.assertEqual(0, done.returncode, done.stderr)
        text = self.parse('--preprocess').stdout
        self.assertIn('/dev/userfaultfd rw,', text)

    def test_no_rule_opens_what_belongs_to_one_guest(self) -> None:
        """What is here holds for all of them; with a kernel: tests/vm/confinement.py."""
        for line in RULES.read_text().splitlines():
            rule = line.partition('#')[0]
            self.assertFalse(
                '.pcow' in rule or 'socket' in rule or '/var/lib' in rule or '/mnt' in rule, line
            )

    def test_rules_are_part_of_the_daemons_profile(self) -> None:
        (self.base / 'local/usr.sbin.libvirtd').write_text(DAEMON_RULES.read_text())
        done = self.parse('--skip-kernel-load', profile='usr.sbin.libvirtd')
        self.assertEqual(0, done.returncode, done.stderr)
        text = self.parse('--preprocess', profile='usr.sbin.libvirtd').stdout
        for rule in (
            '/usr/local/lib/pcow/libvirt/qemu-img PUxr,',
            '/etc/libvirt/hooks/qemu.d/pcow PUxr,',
        ):
            self.assertIn(rule, text)

    def test_a_mistake_would_be_found(self) -> None:
        self.local.write_text(RULES.read_text() + '  /dev/userfaultfd sometimes,\n')
        done = self.parse('--skip-kernel-load')
        self.assertNotEqual(0, done.returncode)
        self.assertIn('syntax error', done.stderr + done.stdout)
