# SPDX-License-Identifier: Apache-2.0
"""Every line of pcowctl doctor says what was found, and what to do if something is to be done."""

from collections.abc import Callable
from collections.abc import Iterator
import dataclasses
import grp
import json
import os
from pathlib import Path
import pwd
import socket
import struct
import subprocess

import fixtures

from pcow_driver.common import exception
from pcow_driver.common import users
from pcow_driver.common.finding import ADVICE
from pcow_driver.common.finding import MISSING
from pcow_driver.common.finding import NOTHING_TO_DO
from pcow_driver.common.finding import OK
from pcow_driver.common.finding import Finding
from pcow_driver.health import doctor
from pcow_driver.health import separation
from pcow_driver.images import image
from pcow_driver.pmem import filesystem
from pcow_driver.pools import registry
from pcow_driver.pools import settings
from pcow_driver.provision import diagnosis
from pcow_driver.provision import host
from tests.unit.pcow_driver import base

_MIB = 1 << 20


class DoctorTestCase(base.TestCase):
    def setUp(self) -> None:
        super().setUp()

    def substitute(self, name: str, value: object) -> None:
        self.useFixture(fixtures.MonkeyPatch(f'pcow_driver.{name}', value))

    def one(
        self, check: Callable[[], Iterator[Finding]], status: str, found: str, advice: str = '.'
    ) -> None:
        """The check finds one thing."""
        (finding,) = check()
        self.assertEqual(status, finding.status, str(finding))
        self.assertRegex(finding.found, found)
        self.assertRegex(finding.advice, advice)
        self.assertEqual(status == OK, finding.advice == NOTHING_TO_DO, str(finding))


