# SPDX-License-Identifier: Apache-2.0
"""What this host has and lacks for pcow; each finding says what to do."""

from __future__ import annotations

import collections
from collections.abc import Callable
from collections.abc import Iterator
import grp
import os
import platform
import re
import shutil
import stat

from pcow_driver.common import conf
from pcow_driver.common import exception
from pcow_driver.common import locks
from pcow_driver.common import names
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.common.finding import ADVICE
from pcow_driver.common.finding import MISSING
from pcow_driver.common.finding import OK
from pcow_driver.common.finding import Finding
from pcow_driver.health import separation
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import registry
from pcow_driver.provision import diagnosis
from pcow_driver.provision import host
from pcow_driver.virt import libvirt_host

MIN_KERNEL = (6, 1)
MIN_MAP_COUNT = 65530
WANTED_MAP_COUNT = 262144
MIN_LIBVIRT = (9, 0)
HOOK = '/etc/libvirt/hooks/qemu.d/pcow'
USERFAULTFD = '/dev/userfaultfd'
_QEMU_GROUPS = ('libvirt-qemu', 'qemu', 'kvm')
APPARMOR_ENABLED = '/sys/module/apparmor/parameters/enabled'
APPARMOR_PROFILES = '/etc/apparmor.d/libvirt'
SELINUX_ENABLED = '/sys/fs/selinux'
APPARMOR_LOCAL = '/etc/apparmor.d/local'
_MOST_LINKS = 40  # that the hook follows


def diagnose() -> list[Finding]:
    """All checks, in an order in which a person would act on them. Does not raise for what it
    finds.
    """
    findings: list[Finding] = []
    for check in _CHECKS:
        findings += check()
    return findings


def _read(path: str) -> str | None:
    try:
        with open(path, encoding='utf-8', errors='replace') as f:
            return f.read().strip()
    except OSError:
        return None


