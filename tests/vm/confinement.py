# SPDX-License-Identifier: Apache-2.0
"""What a QEMU may open that a guest has broken out of, on a kernel that has AppArmor.

libvirtd, the hook, the rules and nbdkit are as they are installed.  A process takes the profile and
the user of a domain and tries every image and every socket of the host.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import grp
import json
import os
from pathlib import Path
import pwd
import re
import shutil
import socket
import subprocess
import time
from typing import Any
import uuid
import xml.etree.ElementTree as ET

from pcow_driver.export import nbd
from pcow_driver.virt import domain_xml
from pcow_driver.virt import libvirt_xml
from tests.vm import disk_unit
from tests.vm import machine

# What tests/vm/contents.py puts where.
HOOK = 'etc/libvirt/hooks/qemu.d/pcow'
HOOK_TARGET = '/etc/libvirt/hooks/qemu.d/pcow'
RULES = {
    f'etc/apparmor.d/local/{name}-pcow': f'/etc/apparmor.d/local/{name}'
    for name in ('usr.sbin.libvirtd', 'abstractions/libvirt-qemu')
}
PLUGIN = '/usr/lib/x86_64-linux-gnu/nbdkit/plugins/nbdkit-pcow-plugin.so'

_EMULATOR = '/usr/local/bin/qemu-system-x86_64'
_PCOW_IMG = '/usr/local/bin/pcow-img'
_POOL, _DISKS = Path('/var/lib/pcow/pools/fast'), Path('/var/lib/pcow/disks')
_SETTINGS = Path('/etc/pcow/pcow.conf')
_STATE = Path('/var/lib/pcow/state')
# What services keep beside the images, with the modes that they give it.
_KEPT = {
    _POOL / '.web.pcow.part': 0o640,  # being made
    _POOL / 'one.pcow.rescue': 0o600,  # by a repair
    _POOL / '.pcow-pool': 0o644,
    _STATE / 'lists' / 'pool': 0o600,  # what is remembered of images
    _STATE / 'locks' / 'pool': 0o660,
}
_OURS = tuple(
    map(Path, ('/var/lib/pcow', '/etc/pcow', '/etc/libvirt', '/var/lib/libvirt', '/run/libvirt'))
)
_SOCKETS = ('/run', '/var', '/tmp')
_PROFILES = Path('/etc/apparmor.d/libvirt')
_QEMU_USER, _QEMU_GROUP, _SERVICE = 'libvirt-qemu', 'kvm', 'daemon'
_MIB = 1 << 20
_SIZE = 16 * _MIB
_RAM = 64 * _MIB
_SECONDS = 300.0
_START_SECONDS = 100.0
_TAIL = 3000
_QEMU_CONF = f"""\
security_driver = "apparmor"
user = "{_QEMU_USER}"
group = "{_QEMU_GROUP}"
stdio_handler = "file"
cgroup_controllers = []
namespaces = []
"""
_LIBVIRTD_CONF = """\
log_outputs = "3:file:/var/log/libvirtd.log"
unix_sock_group = "libvirt"
unix_sock_rw_perms = "0770"
unix_sock_ro_perms = "0770"
"""
_MONITOR = 'monitor.sock'
_DIRECTORIES = (
    '/var/lib/libvirt/qemu',
    '/var/cache/libvirt/qemu',
    '/var/log/libvirt/qemu',
    '/run/libvirt',
    '/etc/libvirt/qemu',
)
_PATH = '/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin'


def _run(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*map(str, words)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors='replace',
        timeout=_SECONDS,
        check=False,
        env={'PATH': _PATH, 'LC_ALL': 'C'},
        **options,
    )


def _must(*words: object) -> str:
    done = _run(*words)
    if done.returncode:
        raise machine.Failure(f'{" ".join(map(str, words))}: {done.stdout}{done.stderr}{_log()}')
    return done.stdout


def _log() -> str:
    """What libvirtd and AppArmor said last."""
    path = Path('/var/log/libvirtd.log')
    kernel = _run('/suite/busybox', 'dmesg').stdout.splitlines()
    said = path.read_text(errors='replace')[-_TAIL:] if path.exists() else ''
    return '\n'.join((said, *[line for line in kernel if 'DENIED' in line][-10:]))


def _expect(condition: object, what: object) -> None:
    if not condition:
        raise machine.Failure(str(what))


def _virsh(*words: object) -> subprocess.CompletedProcess[str]:
    return _run('virsh', '-q', '-c', 'qemu:///system', *words)


@contextlib.contextmanager
def _libvirtd() -> Iterator[None]:
    """As a host starts it: confined by the profile that comes with it."""
    Path('/etc/libvirt/qemu.conf').write_text(_QEMU_CONF)
    with open('/etc/libvirt/libvirtd.conf', 'a') as file:
        file.write(_LIBVIRTD_CONF)
    for name in _DIRECTORIES:
        Path(name).mkdir(parents=True, exist_ok=True)
    shutil.chown('/var/lib/libvirt/qemu', _QEMU_USER, _QEMU_GROUP)
    process = subprocess.Popen(
        ['/usr/sbin/libvirtd'], stdin=subprocess.DEVNULL, env={'PATH': _PATH}
    )
    try:
        limit = time.monotonic() + _START_SECONDS
        while (answer := _virsh('list')).returncode:
            _expect(
                process.poll() is None and time.monotonic() < limit,
                f'libvirtd does not start ({process.poll()}): {answer.stderr}{_log()}',
            )
            time.sleep(0.5)
        label = Path(f'/proc/{process.pid}/attr/apparmor/current').read_text().strip()
        _expect(label == 'libvirtd (enforce)', f'libvirtd is confined by {label}')
        yield
    finally:
        process.terminate()
        process.wait()


# ---- who tries what ------------------------------------------------------------------------------


def _become(profile: str | None, user: str) -> None:
    if profile:
        with open('/proc/self/attr/apparmor/current', 'w') as file:
            file.write(f'changeprofile {profile}')
    entry = pwd.getpwnam(user)
    if entry.pw_uid:
        os.setgroups(os.getgrouplist(user, entry.pw_gid))
        group = grp.getgrnam(_QEMU_GROUP).gr_gid if user == _QEMU_USER else entry.pw_gid
        os.setresgid(group, group, group)
        os.setresuid(entry.pw_uid, entry.pw_uid, entry.pw_uid)


def _opened(path: Path) -> str:
    """What a process gets: 'rw', 'r', or '-'."""
    for flags, got in ((os.O_RDWR, 'rw'), (os.O_RDONLY, 'r')):
        try:
            os.close(os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC))
        except IsADirectoryError:
            continue
        except OSError:
            continue
        return got
    return '-'


def _connected(path: Path) -> str:
    """'rw': who listens talks to it, or would."""
    if path.name == _MONITOR:  # QEMU talks to libvirt: others wait, and block
        return 'rw' if os.access(path, os.W_OK) else '-'
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        try:
            connection.connect(str(path))
            # nbdkit greets, or hangs up; QEMU and libvirt wait for the client
            waits = path.parent.parent != _DISKS
            return 'rw' if waits or connection.recv(8) == b'NBDMAGIC' else '-'
        except OSError:
            return '-'


def _tried(profile: str | None, user: str, paths: list[Path]) -> list[str]:
    """What a process with this profile and user gets of each."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            is_socket = [path.is_socket() for path in paths]
            _become(profile, user)
            found = [
                (_connected if socket_ else _opened)(path)
                for path, socket_ in zip(paths, is_socket, strict=True)
            ]
            os.write(writing, json.dumps(found).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, 'rb') as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    _expect(answer, f'who tried it as {profile} and {user} said nothing')
    result: list[str] = json.loads(answer)
    return result