class HostTest(DoctorTestCase):
    def test_every_finding_says_what_to_do(self) -> None:
        for finding in doctor.diagnose():
            self.assertTrue(finding.check and finding.found, finding)
            self.assertEqual(finding.status == OK, finding.advice == NOTHING_TO_DO, str(finding))

    def test_kernel_options(self) -> None:
        all_set = {
            name: 'y' for name, _why in (*diagnosis._PMEM_OPTIONS, *diagnosis._OTHER_OPTIONS)
        }
        self.substitute('provision.diagnosis._kernel_config', lambda: all_set)
        self.one(diagnosis.check_kernel_config, OK, 'USERFAULTFD')
        self.substitute(
            'provision.diagnosis._kernel_config', lambda: all_set | {'USERFAULTFD': 'n'}
        )
        self.one(
            diagnosis.check_kernel_config,
            ADVICE,
            'CONFIG_USERFAULTFD is not set',
            'use a kernel with it',
        )
        self.substitute('provision.diagnosis._kernel_config', lambda: None)
        self.one(diagnosis.check_kernel_config, ADVICE, 'no /boot/config', 'checks of pools')

    def test_snapshots_while_off(self) -> None:
        """Also a program of ours that is installed is too old if it leaves some images out."""
        ours = (base.TOP / 'etc/libvirt/bin/qemu-img').read_text()
        for text, status, advice in (
            (ours, OK, ''),
            ('ELF', ADVICE, 'install'),
            (ours.replace('virtio-pmem', ''), ADVICE, 'virtio-pmem devices: install'),
            (ours.replace('STORAGE_POOLS', ''), ADVICE, 'of storage pools: install'),
        ):
            finding = doctor._snapshots_while_off('7', self.script('qemu-img', text))
            self.assertEqual(status, finding.status, str(finding))
            self.assertIn(advice, finding.advice)
        self.assertEqual(ADVICE, doctor._snapshots_while_off('7', None).status)

    def test_map_count(self) -> None:
        for value, status, advice in (
            (1000, MISSING, 'sysctl'),
            (65530, ADVICE, 'sysctl'),
            (1 << 20, OK, '.'),
        ):
            self.substitute('health.doctor._read', lambda _path, value=value: str(value))
            self.one(doctor._check_map_count, status, str(value), advice)

    def test_userfaultfd(self) -> None:
        device = self.directory / 'userfaultfd'
        self.substitute('health.doctor.USERFAULTFD', str(device))
        self.one(doctor._check_userfaultfd, ADVICE, 'is not there', 'kernel 6.1')
        device.touch()
        device.chmod(0o600)
        self.one(doctor._check_userfaultfd, ADVICE, 'mode 0600', 'udevadm')
        device.chmod(0o666)
        self.one(doctor._check_userfaultfd, OK, 'mode 0666')

    def test_userfaultfd_of_a_group(self) -> None:
        """Of any group that QEMU's user is in; and what is not known is not advised on as if it
        were.
        """
        device = self.directory / 'userfaultfd'
        device.touch()
        device.chmod(0o660)
        self.substitute('health.doctor.USERFAULTFD', str(device))
        self.substitute('health.separation.QEMU_CONF', str(self.directory / 'qemu.conf'))
        own, other = pwd.getpwnam('nobody'), grp.getgrnam('daemon')
        self.substitute('health.separation.QEMU_USERS', ('no-such-user', 'nobody'))
        os.chown(device, 0, own.pw_gid)
        self.one(doctor._check_userfaultfd, OK, 'nogroup|nobody')
        os.chown(device, 0, other.gr_gid)
        self.one(
            doctor._check_userfaultfd,
            ADVICE,
            'group daemon',
            "not in the group daemon: 'usermod -aG daemon nobody'",
        )
        device.chmod(0o640)
        self.one(doctor._check_userfaultfd, ADVICE, 'mode 0640', 'udevadm')
        os.chown(device, own.pw_uid, other.gr_gid)
        self.one(doctor._check_userfaultfd, OK, 'mode 0640')
        (self.directory / 'qemu.conf').write_text('#user = "root"\nuser = "daemon"\n')
        self.one(doctor._check_userfaultfd, ADVICE, 'mode 0640', 'udevadm')
        device.chmod(0o660)
        self.one(doctor._check_userfaultfd, OK, 'group daemon')
        (self.directory / 'qemu.conf').unlink()
        self.substitute('health.separation.QEMU_USERS', ('no-such-user',))
        self.one(doctor._check_userfaultfd, ADVICE, 'group daemon', 'not known')

    def test_userfaultfd_with_an_acl(self) -> None:
        device = self.directory / 'userfaultfd'
        device.touch()
        device.chmod(0o600)
        self.substitute('health.doctor.USERFAULTFD', str(device))
        entries = (
            (0x01, 6, -1),
            (0x02, 6, pwd.getpwnam('nobody').pw_uid),
            (0x04, 0, -1),
            (0x10, 6, -1),
            (0x20, 0, -1),
        )
        os.setxattr(
            device,
            'system.posix_acl_access',
            struct.pack('<I', 2) + b''.join(struct.pack('<HHi', *entry) for entry in entries),
        )  # user:nobody:rw-
        self.one(doctor._check_userfaultfd, ADVICE, 'an ACL', f'getfacl {device}')

    def test_hook(self) -> None:
        hook = self.directory / 'hook'
        self.substitute('health.doctor.HOOK', str(hook))
        self.one(doctor._check_hook, ADVICE, 'not there', 'install')
        hook.touch()
        hook.chmod(0o755)
        self.one(doctor._check_hook, ADVICE, 'an earlier version', 'domain-xml --ram')
        text = (base.TOP / 'etc/libvirt/hooks/qemu.d/pcow').read_text()
        hook.write_text(text.replace('urn:pcow:domain-disks', ''))
        self.one(doctor._check_hook, ADVICE, 'an earlier version', 'domain-xml --bus virtio')
        hook.write_text(text.replace('{urn:pcow:domain}ram', ''))
        self.one(doctor._check_hook, ADVICE, 'an earlier version', 'domain-xml --ram')
        hook.write_text(text.replace('directory_of', 'dirname'))
        self.one(doctor._check_hook, ADVICE, 'an earlier version', 'a link of a service leads to')
        hook.write_text(text.replace('trusted.pcow.ram', ''))
        self.one(doctor._check_hook, ADVICE, 'an earlier version', 'which another image may have')
        hook.write_bytes((base.TOP / 'etc/libvirt/hooks/qemu.d/pcow').read_bytes())
        self.one(doctor._check_hook, OK, str(hook))

    def test_links_to_pools(self) -> None:
        """The hook follows those of root alone."""
        (self.directory / 'data/pools/fast').mkdir(parents=True)
        nova = self.directory / 'nova'
        nova.mkdir()
        (nova / 'pools').symlink_to('../data/./pools')
        (self.directory / 'top').symlink_to(nova)
        path = self.directory / 'top/pools/fast'
        registry.PoolRegistry().create('fast', str(path))
        self.assertEqual([], list(doctor._check_links_to_pools()))
        for link, owner in ((nova / 'pools', 65534), (self.directory / 'top', 1)):
            os.chown(link, owner, 0, follow_symlinks=False)
            self.one(
                doctor._check_links_to_pools,
                ADVICE,
                f'{link} on the way to {path} is a link of user {owner}',
                f'links of root alone.*chown -h root {link}',
            )
        (nova / 'pools').unlink()
        (nova / 'pools').symlink_to('pools')
        os.chown(self.directory / 'top', 0, 0, follow_symlinks=False)
        self.one(doctor._check_links_to_pools, ADVICE, 'a link of user 0')
        (nova / 'pools').unlink()
        self.assertEqual([], list(doctor._check_links_to_pools()))

    def test_apparmor(self) -> None:
        local = self.directory / 'local'
        self.substitute('health.doctor.APPARMOR_LOCAL', str(local))
        enabled, profiles = self.directory / 'enabled', self.directory / 'libvirt'
        self.substitute('health.doctor.APPARMOR_ENABLED', str(enabled))
        self.substitute('health.doctor.APPARMOR_PROFILES', str(profiles))
        selinux = self.directory / 'selinux'
        self.substitute('health.doctor.SELINUX_ENABLED', str(selinux))
        self.one(doctor._check_apparmor, ADVICE, 'does not use it', 'several tenants')
        selinux.mkdir()
        self.one(doctor._check_apparmor, OK, 'SELinux')
        enabled.write_text('Y\n')
        profiles.mkdir()
        (local / 'abstractions').mkdir(parents=True)
        rules = base.TOP / 'etc/apparmor.d/local'
        for number, name in enumerate(('abstractions/libvirt-qemu', 'usr.sbin.libvirtd')):
            found = list(doctor._check_apparmor())[number]
            self.assertEqual(
                (ADVICE, f'{local}/{name} does not mention pcow'), (found.status, found.found)
            )
            self.assertIn(f'append etc/apparmor.d/local/{name}-pcow', found.advice)
            (local / name).write_text((rules / f'{name}-pcow').read_text())
        self.assertEqual([OK, OK], [found.status for found in doctor._check_apparmor()])
        (local / 'abstractions/libvirt-qemu').write_text('  /var/lib/pcow/pools/*/*.pcow rwk,\n')
        (local / 'usr.sbin.libvirtd').write_text('  /usr/local/lib/pcow/libvirt/qemu-img PUxr,\n')
        wanted = ('every guest may read and write every image', 'libvirtd may not run the hook')
        for words, found in zip(wanted, doctor._check_apparmor(), strict=True):
            self.assertEqual(ADVICE, found.status)
            self.assertIn(words, found.advice)


