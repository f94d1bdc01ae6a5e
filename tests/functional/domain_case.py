# SPDX-License-Identifier: Apache-2.0
"""Domains that pcowctl prints, on an image that is made of a disk image, in a private libvirtd."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
import re
import select
import time
from typing import Self
import unittest
import xml.etree.ElementTree as ET

from tests.functional import images
from tests.functional import libvirt_vm
from tools.lib.quickstart import guest
from tools.lib.quickstart import libvirtd
from tools.lib.quickstart import state
from tools.lib.quickstart import teardown
from tools.lib.quickstart import workplace

COMMAND_SECONDS = 120
STOP_SECONDS = 60
TEMPLATE, IMAGE = 'debian', 'web1'


class Console:
    """The serial line of a running domain, on which something takes commands, such as Debian's
    init (quickstart/debian-init).
    """

    def __init__(self, xml: str) -> None:
        path = ET.fromstring(xml).findall('devices/serial/source')[0].get('path', '')
        self._terminal = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        self._seen = b''
        self.seconds: float = COMMAND_SECONDS  # that a command may take

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_args: object) -> None:
        os.close(self._terminal)

    def expect(self, pattern: bytes, seconds: float) -> re.Match[bytes]:
        end = time.monotonic() + seconds
        while not (match := re.search(pattern, self._seen)):
            left = end - time.monotonic()
            if left <= 0:
                raise AssertionError(f'{pattern!r} did not come: {self._seen[-2000:]!r}')
            if select.select([self._terminal], [], [], left)[0]:
                with contextlib.suppress(OSError):  # QEMU has just ended
                    self._seen += os.read(self._terminal, 65536)
        self._seen = self._seen[match.end() :]
        return match

    def type(self, keys: str) -> None:
        for byte in keys.encode():  # a UART has no flow control
            os.write(self._terminal, bytes([byte]))

    def send(self, command: str) -> None:
        self.type(f'{command}\n')

    def take_commands(self, shell: str = '') -> None:
        """Have the shell that waits there do what :meth:`run` says.

        :param shell: the command that begins another one, with which this one ends
        """
        loop = 'while read -r line; do eval "$line"; echo "pcow-done: $?"; done'
        # the quotes keep the echo of this line from looking like its output
        self.send(f"exec {shell or 'sh'} -c 'stty -echo; echo pcow-\"\"ready; {loop}'")
        self.expect(rb'pcow-ready\r?\n', self.seconds)

    def run(self, command: str) -> str:
        self.send(command)
        match = self.expect(rb'(?s)(.*)pcow-done: (\d+)\r?\n', self.seconds)
        text = match[1].decode(errors='replace').replace('\r', '')
        if match[2] != b'0':
            raise AssertionError(f'{command}: {text}')
        return text.strip()


class DomainTestCase(unittest.TestCase):
    def setUp(self) -> None:
        super().setUp()
        teardown.reap()
        self.run_ = state.Run.create()
        self.addCleanup(teardown.tear_down, self.run_)
        self.cache = guest.Cache(self.run_)
        self.daemon = libvirtd.Libvirtd(self.run_.directory)
        self.daemon.install_hook()
        self.place = workplace.Workplace(self.run_, self.daemon.uri)
        self.place.make_pool(None)
        self.image = self.place.image_path(IMAGE)
        self.names: list[str] = []

    def make_image(
        self, disk: Path, disk_format: str, *options: str, page_map: str = 'ram'
    ) -> None:
        """A template of a disk image, and an image on it.

        :param options: of the image
        :param page_map: of the template
        """
        reference, template = self.place.reference, self.place.image_path(TEMPLATE)
        self.place.pcowctl(
            *('template', 'build', '--source-format', disk_format, '--page-map', page_map),
            *(str(disk), reference(template)),
        )
        self.place.pcowctl(
            *('image', 'create', reference(self.image), '--template', template.stem, *options)
        )

    def start_daemon(self) -> None:
        self.daemon.start()
        self.addCleanup(self._destroy)

    def _destroy(self) -> None:
        """What serves a disk ends with its domain."""
        for name in self.names:
            libvirt_vm.try_virsh(self.daemon.uri, 'destroy', name)

    def virsh(self, *words: object) -> str:
        done = libvirt_vm.try_virsh(self.daemon.uri, *words)
        self.assertEqual(0, done.returncode, f'{words}: {done.stderr}')
        return done.stdout

    def define(self, name: str, *options: str, memory: str = '256M') -> str:
        """The name of the domain."""
        name = f'{self.run_.domain_name}-{name}'
        xml = self.place.pcowctl(
            *('domain-xml', self.place.reference(self.image), '--name', name, '--type', 'qemu'),
            *('--memory', memory, '--emulator', images.program('qemu-system-x86_64'), *options),
        )
        path = self.run_.directory / f'{name}.xml'
        path.write_text(xml)
        self.virsh('define', path)
        self.names.append(name)
        return name

    def process(self, name: str) -> int:
        """The QEMU of a domain that runs."""
        return int((self.run_.directory / 'run' / 'qemu' / f'{name}.pid').read_text())

    def wait_off(self, name: str, seconds: float = STOP_SECONDS) -> None:
        end = time.monotonic() + seconds
        while self.virsh('domstate', name).strip() != 'shut off':
            self.assertLess(time.monotonic(), end)
            time.sleep(0.1)