def _verdict(got: str, without_profile: str, without_mode: str, is_disk: bool) -> str:
    """What a process gets, or who refuses the rest: file modes, or AppArmor."""
    if got == 'rw':
        return 'rw'
    if is_disk:
        return 'nbdkit'
    by = [
        name
        for name, other in (('AppArmor', without_profile), ('mode', without_mode))
        if len(other.strip('-')) > len(got.strip('-'))
    ]
    refused = '+'.join(by) or 'AppArmor+mode'
    return f'r, {refused}' if got == 'r' else refused


# ---- the host ------------------------------------------------------------------------------------


class Guest:
    """A domain with an image on a base, RAM that is an image, and a volume that nbdkit serves."""

    def __init__(self, name: str) -> None:
        self.name, self.uuid = name, str(uuid.uuid4())
        self.profile = f'libvirt-{self.uuid}'
        self.image, self.base, self.volume = (
            _POOL / f'{name}{suffix}.pcow' for suffix in ('', '-base', '-volume')
        )
        self.ram = _POOL / f'{name}-ram.pcow'
        self.directory = _DISKS / name
        self.socket = self.directory / 'socket'

        self.more, self.more_base = (
            _POOL / f'{name}-more{suffix}.pcow' for suffix in ('', '-base')
        )

    def allowed(self, path: Path) -> str:
        """What its QEMU is to get."""
        if path in (self.image, self.ram, self.more, self.socket):
            return 'rw'
        return 'r' if path in (self.base, self.more_base) else '-'

    def make(self) -> None:
        for path in (self.base, self.volume):
            _create(path)
        _create(self.ram, size=_RAM)
        _create(self.image, self.base)
        nbd.start(str(self.directory), str(self.volume), peer=self.profile)
        for path, mode in ((self.socket, 0o660), (self.directory, 0o710)):
            shutil.chown(path, group=_QEMU_GROUP)
            path.chmod(mode)

    def define(self) -> None:
        nvdimm = libvirt_xml.Nvdimm(path=str(self.image), size=_SIZE)
        spec = domain_xml.Domain(
            name=self.name,
            uuid=self.uuid,
            memory=_RAM,
            ram=str(self.ram),
            kernel='/none',
            emulator=_EMULATOR,
            volatile=True,
            nvdimms=[nvdimm],
        )
        element = spec.to_element()
        boot = element.find('os')
        assert boot is not None
        for part in [item for item in boot if item.tag in ('kernel', 'cmdline')]:
            boot.remove(part)
        devices = element.find('devices')
        assert devices is not None
        disk = ET.SubElement(devices, 'disk', type='network', device='disk')
        ET.SubElement(disk, 'driver', name='qemu', type='raw')
        source = ET.SubElement(disk, 'source', protocol='nbd')
        ET.SubElement(source, 'host', transport='unix', socket=str(self.socket))
        ET.SubElement(disk, 'target', dev='vda', bus='virtio')
        path = Path(f'/tmp/{self.name}.xml')
        path.write_text(ET.tostring(element, encoding='unicode'))
        _must('virsh', '-q', '-c', 'qemu:///system', 'define', path)

    def start(self) -> None:
        _must('virsh', '-q', '-c', 'qemu:///system', 'start', '--paused', self.name)