def _version(text: str) -> tuple[int, int]:
    match = re.search(r'(\d+)\.(\d+)', text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _program(option: str, why: str, **find: bool) -> Iterator[Finding]:
    name = str(conf.CONF.pcow[option])
    try:
        path = tool.find(option, **find)
        version = (tool.run(path, '--version').splitlines() or [''])[0]
        yield Finding(name, OK, f'{version} ({path})')
    except exception.PcowError as e:
        yield Finding(
            name, MISSING, str(e), f'{why}: run tools/build, or set [pcow] {option} to its path'
        )


def _check_pcow_img() -> Iterator[Finding]:
    yield from _program('pcow_img', 'nothing works without pcow-img')


def _check_qemu_img() -> Iterator[Finding]:
    name = str(conf.CONF.pcow.qemu_img)
    for finding in _program('qemu_img', ''):
        yield (
            finding
            if finding.status == OK
            else Finding(
                name,
                MISSING,
                finding.found,
                "templates are read with it: install qemu-utils ('apt install qemu-utils')",
            )
        )


def _check_emulator() -> Iterator[Finding]:
    found = list(
        _program('emulator', 'domains need a QEMU with the pcow backend', build_first=True)
    )
    yield from found
    if found[0].status != OK:
        return
    path = tool.find('emulator', build_first=True)
    try:
        backend = tool.run(path, '-machine', 'none', '-object', 'memory-backend-file,help')
    except exception.PcowError as e:
        backend = str(e)
    if re.search(r'^\s*format=', backend, re.MULTILINE):
        yield Finding(
            'pcow backend of QEMU', OK, f'memory-backend-file of {path} takes format=pcow'
        )
    else:
        yield Finding(
            'pcow backend of QEMU',
            MISSING,
            f'{path} does not know memory-backend-file,format=pcow',
            'run tools/build and set [pcow] emulator to build/bin/qemu-system-x86_64',
        )


def _check_kernel() -> Iterator[Finding]:
    release = platform.release()
    if _version(release) >= MIN_KERNEL:
        yield Finding('kernel', OK, release)
    else:
        yield Finding(
            'kernel',
            ADVICE,
            release,
            'below 6.1 there is no /dev/userfaultfd and pcow is not tested: use 6.1 or later',
        )


def _has_acl(path: str) -> bool:
    try:
        return bool(os.getxattr(path, 'system.posix_acl_access'))
    except OSError:
        return False


_STOPS = (
    'under KVM a store of which neither KVM nor the instruction tells where it was stops the VM'
)


def _check_userfaultfd() -> Iterator[Finding]:
    path, check = USERFAULTFD, 'userfaultfd'
    try:
        status = os.stat(path)
    except OSError:
        yield Finding(check, ADVICE, f'{path} is not there', (f'{_STOPS}: use kernel 6.1 or later'))
        return
    mode = stat.S_IMODE(status.st_mode)
    try:
        group = grp.getgrgid(status.st_gid).gr_name
    except KeyError:
        group = str(status.st_gid)
    found = f'{path} has mode {mode:04o}, group {group}'
    if _has_acl(path):
        yield Finding(
            check,
            ADVICE,
            f'{found}, and an ACL',
            (
                f"whether it lets QEMU's user read and write was not judged: 'getfacl {path}' "
                f"shows it"
            ),
        )
        return
    advice = _advice_on(path, status, group)
    yield Finding(check, ADVICE, found, advice) if advice else Finding(check, OK, found)


def _advice_on(path: str, status: os.stat_result, group: str) -> str | None:
    """What has to be done so that QEMU's user can read and write a device; None: nothing."""
    rule = (
        f'install etc/udev/rules.d/60-pcow.rules, then: udevadm control --reload; udevadm trigger '
        f'{path}'
    )
    mode, user = status.st_mode, separation.qemu_user()
    if mode & 0o006 == 0o006 or (
        user is not None and user.pw_uid == status.st_uid and mode & 0o600 == 0o600
    ):
        return None
    if mode & 0o060 != 0o060:
        return f'{_STOPS}: {rule}'
    if user is None:
        return (
            None
            if group in _QEMU_GROUPS
            else (
                f"QEMU's user is not known here (libvirt is not installed?): see that it is in the "
                f"group {group}, or {rule}"
            )
        )
    if status.st_gid in os.getgrouplist(user.pw_name, user.pw_gid):
        return None
    return (
        f"QEMU's user {user.pw_name} is not in the group {group}: 'usermod -aG {group} "
        f"{user.pw_name}' and restart libvirt, "
        f'or {rule}'
    )


def _check_map_count() -> Iterator[Finding]:
    text = _read('/proc/sys/vm/max_map_count') or ''
    count = int(text) if text.isdigit() else 0
    check, found = 'vm.max_map_count', str(count)
    raise_it = 'install etc/sysctl.d/pcow.conf, then: sysctl --system'
    if count < MIN_MAP_COUNT:
        yield Finding(
            check, MISSING, found, f'scattered writes fail early below {MIN_MAP_COUNT}: {raise_it}'
        )
    elif count < WANTED_MAP_COUNT:
        # the budget of libpcow, a slab for each
        most = units.format_size(count * 3 // 4 * units.SLAB_SIZE)
        yield Finding(
            check,
            ADVICE,
            found,
            f"enough while a VM's images are not larger than {most} together; for more: {raise_it}",
        )
    else:
        yield Finding(check, OK, found)


def _check_state() -> Iterator[Finding]:
    """What this user needs is that it may lock; the directory above is root's alone."""
    existing = os.path.join(locks.state_path(), 'locks')
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    if os.access(existing, os.W_OK | os.X_OK):
        yield Finding('state directory', OK, locks.state_path())
    else:
        yield Finding(
            'state directory',
            MISSING,
            f'{existing} cannot be written to by this user',
            f"become root, or let root run '{host.command()}', with a group that this user is in",
        )


def _check_pools() -> Iterator[Finding]:
    pools = registry.PoolRegistry()
    try:
        entries = pools.list()
    except exception.PcowError as e:
        yield Finding(
            'pools',
            MISSING,
            str(e),
            f'repair {pools.path}, or delete it and run pcowctl pool import for each pool',
        )
        return
    if not entries:
        yield Finding(
            'pools',
            ADVICE,
            'none',
            (
                "make one on a mounted fsdax file system, or on tmpfs to try it: 'pcowctl pool "
                "create NAME DIR'"
            ),
        )
    for entry in entries:
        check = f'pool {entry.name}'
        try:
            pool = pools.get(entry.name)
        except (exception.PcowError, OSError) as e:
            yield Finding(
                check,
                MISSING,
                str(e),
                (
                    f"'pcowctl pool remove --destroy {entry.name}'"
                    if entry.ending is not None
                    else f"mount its file system; if it is gone for good: 'pcowctl pool remove "
                    f"--forget {entry.name}'"
                ),
            )
            continue
        try:
            capacity, persistence = pool.capacity(), pool.persistence()
        except (exception.PcowError, OSError) as e:
            yield Finding(
                check,
                MISSING,
                str(e),
                (
                    'this says nothing of its images: run it as root, see whether it is mounted '
                    'read-only, install what is missing'
                ),
            )
            continue
        found = (
            f'{persistence}, {units.format_size(capacity.free)} of '
            f'{units.format_size(capacity.total)} free ({pool.path})'
        )
        if capacity.free < capacity.total // 20:
            yield Finding(
                check,
                ADVICE,
                found,
                (
                    'guests wait when it is full: delete images or snapshots, or make the file '
                    'system larger'
                ),
            )
        elif persistence == 'volatile':
            yield Finding(
                check,
                ADVICE,
                found,
                'it does not survive the host: for data to keep, make a pool on fsdax',
            )
        else:
            yield Finding(check, OK, found)
        yield from _check_images(pool)
        yield from diagnosis.check_pool(pool)
        yield from diagnosis.check_boot(pool)


def _check_images(pool: pool_module.Pool) -> Iterator[Finding]:
    try:
        items, limit = pool.listed(), pool.account().limit
    except (exception.PcowError, OSError):
        return  # another check says what is missing
    plain = pool.without_mirror()
    if plain:
        yield Finding(
            f'images of pool {pool.name}',
            ADVICE,
            f'{len(plain)} have no mirror of their metadata: {names.some(plain)}',
            (
                'an earlier version made them: damage there is found late and not put right, and '
                "their data has no checksums. While nobody uses one: 'pcow-img check', then "
                "'pcow-img amend -o mirror=on' (of a template after 'chattr -i')"
            ),
        )
    unreadable = [item.name for item in items if item.summary is None]
    if unreadable:
        yield Finding(
            f'images of pool {pool.name}',
            ADVICE,
            f'{len(unreadable)} cannot be read: {names.some(unreadable)}',
            (
                'what they stood on is kept, and all of the pool where nobody knows that; they are '
                "damaged, or a guest has broken out of its QEMU: 'pcowctl image check' says more, "
                "'pcowctl image delete --force' deletes one"
            ),
        )
    for item in items:
        if (
            item.summary
            and not item.summary.sealed
            and 0 < (limit or 0) < item.summary.virtual_size
        ):
            yield Finding(
                f'images of pool {pool.name}',
                ADVICE,
                (
                    f'{item.name} has {units.format_size(item.summary.virtual_size)}, more than '
                    f'the pool can promise to all ({units.format_size(limit or 0)})'
                ),
                (
                    'new images are refused for that. Compare it with the flavor or the volume: a '
                    "guest that has broken out of its QEMU can write another size; 'pcowctl image "
                    "resize --shrink' cuts it off"
                ),
            )
    by_uuid: dict[str, list[str]] = collections.defaultdict(list)
    for item in items:
        if item.summary is not None:
            by_uuid[item.summary.uuid].append(item.name)
    for uuid, same in by_uuid.items():
        if same[1:]:
            more = ', ...' if same[5:] else ''
            yield Finding(
                f'images of pool {pool.name}',
                ADVICE,
                f'{len(same)} have the UUID {uuid}: {", ".join(same[:5])}{more}',
                (
                    'one is a copy of a file, or a guest has broken out of its QEMU and forged the '
                    "UUID: see which 'pcowctl image list' and the services know, and delete the "
                    'other'
                ),
            )


def _check_libvirt() -> Iterator[Finding]:
    try:
        with libvirt_host.connect() as connection:
            number = connection.getLibVersion()
            version = f'{number // 1000000}.{number // 1000 % 1000}.{number % 1000}'
    except exception.LibvirtFailed as e:
        yield Finding(
            'libvirt',
            ADVICE,
            str(e),
            'domains cannot be controlled: start libvirtd, or set [pcow] libvirt_uri',
        )
        return
    if _version(version) >= MIN_LIBVIRT:
        yield Finding('libvirt', OK, f'{version} ({conf.CONF.pcow.libvirt_uri})')
    else:
        yield Finding('libvirt', ADVICE, version, 'use libvirt 9.0 or later')


def _check_hook() -> Iterator[Finding]:
    check, install = 'libvirt hook', 'etc/libvirt/hooks/qemu.d/pcow there with mode 0755'
    if not os.access(HOOK, os.X_OK):
        yield Finding(
            check,
            ADVICE,
            f'{HOOK} is not there or not executable',
            (
                "QEMU's user cannot read the bases of images unless file permissions allow it: "
                f'install {install}, and pcow-img in /usr/local/bin (or set [pcow] pcow_img in '
                '/etc/pcow/pcow.conf), and restart libvirtd'
            ),
        )
        return
    text = _read(HOOK) or ''
    lacks = [what for word, what in _OF_THE_HOOK.items() if word not in text]
    if lacks:
        yield Finding(
            check, ADVICE, f'{HOOK} is of an earlier version', f'{lacks[0]}: install {install}'
        )
    else:
        yield Finding(check, OK, HOOK)


def _check_links_to_pools() -> Iterator[Finding]:
    """A domain names images by the path of their pool, which the hook goes step by step."""
    try:
        entries = registry.PoolRegistry().list()
    except exception.PcowError:
        return  # the check of the pools says so
    for entry in entries:
        found = _link_of_somebody(entry.path)
        if found is None:
            continue
        link, owner = found
        yield Finding(
            f'pool {entry.name}',
            ADVICE,
            f'{link} on the way to {entry.path} is a link of user {owner}',
            (
                "the libvirt hook follows links of root alone, and domains on images of the pool "
                f"do not start: let root make the link ('chown -h root {link}') where only root "
                'may write to the directory that it is in, or name the pool without it'
            ),
        )


def _link_of_somebody(path: str) -> tuple[str, int] | None:
    """A link that the hook does not follow, and its owner; None: there is none, as far as this user
    can go.
    """
    place, links, steps = '/', 0, path.split('/')[::-1]
    while steps:
        here = os.path.normpath(os.path.join(place, steps.pop()))
        try:
            status = os.lstat(here)
            if stat.S_ISLNK(status.st_mode):
                links += 1
                if status.st_uid != 0 or links > _MOST_LINKS:
                    return here, status.st_uid
                steps += os.readlink(here).split('/')[::-1]
                if steps[-1] == '':  # it begins with a slash
                    place = '/'
                continue
        except OSError:
            return None
        place = here
    return None


def _qemu_img_of(pid: str) -> str | None:
    """The qemu-img that a process finds in its PATH; '' if it has no PATH, None if that cannot be
    told.
    """
    try:
        with open(f'/proc/{pid}/environ', 'rb') as f:
            variables = dict(item.partition(b'=')[::2] for item in f.read().split(b'\0'))
    except OSError:
        return None
    return (
        shutil.which('qemu-img', path=os.fsdecode(variables.get(b'PATH', os.defpath.encode())))
        or ''
    )


def _check_snapshots_while_off() -> Iterator[Finding]:
    """libvirt runs qemu-img on the disks of a domain that is off, and nothing on its NVDIMMs and
    virtio-pmem devices.
    """
    for pid in filter(str.isdigit, os.listdir('/proc')):
        if (_read(f'/proc/{pid}/comm') or '') in ('libvirtd', 'virtqemud'):
            yield _snapshots_while_off(pid, _qemu_img_of(pid))


# What earlier versions of the hook cannot do, by a word that is in later ones.
_OF_THE_HOOK = {
    '{urn:pcow:domain}ram': 'guest RAM would be on no image (pcowctl domain-xml --ram)',
    'urn:pcow:domain-disks': 'no image would be served as a disk (pcowctl domain-xml --bus virtio)',
    'directory_of': 'it opens to a guest what a link of a service leads to',
    'trusted.pcow.ram': 'it tells the RAM of a guest by an ACL entry, which another image may have',
    'tell-damage': 'a domain that starts is not told that what it stands on is damaged',
}
# What earlier versions of etc/libvirt/bin/qemu-img left out, by a word that is in later ones.
_LEFT_OUT = {
    'virtio-pmem': 'that are virtio-pmem devices',
    'STORAGE_POOLS': 'of domains whose disks are volumes of storage pools',
}


def _snapshots_while_off(pid: str, found: str | None) -> Finding:
    """:param found: the qemu-img that libvirt, process ``pid``, runs"""
    check, program = 'snapshots while off', (_read(found) or '') if found else ''
    if 'pcow' not in program[:200]:
        return Finding(
            check,
            ADVICE,
            f'libvirt (process {pid}) finds {found or "no qemu-img that this user can see"}',
            (
                'virsh snapshot-create on a domain that is off would leave its pcow images out: '
                'install '
                'etc/libvirt/bin/qemu-img and etc/libvirt/libvirtd.service.d/pcow.conf, and '
                'restart libvirt'
            ),
        )
    for word, left_out in _LEFT_OUT.items():
        if word not in program:
            return Finding(
                check,
                ADVICE,
                f'{found} is of an earlier version',
                (
                    f'virsh snapshot-create on a domain that is off would leave out images '
                    f'{left_out}: install '
                    'etc/libvirt/bin/qemu-img again'
                ),
            )
    return Finding(check, OK, str(found))


def _check_apparmor() -> Iterator[Finding]:
    if separation.qemu_setting('security_driver') == 'none':
        yield Finding(
            'AppArmor',
            ADVICE,
            f'{separation.QEMU_CONF} has security_driver = "none"',
            'a guest that breaks out of QEMU reaches the images of all others: take that line away',
        )
    elif _read(APPARMOR_ENABLED) != 'Y' or not os.path.isdir(APPARMOR_PROFILES):
        if os.path.isdir(SELINUX_ENABLED):
            yield Finding('AppArmor', OK, 'SELinux is in its place')
            return
        yield Finding(
            'AppArmor',
            ADVICE,
            'libvirt does not use it here',
            (
                'a guest that breaks out of QEMU reaches the images of all others: enable it where '
                'guests of several tenants run'
            ),
        )
    else:
        yield from (_apparmor_rules(*item) for item in _CONFINED.items())


# What libvirt's profiles forbid, by the file of additions to each.
_CONFINED = {
    'abstractions/libvirt-qemu': 'QEMU cannot open /dev/userfaultfd',
    'usr.sbin.libvirtd': 'libvirtd can run neither the hook, so that QEMU cannot open bases, nor '
    'etc/libvirt/bin/qemu-img',
}


_OF_EARLIER_VERSIONS: tuple[tuple[Callable[[str], bool], str], ...] = (
    (lambda text: '/*.pcow rw' in text, 'every guest may read and write every image of this host'),
    (
        lambda text: 'pcow/libvirt/qemu-img' in text and 'hooks/qemu.d/pcow' not in text,
        'libvirtd may not run the hook as it has to be, so that guests do not start',
    ),
)


def _apparmor_rules(name: str, otherwise: str) -> Finding:
    path = os.path.join(APPARMOR_LOCAL, name)
    text = _read(path) or ''
    for rule, advice in _OF_EARLIER_VERSIONS:
        if rule(text):
            return Finding(
                'AppArmor',
                ADVICE,
                f'{path} is of an earlier version',
                (f'{advice}: put etc/apparmor.d/local/{name}-pcow in its place'),
            )
    if 'pcow' in text:
        return Finding('AppArmor', OK, path)
    advice = f'{otherwise}: append etc/apparmor.d/local/{name}-pcow to it'
    return Finding('AppArmor', ADVICE, f'{path} does not mention pcow', advice)


def _check_kvm() -> Iterator[Finding]:
    if os.access('/dev/kvm', os.R_OK | os.W_OK):
        yield Finding('KVM', OK, '/dev/kvm')
    else:
        yield Finding(
            'KVM',
            ADVICE,
            '/dev/kvm cannot be used by this user',
            (
                "guests run in emulation (domain type 'qemu'), slowly: enable virtualisation, join "
                "group kvm"
            ),
        )


_CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _check_pcow_img,
    _check_qemu_img,
    _check_emulator,
    _check_kernel,
    _check_kvm,
    _check_userfaultfd,
    _check_map_count,
    _check_state,
    separation.check_directories,
    diagnosis.check_kernel_config,
    diagnosis.check_regions,
    _check_pools,
    _check_libvirt,
    _check_hook,
    _check_links_to_pools,
    _check_snapshots_while_off,
    _check_apparmor,
    separation.check_qemu_group,
    separation.check_disk_units,
)
