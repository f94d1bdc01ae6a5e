# SPDX-License-Identifier: Apache-2.0
"""A private libvirtd, unmodified virsh, and a guest that checks its own memory
(guest/memory-check.c).
"""

import atexit
from collections.abc import Callable
import contextlib
import dataclasses
import hashlib
import json
import os
from pathlib import Path
import re
import shutil
import subprocess
import time
from typing import Any
import unittest
import xml.etree.ElementTree as ET

from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.virt import domain_xml
from pcow_driver.virt import libvirt_xml
from tests.functional import images
from tools.lib.quickstart import apt
from tools.lib.quickstart import cpio
from tools.lib.quickstart import guest
from tools.lib.quickstart import libvirtd
from tools.lib.quickstart import state
from tools.lib.quickstart import teardown
from tools.lib.quickstart import workplace

GUEST = Path(__file__).parent / 'guest'
HOOK = images.TOP / 'etc/libvirt/hooks/qemu.d/pcow'
MODULES = (
    *('nfit', 'nd_pmem', 'virtio_pmem', 'ext4'),
    *('virtio_pci', 'virtio_console', 'virtio_net'),
)
MEMORY = 160 * units.MIB
PMEM = 64 * units.MIB
SMALL = 8 * units.MIB
FILE_SYSTEM = 2 * units.MIB  # where it begins, behind the info block
BOOT_SECONDS = 180
ANSWER_SECONDS = 60
TIMEOUT = 300

REPORT = re.compile(rb'check: (?:gen=(\d+) mark=(\S+) ok|(BROKEN [^\r\n]*)|(booted \S+))\r?\n')