def _create(path: Path, base: Path | None = None, size: int = _SIZE) -> None:
    """Of a service, with the mode that images have."""
    what = ('-b', base, '-F', 'pcow', path) if base else (path, f'{size // _MIB}M')
    _must(_PCOW_IMG, 'create', '-f', 'pcow', *what)
    path.chmod(0o640)
    shutil.chown(path, _SERVICE, _SERVICE)


def _prepare() -> None:
    os.environ['PATH'] = _PATH
    for path in (_POOL, _DISKS):
        path.mkdir(parents=True)
    _must('mount', '-t', 'tmpfs', 'tmpfs', _POOL)
    # as pool create --owner leaves it: QEMU passes, and finds what it was told the name of
    shutil.chown(_POOL, _SERVICE, _QEMU_GROUP)
    _POOL.chmod(0o710)
    for path, mode in _KEPT.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.chown(path.parent, _SERVICE)
        path.touch()
        path.chmod(mode)
        shutil.chown(path, _SERVICE, _SERVICE)
    _SETTINGS.parent.mkdir()
    _SETTINGS.touch(0o640)
    _DISKS.chmod(0o711)
    for name in ('usr.sbin.libvirtd', 'usr.lib.libvirt.virt-aa-helper'):
        _must('apparmor_parser', '-r', f'/etc/apparmor.d/{name}')


def _plug(guest: Guest, path: Path) -> subprocess.CompletedProcess[str]:
    device = Path(f'/tmp/{path.stem}.xml')
    element = libvirt_xml.Nvdimm(path=str(path), size=_SIZE).to_element()
    device.write_text(ET.tostring(element, encoding='unicode'))
    return _virsh('attach-device', guest.name, device, '--live')


def _matrix(guests: list[Guest]) -> list[str]:
    """Lines of a table: who gets what, and who refuses the rest.

    :raises Failure: a QEMU gets more than its own
    """
    files = [*sorted(_POOL.glob('*.pcow')), *sorted(_PROFILES.glob('libvirt-*.pcow'))]
    files += [_SETTINGS, *_KEPT]
    sockets = [
        *(guest.socket for guest in guests),
        *sorted(_POOL.glob('.*.control')),
        *sorted(Path('/var/lib/libvirt/qemu').glob(f'domain-*/{_MONITOR}')),
        Path('/run/libvirt/libvirt-sock'),
    ]
    paths = files + sockets
    who: list[tuple[str, str | None, str]] = [
        (f'QEMU {guest.name}', guest.profile, _QEMU_USER) for guest in guests
    ]
    who += [
        ("QEMU's user", None, _QEMU_USER),
        ('service', None, _SERVICE),
        ('local user', None, 'nobody'),
    ]
    free = _tried(None, 'root', paths)
    rows = [['', *(name for name, _profile, _user in who)]] + [[str(path)] for path in paths]
    wrong: list[str] = []
    for name, profile, user in who:
        got, unconfined, as_root = (
            _tried(*one, paths) for one in ((profile, user), (None, user), (profile, 'root'))
        )
        guest = next((item for item in guests if item.profile == profile), None)
        for number, path in enumerate(paths):
            is_disk = path.parent.parent == _DISKS
            without_profile = unconfined[number] if profile else got[number]
            cell = _verdict(got[number], without_profile, as_root[number], is_disk)
            rows[number + 1].append(cell)
            allowed = guest.allowed(path) if guest else '-'
            if (profile or user == 'nobody') and got[number] != allowed:
                wrong.append(f'{name}: {path}: {got[number]}, expected {allowed}')
    there = [item for path, item in zip(paths, free, strict=True) if path.parent.parent != _DISKS]
    _expect('-' not in there, f'root: {free}')
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ['  '.join(map(str.ljust, row, widths)).rstrip() for row in rows]
    _expect(not wrong, '\n'.join((*wrong, *lines)))
    return lines


