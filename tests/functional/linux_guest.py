# SPDX-License-Identifier: Apache-2.0
"""A Debian kernel in our QEMU under TCG that runs shell commands from the test, without libvirt."""

from __future__ import annotations

from pathlib import Path
import re
import subprocess
import time
from types import TracebackType
from typing import Any
from typing import Protocol
from typing import Self

from pcow_driver.images import info_block
from pcow_driver.templates import template
from tests.functional import images
from tests.functional import qmp
from tools.lib.quickstart import cpio
from tools.lib.quickstart import guest
from tools.lib.quickstart import state
from tools.lib.quickstart import teardown

MODULES = ('virtio_pci', 'nfit', 'nd_pmem', 'virtio_pmem', 'virtio_blk', 'crc32c_generic', 'ext4')
MEMORY = 192  # MiB
# Intel: a guest of that kind goes on after a machine check that it can recover from
CPU = 'Skylake-Client-v1'
BOOT_SECONDS = 180
COMMAND_SECONDS = 120
_GUEST = Path(__file__).parent / 'guest'
_DONE = re.compile(rb'pcow-done: (\d+)\r?\n')


def make_file_system(directory: Path, tree: Path, image: Path, size: str = '48M') -> int:
    """Make an image whose content a guest can mount with DAX: ext4 with what is in ``tree``.

    Its tables of inodes are written here and not by the guest's kernel some seconds after the
    mount.

    :param directory: for files in between
    :returns: offset of the file system in the image
    """
    plain, disk, namespace = (directory / name for name in ('plain', 'disk.qcow2', 'namespace'))
    subprocess.run(
        [
            'mkfs.ext4',
            '-q',
            '-b',
            '4096',
            '-m',
            '0',
            '-O',
            '^has_journal',
            '-E',
            'lazy_itable_init=0',
            '-d',
            tree,
            plain,
            size,
        ],
        stdout=subprocess.DEVNULL,
        check=True,
    )
    subprocess.run(['qemu-img', 'convert', '-f', 'raw', '-O', 'qcow2', plain, disk], check=True)
    source = template.inspect_source(str(disk), 'qcow2')
    total = template.virtual_size(source.virtual_size, info_block.PageMap.RAM)
    template.write_namespace(str(namespace), source, total, info_block.PageMap.RAM)
    subprocess.run(
        [images.program('pcow-img'), 'convert', '-f', 'raw', '-O', 'pcow', namespace, image],
        check=True,
    )
    for path in (plain, disk, namespace):
        path.unlink()
    return info_block.data_offset(total, info_block.PageMap.RAM)


class Bootable(Protocol):
    """What QEMU loads."""

    kernel: Path
    initrd: Path


class Kernel:
    """Kernel and initramfs; close() leaves nothing but the cache."""

    def __init__(self, *package: str, **programs: Path) -> None:
        """
        :param package: meta package of another kernel than Debian's for clouds, which is built
            without machine checks
        :param programs: what else lies in /pcow of the guest, by name
        """
        teardown.reap()
        self._run = state.Run.create()
        self.initrd = self._run.directory / 'initrd'
        try:
            self.kernel, files = guest.prepare_kernel(guest.Cache(self._run), MODULES, *package)
            files |= {'init': _GUEST / 'command-init', 'pcow/busybox': Path('/bin/busybox')}
            files |= {f'pcow/{name}': path for name, path in programs.items()}
            self.initrd.write_bytes(cpio.archive(files))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        teardown.tear_down(self._run)