class SeparationTest(DoctorTestCase):
    """Guests, services and root."""

    def setUp(self) -> None:
        super().setUp()
        self.state = self.directory / 'state'
        self.configure(pools_path=str(self.state / 'pools'))
        self.conf = self.directory / 'qemu.conf'
        self.substitute('health.separation.QEMU_CONF', str(self.conf))
        self.substitute('health.separation.QEMU_USERS', ('nobody',))
        for directory in (self.directory, self.directory.parent):
            directory.chmod(0o755)

    def as_service(self, check: Callable[[], Iterator[Finding]]) -> list[str]:
        """What nobody, in group nogroup, is told."""
        out = self.directory / 'out'
        out.touch()
        out.chmod(0o666)

        def run() -> None:
            out.write_text('\n'.join(f'{one.status} {one.advice}' for one in check()))

        users.run_as(pwd.getpwnam('nobody').pw_uid, run)
        return out.read_text().splitlines()

    def test_state_of_a_service(self) -> None:
        """It needs no right above the locks."""
        self.one(doctor._check_state, OK, str(self.state))
        (said,) = self.as_service(doctor._check_state)
        self.assertRegex(said, r"missing .*'pcowctl host setup --group GROUP'")
        list(host.set_up('nogroup'))
        (said,) = self.as_service(doctor._check_state)
        self.assertTrue(said.startswith(f'{OK} '), said)

    def test_directories(self) -> None:
        check = separation.check_directories
        self.one(check, OK, str(self.state))
        list(host.set_up(None))
        (self.state / 'locks').mkdir(0o700)
        self.one(check, OK, str(self.state))
        list(host.set_up('nogroup'))
        self.one(check, OK, str(self.state))
        for name, mode, owner in (
            ('.', 0o775, 0),
            ('.', 0o755, 65534),
            ('pools', 0o777, 0),
            ('locks', 0o2777, 0),
            ('exports', 0o2750, 0),
            ('exports', 0o2770, 65534),
            ('disks', 0o2770, 0),
        ):
            path = self.state / name
            os.chown(path, owner, -1)
            path.chmod(mode)
            self.one(check, ADVICE, f'mode {mode:04o}', "'pcowctl host setup --group nogroup'")
            list(host.set_up('nogroup'))
            self.one(check, OK, str(self.state))
        os.chown(self.state / 'lists', 0, grp.getgrnam('daemon').gr_gid)
        self.one(check, ADVICE, 'daemon, nogroup share it', '--group GROUP')
        (self.state / 'lists').rmdir()
        (self.state / 'lists').symlink_to('/etc')
        self.one(check, ADVICE, 'lists is a link', 'host setup')

    def test_disk_units(self) -> None:
        check, path = separation.check_disk_units, self.directory / 'nbd.sock'
        self.substitute('export.nbdkit_unit.SOCKET', str(path))
        self.one(check, ADVICE, 'is not there', 'systemctl enable --now pcow-nbd.socket')
        list(host.set_up('nogroup'))
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
        nogroup, daemon = (grp.getgrnam(name).gr_gid for name in ('nogroup', 'daemon'))
        for owner, group, mode, status, advice in (
            (0, nogroup, 0o660, OK, '.'),
            (0, nogroup, 0o666, ADVICE, 'every user'),
            (0, daemon, 0o660, ADVICE, r'another group \(nogroup\): set SocketGroup='),
            (65534, nogroup, 0o660, ADVICE, 'systemd did not make it'),
        ):
            os.chown(path, owner, group)
            path.chmod(mode)
            self.one(check, status, f'mode {mode:04o}', advice)
        os.chown(path, 0, nogroup)
        path.chmod(0o600)
        (said,) = self.as_service(check)
        self.assertIn('this user may not ask: add it to the group nogroup', said)
        path.unlink()
        path.touch()
        self.one(check, ADVICE, 'nbd.sock', 'systemd did not make it')
        self.directory.chmod(0o777)
        self.one(check, ADVICE, 'nbd.sock', 'others could listen in its place')

    def test_group_of_qemu(self) -> None:
        check = separation.check_qemu_group
        self.one(check, OK, r'nogroup \(user nobody\)')
        self.conf.write_text('group = "daemon"\n')
        self.one(check, OK, r'daemon \(user nobody\)')
        self.conf.write_text(f'group = "+{grp.getgrnam("daemon").gr_gid}"\n')
        self.one(check, OK, r'daemon \(user nobody\)')
        self.conf.write_text('group = "no-such-group"\n')
        self.one(check, ADVICE, 'no-such-group', 'make the group')
        self.conf.write_text('user = "root"\n')
        self.one(check, ADVICE, 'user root', 'is root')
        self.conf.write_text('user = "no-such-user"\n')
        self.one(check, ADVICE, 'not known here', 'install libvirt')

    def test_what_qemu_may_of_services(self) -> None:
        check = separation.check_qemu_group
        list(host.set_up('daemon'))
        self.one(check, OK, 'nogroup')
        disk = self.state / 'disks/1'
        for group, mode, status in (
            ('daemon', 0o700, ADVICE),
            ('daemon', 0o710, ADVICE),
            ('nogroup', 0o710, OK),
        ):
            disk.mkdir(exist_ok=True)
            os.chown(disk, 0, grp.getgrnam(group).gr_gid)
            disk.chmod(mode)
            self.one(check, status, 'nogroup', '.' if status == OK else 'qemu_group = nogroup')
        list(host.set_up('nogroup'))
        self.one(check, ADVICE, 'nogroup', "QEMU is in their group: .*'gpasswd -d nobody nogroup'")

    def test_a_libvirt_that_confines_nobody(self) -> None:
        self.conf.write_text('security_driver = "none"\n')
        self.one(doctor._check_apparmor, ADVICE, 'security_driver', 'images of all others')