def _all_there_is() -> list[Path]:
    """Every file of pcow's and of a domain's, and every socket of the host."""
    found: list[Path] = []
    for top in _OURS:
        found += [path for path in top.rglob('*') if path.is_file() or path.is_socket()]
    for place in _SOCKETS:
        for directory, _directories, files in os.walk(place):
            found += [path for name in files if (path := Path(directory, name)).is_socket()]
    return sorted(set(found))


def _is_known(path: Path, guest: Guest) -> bool:
    """What libvirt has made for this QEMU, or systemd for everybody."""
    own = re.fullmatch(
        rf'/var/lib/libvirt/qemu/(ram/|domain-)\d+-{guest.name}/.+'
        rf'|/run/libvirt/qemu/{guest.name}\.pid',
        str(path),
    )
    return bool(own) or path.is_relative_to('/run/systemd')


def _check_all(guests: list[Guest]) -> int:
    """Nothing that the table does not name lets itself be opened, either.

    :returns: how many files and sockets there are
    """
    paths = _all_there_is()
    for must in (path for guest in guests for path in (guest.image, guest.ram, guest.socket)):
        _expect(must in paths, f'{must} was not found')
    for guest in guests:
        got = zip(paths, _tried(guest.profile, _QEMU_USER, paths), strict=True)
        wrong = [
            f'{path}: {what}'
            for path, what in got
            if what != guest.allowed(path) and not _is_known(path, guest)
        ]
        _expect(not wrong, '\n'.join((f'QEMU {guest.name}, of {len(paths)}:', *wrong)))
    return len(paths)


def domains() -> dict[str, Any]:
    """Two guests, one of which an image is plugged into; what each gets of the host."""
    _prepare()
    one, other = Guest('one'), Guest('other')
    with _libvirtd():
        for guest in (one, other):
            guest.make()
            guest.define()
            guest.start()
        _create(one.more_base)
        _create(one.more, one.more_base)
        refused = _plug(one, one.more)
        _expect(
            refused.returncode and 'Permission denied' in refused.stderr,
            f'without its base: {refused}',
        )
        _must(HOOK_TARGET, '--grant', one.more, one.uuid)
        plugged = _plug(one, one.more)
        _expect(not plugged.returncode, plugged.stderr)
        table = _matrix([one, other])
        tried = _check_all([one, other])
        _check_rule_for_all(one, other)
        _check_end(one, other)
        _check_lies(one, other)
    return {'table': table, 'tried': tried}


def _check_rule_for_all(one: Guest, other: Guest) -> None:
    """What every profile had before: this test would tell."""
    with open(_PROFILES / f'{one.profile}.pcow', 'a') as file:
        file.write(f'  {_POOL.parent}/*/*.pcow rwk,\n')
    _must('apparmor_parser', '-r', _PROFILES / one.profile)
    _expect(
        _tried(one.profile, _QEMU_USER, [other.image]) == ['rw'],
        'the test takes for refused what is not',
    )


def _check_end(one: Guest, other: Guest) -> None:
    """Of a guest."""
    _must('virsh', '-q', '-c', 'qemu:///system', 'destroy', one.name)
    _expect(
        not (_PROFILES / f'{one.profile}.pcow').exists(), 'the rules stay when a guest has ended'
    )
    _expect(
        _tried(None, _QEMU_USER, [one.ram]) == ['-'], "QEMU's user keeps the RAM of a guest's run"
    )
    _expect(
        _tried(other.profile, _QEMU_USER, [other.base, other.ram]) == ['r', 'rw'],
        'the end of one guest changed the other one',
    )


def _check_lies(one: Guest, other: Guest) -> None:
    """Who has broken out writes into his own image that its base is somebody else's."""
    away = other.image.with_name('away.pcow')  # pcow-img looks at what is there
    name = other.image.name
    other.image.rename(away)
    try:
        for base in ('', name):  # nothing is known of the second one
            _must(_PCOW_IMG, 'rebase', '-u', '-f', 'pcow', '-b', base, '-F', 'pcow', one.image)
    finally:
        away.rename(other.image)
    done = _virsh('start', '--paused', one.name)
    _expect(done.returncode, 'a guest on the image of another one was started')
    _expect('nobody has looked at its base' in done.stderr, done.stderr)


ALL: dict[str, Callable[[], dict[str, Any]]] = {
    'confinement-domains': domains,
    'confinement-disk': disk_unit.run,
}