def run(*words: object) -> str:
    """What a program prints; it must succeed."""
    done = subprocess.run(
        [*map(str, words)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    if done.returncode:
        raise AssertionError(f'{words}: {done.stdout}{done.stderr}')
    return done.stdout


def try_virsh(uri: str, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ('virsh', '-q', '-c', uri, *map(str, words)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env=os.environ | {'LC_ALL': 'C'},
        check=False,
    )


def _unmount(path: Path) -> None:
    if os.path.ismount(path):
        run('umount', '-l', path)


def _qemu_ga(cache: guest.Cache) -> dict[str, Path]:
    """The guest agent of the distribution with the libraries of this machine that it needs, as
    paths in an initramfs.
    """
    name = 'qemu-guest-agent'
    (version,) = re.findall(
        r'^Version: (.*)$', run('apt-cache', 'show', '--no-all-versions', name), re.MULTILINE
    )

    def make(part: Path) -> None:
        download = part.with_name('download')
        download.mkdir()
        run('dpkg-deb', '-x', apt.download(name, version, download), part)

    program = (
        cache.get(f'{name}-{hashlib.sha256(version.encode()).hexdigest()[:16]}', make)
        / 'usr/sbin/qemu-ga'
    )
    libraries = re.findall(r'(/\S+) \(0x', run('ldd', program))
    return {'usr/sbin/qemu-ga': program} | {
        path.lstrip('/'): Path(path).resolve() for path in libraries
    }


class Host:
    """A run of the quickstart's libvirtd, a pool on tmpfs, the parts of the guest. close() leaves
    nothing.

    :param pool_size: bytes, of a pool that can be filled
    """

    def __init__(self, pool_size: int | None = None) -> None:
        teardown.reap()
        # by a test that was killed: what reap() could not delete
        for left in (*state.ROOT.glob('*/small'), *state.ROOT.glob('*/full')):
            if not (left.parent / 'state.json').exists():
                _unmount(left)
                teardown.delete(left.parent)
        self.run = state.Run.create()
        self.daemon = libvirtd.Libvirtd(self.run.directory)
        self.place = workplace.Workplace(self.run, self.daemon.uri)
        self.directory = self.run.directory
        self.small = self.directory / 'small'  # a file system with little space
        self.full = self.directory / 'full'
        self._pool_size = pool_size
        self.transcript: list[str] | None = None

    def start(self, *launcher: str) -> None:
        """:param launcher: what gives libvirtd a mount namespace; default: a new one"""
        hooks = self.directory / 'etc/hooks/qemu.d'
        hooks.mkdir(parents=True)
        shutil.copy(HOOK, hooks / 'pcow')
        # what libvirtd shall see must be mounted before it starts: its mounts are its own
        self.small.mkdir()
        run('mount', '-t', 'tmpfs', '-o', f'size={SMALL}', 'pcow-test', self.small)
        self.place.make_pool(self._own_pool())
        self._make_guest()
        self._make_data()
        self.daemon.start(**({'launcher': launcher} if launcher else {}))

    def _own_pool(self) -> Path | None:
        if self._pool_size is None:
            return None
        self.full.mkdir()
        run('mount', '-t', 'tmpfs', '-o', f'size={self._pool_size}', 'pcow-test', self.full)
        return self.full

    def close(self) -> None:
        """May be called twice."""
        _unmount(self.small)
        _unmount(self.full)
        teardown.tear_down(self.run)

    def _make_guest(self) -> None:
        cache = guest.Cache(self.run)
        self.kernel, files = guest.prepare_kernel(cache, MODULES)
        program = self.directory / 'memory-check'
        run('cc', '-static', '-O2', '-o', program, GUEST / 'memory-check.c')
        files |= {
            'init': GUEST / 'init',
            'pcow/busybox': Path('/bin/busybox'),
            'pcow/memory-check': program,
            'etc/qemu/pcow-hook': GUEST / 'pcow-hook',
        }
        files |= _qemu_ga(cache)
        self.initrd = self.directory / 'initrd'
        self.initrd.write_bytes(cpio.archive(files))

    def _make_data(self) -> None:
        """A sealed base with an empty file system for the guest."""
        raw = self.directory / 'data.qcow2'
        plain = self.directory / 'data.raw'
        run(
            '/sbin/mkfs.ext4',
            '-q',
            '-b',
            '4096',
            '-m',
            '0',
            '-E',
            'lazy_itable_init=0',
            plain,
            f'{PMEM // units.MIB - 8}M',
        )
        run('qemu-img', 'convert', '-f', 'raw', '-O', 'qcow2', plain, raw)
        self.base = self.place.image_path('base')
        self.place.pcowctl(
            'template',
            'build',
            '--source-format',
            'qcow2',
            str(raw),
            self.place.reference(self.base),
        )
        plain.unlink()

    def virsh(self, *words: object) -> str:
        """What virsh prints; it must succeed."""
        result = self.try_virsh(*words)
        if result.returncode:
            raise AssertionError(f'virsh {" ".join(map(str, words))}: {result.stderr.strip()}')
        return result.stdout

    def virsh_fails(self, *words: object) -> str:
        """What virsh says; it must fail."""
        result = self.try_virsh(*words)
        if not result.returncode:
            raise AssertionError(
                f'virsh {" ".join(map(str, words))} succeeded: {result.stdout.strip()}'
            )
        return result.stderr.strip()

    def try_virsh(self, *words: object) -> subprocess.CompletedProcess[str]:
        done = try_virsh(self.daemon.uri, *words)
        if self.transcript is not None:
            self.transcript += [
                f'$ virsh {" ".join(map(str, words))}',
                *(done.stdout + done.stderr).rstrip().splitlines(),
            ]
        return done


class HostTestCase(unittest.TestCase):
    """One host for all tests of a class."""

    host: Host
    pool_size: int | None = None

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.host = Host(cls.pool_size)
        cls.addClassCleanup(cls.host.close)
        atexit.register(cls.host.close)  # an interrupted run does not get to class cleanups
        cls.host.start()


def tree(snapshots: list[dict[str, Any]]) -> dict[str, str]:
    """Name of each snapshot's parent, '' for a root, from what pcow-img or query-pcow says."""
    names = {snapshot['id']: snapshot['name'] for snapshot in snapshots}
    return {snapshot['name']: names.get(snapshot.get('parent-id'), '') for snapshot in snapshots}


@dataclasses.dataclass(frozen=True)
class Report:
    """A line of the guest: that it booted, or that its memories agree."""

    generation: int
    mark: str
    booted: str


class Guest:
    """A domain with one pcow NVDIMM, or virtio-pmem, and, unless without, a qcow2 disk of 1 MiB
    that takes the VM states; its RAM may be an image as well.
    """

    def __init__(
        self,
        host: Host,
        name: str,
        *,
        carrier: bool = True,
        agent: bool = False,
        carrier_directory: Path | None = None,
        ram: bool = False,
        bridge: str | None = None,
        address: str = '',
        model: str = libvirt_xml.MODELS[0],
    ) -> None:
        """:param bridge: of the host, on which its network is
        :param address: its own there, with the length of the prefix; it echoes what comes to port 7
        :param model: of the device that its memory is
        """
        self.host, self._model = host, model
        self._bridge, self._address = bridge, address
        self.name = f'{host.run.domain_name}-{name}'
        self.image = host.place.image_path(name)
        self.carrier = (carrier_directory or host.directory) / f'{name}.qcow2' if carrier else None
        self.log = host.directory / f'{name}.console'
        self._seen = 0
        image.create_overlay(str(self.image), str(host.base))
        self.ram = host.place.image_path(f'{name}-ram') if ram else None
        if self.ram is not None:
            image.create(str(self.ram), MEMORY)
        if self.carrier is not None:
            run('qemu-img', 'create', '-q', '-f', 'qcow2', self.carrier, '1M')
        self._define(agent)

    def _define(self, agent: bool) -> None:
        size = image.info(str(self.image)).virtual_size
        spec = domain_xml.Domain(
            name=self.name,
            memory=MEMORY,
            nvdimms=[libvirt_xml.Nvdimm(path=str(self.image), size=size, model=self._model)],
            kernel=str(self.host.kernel),
            initrd=str(self.host.initrd),
            cmdline=f'console=ttyS0 quiet panic=-1 pcow.address={self._address}',
            emulator=images.program('qemu-system-x86_64'),
            carrier_disk=str(self.carrier) if self.carrier else None,
            ram=str(self.ram) if self.ram else None,
        )
        element = spec.to_element()
        serial, devices = element.find('devices/serial'), element.find('devices')
        assert serial is not None and devices is not None
        ET.SubElement(serial, 'log', file=str(self.log), append='on')
        if agent:
            channel = ET.SubElement(devices, 'channel', type='unix')
            ET.SubElement(channel, 'target', type='virtio', name='org.qemu.guest_agent.0')
        if self._bridge is not None:
            interface = ET.SubElement(devices, 'interface', type='bridge')
            ET.SubElement(interface, 'source', bridge=self._bridge)
            ET.SubElement(interface, 'model', type='virtio')
        path = self.host.directory / f'{self.name}.xml'
        path.write_text(libvirt_xml.to_string(element))
        self.host.virsh('define', path)

    # ---- what the guest says

    def reports(self) -> list[Report]:
        """What it has said since the last call."""
        text = self.log.read_bytes()[self._seen :] if self.log.exists() else b''
        text = text[: text.rfind(b'\n') + 1]
        self._seen += len(text)
        found = []
        for generation, mark, broken, booted in REPORT.findall(text):
            if broken:
                raise AssertionError(f'the guest found: {broken.decode(errors="replace")}')
            found.append(Report(int(generation or 0), mark.decode(), booted.decode()))
        return found

    def next_report(self, seconds: float = ANSWER_SECONDS) -> Report:
        """The first thing that it says from now on."""
        self.reports()
        return self._wait(lambda report: True, seconds)

    def _wait(
        self, accept: Callable[[Report], bool], seconds: float, terminal: int | None = None
    ) -> Report:
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            if terminal is not None:
                with contextlib.suppress(BlockingIOError):
                    os.read(terminal, 65536)
            for report in self.reports():
                if accept(report):
                    return report
            time.sleep(0.02)
        tail = self.log.read_bytes()[-500:].decode(errors='replace') if self.log.exists() else ''
        raise AssertionError(
            f'{self.name} said nothing that was waited for within {seconds} s: {tail}'
        )

    def start(self) -> None:
        self.host.virsh('start', self.name)
        self._wait(lambda report: bool(report.booted), BOOT_SECONDS)
        self._wait(lambda report: not report.booted, ANSWER_SECONDS)

    def mark(self, word: str) -> Report:
        """Have it store a word in RAM and on persistent memory; returns its first report
        with that.
        """
        element = ET.fromstring(self.host.virsh('dumpxml', self.name)).find('devices/serial/source')
        assert element is not None
        terminal = os.open(element.get('path', ''), os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            os.write(terminal, f'mark {word}\n'.encode())
            # QEMU takes what was typed while the terminal is open, and a full terminal would stop
            # the guest: read it empty
            return self._wait(lambda report: report.mark == word, ANSWER_SECONDS, terminal)
        finally:
            os.close(terminal)

    # ---- what is known of its snapshots

    def remove(self) -> None:
        """Take it away with all of its snapshots."""
        if self.state() != 'shut off':
            self.host.virsh('destroy', self.name)
        self.host.virsh('undefine', self.name, '--snapshots-metadata')

    def state(self) -> str:
        return self.host.virsh('domstate', self.name).strip()

    def virsh_snapshots(self) -> set[str]:
        return set(self.host.virsh('snapshot-list', self.name, '--name').split())

    def virsh_tree(self) -> dict[str, str]:
        """Parent of each snapshot, '' for a root, as libvirt has it."""
        tree = {}
        for name in self.virsh_snapshots():
            text = self.host.virsh('snapshot-info', self.name, name)
            (parent,) = re.findall(r'^Parent: *(\S*)', text, re.MULTILINE)
            tree[name] = parent.replace('-', '')
        return tree

    def image_snapshots(self) -> list[dict[str, Any]]:
        """As pcow-img has them."""
        words = ('snapshot', '-l', '-U', '--output=json', self.image)
        return list(json.loads(run(images.program('pcow-img'), *words)))

    def image_tree(self) -> dict[str, str]:
        return tree(self.image_snapshots())

    def carrier_snapshots(self) -> set[str]:
        words = ('info', '-U', '--output=json', self.carrier)
        return {
            snapshot['name']
            for snapshot in json.loads(run('qemu-img', *words)).get('snapshots', ())
        }

    def known(self) -> tuple[object, ...]:
        """What libvirt, the image and the disk say."""
        return (
            self.virsh_snapshots(),
            self.image_tree(),
            self.carrier_snapshots() if self.carrier else None,
        )

    def qmp(self, command: str, **arguments: Any) -> Any:
        request = json.dumps({'execute': command, 'arguments': arguments})
        reply = json.loads(self.host.virsh('qemu-monitor-command', self.name, request))
        if 'error' in reply:
            raise AssertionError(f'{command}: {reply["error"]["desc"]}')
        return reply['return']

    def pid(self) -> int:
        """Of its QEMU."""
        return int((self.host.directory / 'run' / 'qemu' / f'{self.name}.pid').read_text())