class RegionTest(DoctorTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.substitute('provision.ndctl._SYSFS', str(self.directory / 'sys'))
        self.substitute('provision.diagnosis._BUS', str(self.directory))
        self.useFixture(
            fixtures.EnvironmentVariable('PATH', f'{self.directory}:{os.environ["PATH"]}')
        )

    def findings(
        self,
        *regions: dict[str, object],
        provider: str = 'ACPI.NFIT',
        labels: str = '',
        nstype: int = 5,
    ) -> list[Finding]:
        listed = [
            {
                'provider': provider,
                'regions': [
                    {
                        'dev': f'region{number}',
                        'size': 1024 * _MIB,
                        'align': 16 * _MIB,
                        'available_size': 0,
                        'mappings': [{'dimm': f'nmem{number}'}],
                        'persistence_domain': 'memory_controller',
                        'namespaces': [],
                        **region,
                    }
                    for number, region in enumerate(regions)
                ],
            }
        ]
        (self.directory / 'listed').write_text(json.dumps(listed))
        for number in range(len(regions)):
            path = self.directory / f'sys/region{number}/nstype'
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f'{nstype}\n')
        self.script(
            'ndctl',
            f'#!/bin/sh\ncase "$*" in list*) cat {self.directory}/listed ;;\n'
            f'*--json*) echo "[1]" ;;\n*--output*) printf \'{labels}\' >"$3" ;;\nesac\n',
        )
        return list(diagnosis.check_regions())

    def test_promises(self) -> None:
        for provider, domain, said in (
            ('ACPI.NFIT', 'memory_controller', 'ADR'),
            ('ACPI.NFIT', 'cpu_cache', 'eADR'),
            ('ACPI.NFIT', 'unknown', 'does not say'),
            ('e820', 'unknown', 'memmap=.*'),
            ('ramdax', 'unknown', 'ramdax driver'),
            ('CXL', 'cpu_cache', r'CXL memory device \(CXL\)'),
        ):
            (finding,) = self.findings({'persistence_domain': domain}, provider=provider)
            self.assertRegex(finding.found, said)
            self.assertEqual(
                provider in ('e820', 'ramdax'), 'survives kexec' in finding.found, str(finding)
            )

    def test_label_areas(self) -> None:
        (finding,) = self.findings({}, nstype=4, labels='rubbish')
        self.assertEqual(MISSING, finding.status)
        self.assertRegex(finding.found, 'label areas .* are damaged')
        self.assertIn('write-labels', finding.advice)
        (finding,) = self.findings({}, nstype=4)
        self.assertRegex(finding.found, 'label areas are empty')
        self.assertIn('initialises them', finding.advice)

    def test_interleave(self) -> None:
        (finding,) = self.findings({'size': 1030 * _MIB})
        self.assertIn('no multiple', finding.found)
        self.assertIn('interleave DIMMs of one size', finding.advice)
        (finding,) = self.findings({'mappings': [{'dimm': 'nmem0'}, {'dimm': 'nmem1'}]})
        self.assertIn('interleaved over 2 DIMMs', finding.found)
        *_both, finding = self.findings({}, {})
        self.assertEqual(('interleave', ADVICE), (finding.check, finding.status))
        self.assertIn('region0, region1', finding.found)
        self.assertIn('firmware', finding.advice)
        self.assertEqual(
            [],
            [
                item
                for item in self.findings({}, {'size': 512 * _MIB})
                if item.check == 'interleave'
            ],
        )

    def test_namespaces(self) -> None:
        whole = {
            'dev': 'namespace0.0',
            'mode': 'fsdax',
            'size': 512 * _MIB,
            'align': 2 * _MIB,
            'blockdev': 'pmem0',
        }
        for changes, status, said in (
            ({}, OK, ''),
            ({'mode': 'raw'}, ADVICE, 'pool create'),
            ({'state': 'disabled'}, ADVICE, 'enable-namespace'),
            ({'badblock_count': 3}, ADVICE, 'clear-errors'),
            ({'align': 4096}, ADVICE, '--align 2M'),
        ):
            _region, finding = self.findings({'namespaces': [whole | changes]})
            self.assertEqual(status, finding.status, str(finding))
            self.assertIn(said, finding.advice)

    def test_no_ndctl(self) -> None:
        self.findings()
        self.script('ndctl', '#!/bin/sh\necho broken >&2\nexit 1\n')
        (finding,) = diagnosis.check_regions()
        self.assertEqual((ADVICE, 'broken'), (finding.status, finding.found))


