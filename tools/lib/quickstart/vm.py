# SPDX-License-Identifier: Apache-2.0
"""A guest under libvirt, and its serial console."""

from __future__ import annotations

import os
from pathlib import Path
import re
import time
from typing import Any
import xml.etree.ElementTree as ET

from pcow_driver.common import exception
from pcow_driver.virt import domain_xml
from pcow_driver.virt import libvirt_xml

READY = re.compile(rb'pcow-guest: root: ([^\r\n]*)\r?\npcow-guest: ready')
FAILED = re.compile(rb'pcow-guest: error: ([^\r\n]*)|(Kernel panic[^\r\n]*)')
_POLL = 0.005
_COMMAND_SECONDS = 120.0


class Vm:
    """One domain; ``log`` gets all that it prints on the console."""

    def __init__(self, connection: Any, spec: domain_xml.Domain, log: Path) -> None:
        self.name = spec.name
        # what the guest said of its root file system: its line of /proc/mounts
        self.root = ''
        self._log = log
        self._seen = 0  # bytes of the log that expect() has gone past
        self._commands = 0
        self._terminal: int | None = None
        element = spec.to_element()
        serial = element.find('devices/serial')
        if serial is None:
            raise exception.XmlInvalid(reason='the domain has no serial console')
        ET.SubElement(serial, 'log', file=str(log), append='on')
        self._domain = connection.defineXML(libvirt_xml.to_string(element))

    def boot(self, timeout: float) -> float:
        """Power on; return the seconds until the guest has its shell.

        :raises PcowError: it does not get there
        """
        begun = time.perf_counter()
        self._domain.create()
        self.root = self.expect(READY, timeout)[1].decode(errors='replace')
        took = time.perf_counter() - begun
        self._attach()
        return took

    def attach(self) -> None:
        """To the console of another QEMU than before, in which the guest goes on."""
        self.release()
        self._attach()
        # a new terminal may lose some of what is typed first
        self._write(b'#' * 16 + b'\n')

    def _attach(self) -> None:
        path = ET.fromstring(self._domain.XMLDesc(0)).find('devices/serial/source')
        if path is None or not path.get('path'):
            raise exception.PcowError(reason=f'{self.name} has no console')
        self._terminal = os.open(
            str(path.get('path')), os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
        )

    def expect(self, pattern: re.Pattern[bytes], timeout: float) -> re.Match[bytes]:
        """Wait for ``pattern`` on the console, from where the last call found its own.

        :raises PcowError: it did not come in ``timeout`` seconds, or the guest ended
        """
        limit = time.monotonic() + timeout
        checked = time.monotonic()
        while time.monotonic() < limit:
            self._drain()
            text = self._log.read_bytes()[self._seen :] if self._log.exists() else b''
            match = pattern.search(text)
            if match:
                self._seen += match.end()
                return match
            failed = FAILED.search(text)
            if failed:
                raise exception.PcowError(
                    reason=f'the guest {self.name} gave up: '
                    f'{(failed[1] or failed[2]).decode(errors="replace")}'
                )
            if time.monotonic() - checked > 1:
                checked = time.monotonic()
                if not self._domain.isActive():
                    raise exception.PcowError(reason=f'the guest {self.name} ended: {self._tail()}')
            time.sleep(_POLL)
        raise exception.PcowError(
            reason=f'the guest {self.name} did not answer within {timeout:.0f} s: {self._tail()}'
        )

    def run(self, command: str) -> str:
        """Run a shell command in the guest and return what it prints.

        :raises PcowError: it fails
        """
        if self._terminal is None:
            raise exception.PcowError(reason=f'the guest {self.name} is off')
        self._commands += 1
        begin, end = f'begin-{self._commands}', f'end-{self._commands}'
        # the quotes keep the echo of this line from looking like its output
        line = f'echo "pcow-""{begin}"; {command}; echo "pcow-""{end}-$?"\n'
        # a UART has no flow control: one byte after the other
        for byte in line.encode():
            self._write(bytes([byte]))
        match = self.expect(
            re.compile(rf'pcow-{begin}\r?\n(.*?)pcow-{end}-(\d+)\r?\n'.encode(), re.DOTALL),
            _COMMAND_SECONDS,
        )
        output = match[1].decode(errors='replace').replace('\r', '').strip()
        if match[2] != b'0':
            raise exception.PcowError(
                reason=f'in the guest {self.name}, {command!r} failed: {output}'
            )
        return output

    def power_off(self) -> None:
        """As if the plug was pulled: what the guest has not made durable is its loss."""
        if self._terminal is not None:
            os.close(self._terminal)
            self._terminal = None
        if self._domain.isActive():
            self._domain.destroy()

    def remove(self) -> None:
        self.power_off()
        self._domain.undefine()

    def release(self) -> None:
        """Leave the console to others; the guest goes on."""
        if self._terminal is not None:
            os.close(self._terminal)
            self._terminal = None

    def _write(self, data: bytes) -> None:
        limit = time.monotonic() + _COMMAND_SECONDS
        while time.monotonic() < limit:
            self._drain()
            try:
                if self._terminal is not None and os.write(self._terminal, data):
                    return
            except BlockingIOError:
                time.sleep(_POLL)
        raise exception.PcowError(reason=f'the console of {self.name} takes no input')

    def _drain(self) -> None:
        """Read the terminal empty (the log has it all): a full one would stop the guest."""
        while self._terminal is not None:
            try:
                if not os.read(self._terminal, 65536):
                    return
            except OSError:  # empty (EAGAIN), or the guest is off (EIO)
                return

    def _tail(self) -> str:
        if not self._log.exists():
            return 'its console is empty'
        lines = self._log.read_bytes().decode(errors='replace').split('\n')
        return (
            '; '.join(line.strip() for line in lines[-4:] if line.strip()) or 'its console is empty'
        )