class LinuxGuest:
    """Context manager: a booted guest."""

    def __init__(
        self,
        kernel: Bootable,
        directory: Path,
        *arguments: str,
        cpus: int = 1,
        more: str = '',
        memory: int = MEMORY,
        ready: bytes = rb'pcow-ready\r?\n',
        boot_seconds: float = BOOT_SECONDS,
    ) -> None:
        """
        :param more: for the kernel's command line
        :param memory: MiB
        :param ready: what it says in the end of its start, as a pattern
        """
        self._ready = re.compile(ready)
        self._boot_seconds = boot_seconds
        self._sockets = {name: directory / f'{name}.sock' for name in ('qmp', 'serial')}
        self.log = directory / 'qemu.log'
        self._command = [
            images.program('qemu-system-x86_64'),
            '-machine',
            'q35,nvdimm=on',
            '-accel',
            'tcg',
            '-cpu',
            CPU,
            '-smp',
            str(cpus),
            '-m',
            f'{memory}M,slots=2,maxmem=8G',
            '-nodefaults',
            '-no-user-config',
            '-display',
            'none',
            '-no-reboot',
            '-qmp',
            f'unix:{self._sockets["qmp"]},server=on,wait=off',
            '-chardev',
            f'socket,id=serial,path={self._sockets["serial"]},server=on,wait=on',
            '-serial',
            'chardev:serial',
            '-kernel',
            str(kernel.kernel),
            '-initrd',
            str(kernel.initrd),
            '-append',
            f'console=ttyS0 quiet panic=-1 init_on_alloc=0 {more}',
            *arguments,
        ]
        self._open: list[Any] = []
        self._seen = b''

    def __enter__(self) -> Self:
        with self.log.open('w') as log:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True
            )
        try:
            self._serial = qmp.connect(self._sockets['serial'], self.process)
            self._open.append(self._serial)
            try:
                self.monitor = qmp.Qmp(qmp.connect(self._sockets['qmp'], self.process))
            except (OSError, AssertionError) as e:
                raise AssertionError(f'QEMU does not start: {self.log.read_text()}') from e
            self._open.append(self.monitor)
            self._wait_for(self._ready, self._boot_seconds)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for resource in self._open:
            resource.close()

    def _wait_for(self, pattern: re.Pattern[bytes], seconds: float) -> tuple[str, re.Match[bytes]]:
        end = time.monotonic() + seconds
        while not (match := pattern.search(self._seen)):
            left = end - time.monotonic()
            if left <= 0:
                raise AssertionError(
                    f'the guest said nothing that was waited for: '
                    f'{self._seen[-2000:].decode(errors="replace")}'
                )
            self._serial.settimeout(left)
            try:
                data = self._serial.recv(65536)
            except TimeoutError:
                continue
            except ConnectionResetError:
                data = b''
            if not data:
                raise AssertionError(
                    f'QEMU ended: '
                    f'{self.log.read_text()}{self._seen[-2000:].decode(errors="replace")}'
                )
            self._seen += data
        text, self._seen = (
            self._seen[: match.start()].decode(errors='replace'),
            self._seen[match.end() :],
        )
        return text, match

    def expect(self, pattern: bytes, seconds: float = COMMAND_SECONDS) -> re.Match[bytes]:
        """What comes on the console, behind what was waited for before."""
        return self._wait_for(re.compile(pattern), seconds)[1]

    def press(self, keys: str) -> None:
        """On the console, without Enter."""
        self._serial.sendall(keys.encode())

    def send(self, command: str) -> None:
        """Begin a command; :meth:`result` waits for it."""
        self._serial.sendall(command.encode() + b'\n')

    def result(self, seconds: float = COMMAND_SECONDS) -> tuple[str, int]:
        text, match = self._wait_for(_DONE, seconds)
        return text.replace('\r', ''), int(match[1])

    def try_run(self, command: str) -> tuple[str, int]:
        """Output (of the kernel, too) and status."""
        self.send(command)
        return self.result()

    def run(self, command: str) -> str:
        """Output of a command that succeeds."""
        text, status = self.try_run(command)
        if status:
            raise AssertionError(f'{command}: {status}: {text}')
        return text

    def query(self) -> dict[str, Any]:
        """query-pcow of the only image."""
        (info,) = self.monitor.run('query-pcow')
        return dict(info)

    def quit(self) -> None:
        self.monitor.run('quit')
        self.process.wait(qmp.START_SECONDS)