class ImagesTest(DoctorTestCase):
    def test_images_that_cannot_be_read(self) -> None:
        programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        self.configure(pcow_img=str(programs / 'pcow-img'))
        pool = registry.PoolRegistry().create('p', str(self.directory / 'p'))
        for name in ('whole', 'broken'):
            pool.create_image(name, size=2 * _MIB)
        self.assertEqual([], list(doctor._check_images(pool)))
        with open(pool.existing_path('broken'), 'r+b') as file:
            file.write(bytes(4096))
        found = [item for item in doctor._check_pools() if item.check == 'images of pool p']
        self.one(lambda: iter(found), ADVICE, '1 cannot be read: broken', 'image delete --force')

    def test_images_without_a_mirror(self) -> None:
        """The operator is led to the way to one."""
        programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        self.configure(pcow_img=str(programs / 'pcow-img'))
        pool = registry.PoolRegistry().create('p', str(self.directory / 'p'))
        pool.create_image('new', size=2 * _MIB)
        self.assertEqual([], pool.without_mirror())
        path = pool.image_path('old')
        create = [str(programs / 'pcow-img'), 'create', '-q', '-o', 'mirror=off', path, '2M']
        subprocess.run(create, check=True)
        self.one(
            lambda: doctor._check_images(pool),
            ADVICE,
            '1 have no mirror of their metadata: old',
            'pcow-img amend -o mirror=on',
        )
        subprocess.run([programs / 'pcow-img', 'amend', '-q', '-o', 'mirror=on', path], check=True)
        self.assertEqual([], list(doctor._check_images(pool)))

    def test_image_that_is_larger_than_all_that_its_pool_can_promise(self) -> None:
        """As a guest that has broken out of its QEMU may have it."""
        programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        self.configure(pcow_img=str(programs / 'pcow-img'))
        pool = registry.PoolRegistry().create('p', str(self.directory / 'p'))
        for name in ('forged', 'honest', 'template'):
            pool.create_image(name, size=2 * _MIB)
        for name in ('forged', 'template'):
            image.resize(pool.existing_path(name), 16 << 40)
        image.seal(pool.existing_path('template'))
        limited = dataclasses.replace(pool, settings=settings.Settings(overcommit=1.0))
        self.one(
            lambda: doctor._check_images(limited), ADVICE, 'forged has 16 TiB', 'resize --shrink'
        )
        unlimited = dataclasses.replace(pool, settings=settings.Settings(overcommit=0.0))
        self.assertEqual([], list(doctor._check_images(unlimited)))


class MappingTest(DoctorTestCase):
    """DAX really on, mappings of 2 MiB obtained."""

    def findings(self, persistence: str, behaviour: filesystem.Behaviour | None) -> list[Finding]:
        def probe(directory: str) -> filesystem.Behaviour:
            if behaviour is None:
                raise exception.ProbeFailed(path=directory, reason='full')
            return behaviour

        pool = registry.PoolRegistry().create('p', str(self.directory / 'p'))
        self.substitute('pools.pool.Pool.persistence', lambda _pool: persistence)
        self.substitute('pmem.filesystem.probe', probe)
        self.substitute('provision.provision.mount_source', lambda _path: '/dev/pmem0')
        found = list(diagnosis.check_pool(pool))
        registry.PoolRegistry().remove('p')
        return found

    def test_dax(self) -> None:
        (finding,) = self.findings('page-cache', None)
        self.assertEqual(MISSING, finding.status)
        self.assertIn('not mounted with DAX', finding.found)
        self.assertIn('-o dax=always', finding.advice)

    def test_class_that_is_no_longer_that_of_the_marker(self) -> None:
        """Whatever the device is called."""
        self.substitute('images.image.probe', lambda _directory: 'pmem')
        pool = registry.PoolRegistry().create('p', str(self.directory / 'p'))
        self.assertFalse(pool.has_lost_pmem())
        self.substitute('images.image.probe', lambda _directory: 'page-cache')
        self.assertTrue(pool.has_lost_pmem())
        (finding,) = diagnosis.check_pool(pool)
        self.assertEqual(MISSING, finding.status)
        self.assertIn('class pmem when it was made', finding.found)

    def test_huge_mappings(self) -> None:
        for behaviour, status, found in (
            (filesystem.Behaviour(True, True), OK, '2 MiB, MAP_SYNC'),
            (filesystem.Behaviour(True, False), ADVICE, '4 KiB, MAP_SYNC'),
            (None, ADVICE, 'full'),
        ):
            (finding,) = self.findings('pmem', behaviour)
            self.assertEqual(status, finding.status, str(finding))
            self.assertIn(found, finding.found)
