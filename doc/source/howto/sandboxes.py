# SPDX-License-Identifier: Apache-2.0
"""A Python interpreter that is warm, in a VM, and a fork of that for each job.

    python3 sandboxes.py /var/lib/pcow/pools/fast python --kernel vmlinuz --initrd initrd --jobs 100

The template (here: python) has a root file system with Python. Its guest shows a shell on the first
serial port. All that a job does is gone with its VM.
"""

import argparse
from concurrent import futures
import os
import re
import socket
import tempfile
import time

from pcow_driver.common import conf
from pcow_driver.pools import pool as pool_module
from pcow_driver.vm import checkpoint
from pcow_driver.vm import process
from pcow_driver.vm import ram


class Console:
    """The first serial port of a guest."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._socket.settimeout(600)
        self._text = b''

    def __enter__(self) -> 'Console':
        return self

    def __exit__(self, *_error: object) -> None:
        self._socket.close()

    def ask(self, line: str, answer: str) -> str:
        """Type a line, and wait for what matches."""
        for byte in f'{line}\n'.encode():  # a UART has no flow control
            self._socket.sendall(bytes([byte]))
        return self.wait(answer)

    def wait(self, answer: str) -> str:
        while not (match := re.search(answer.encode(), self._text)):
            data = self._socket.recv(65536)
            if not data:
                raise SystemExit(f'the guest has ended: {self._text.decode(errors="replace")}')
            self._text += data
        self._text = self._text[match.end() :]
        return match[1].decode(errors='replace') if match.re.groups else ''


def job(parent: process.Process, number: int, directory: str) -> tuple[str, float]:
    """What an expression is in a fork of the interpreter, and after how many ms."""
    begun = time.monotonic()
    child = process.fork(parent, 'warm', f'job{number}', os.path.join(directory, str(number)))
    try:
        with child, Console(child.console) as console:
            expression = f'squares[{number}] + len(squares)'
            result = console.ask(f'print("=", {expression})', r'\r\n= ([^\r]*)\r\n')
            return result, (time.monotonic() - begun) * 1e3
    finally:
        child.end()
        process.delete_images(child)


def run(parent: process.Process, given: argparse.Namespace, directory: str) -> None:
    with parent:
        parent.start()
        with Console(parent.console) as console:
            console.wait(given.ready)
            console.ask('python3 -iq', '>>> ')
            console.ask('squares = [n * n for n in range(100000)]', '>>> ')
        taken = checkpoint.take(parent, 'warm')
        print(f'warm; the guest stood for {taken.pause / 1e6:.1f} ms')
        begun = time.monotonic()
        workers = futures.ThreadPoolExecutor(os.cpu_count())
        try:
            for number, (result, took) in enumerate(
                workers.map(lambda number: job(parent, number, directory), range(given.jobs))
            ):
                print(f'job {number}: {result} after {took:.0f} ms')
        finally:
            workers.shutdown(cancel_futures=True)  # those that run come to their end
        print(f'{given.jobs} jobs in {time.monotonic() - begun:.1f} s')
        checkpoint.delete(parent, 'warm')


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('pool')
    parser.add_argument('template')
    parser.add_argument('--kernel', required=True)
    parser.add_argument('--initrd', required=True)
    parser.add_argument('--append', default='console=ttyS0 quiet')
    parser.add_argument('--ready', default='[$#] $', help='what the shell says')
    parser.add_argument('--memory', type=int, default=256, help='MiB')
    parser.add_argument('--accelerator', default='kvm:tcg')
    parser.add_argument('--jobs', type=int, default=100)
    parser.add_argument('--config-file', help='of pcow, where it is not in /etc/pcow')
    given = parser.parse_args()
    conf.CONF(['--config-file', given.config_file] if given.config_file else [], project='pcow')
    pool = pool_module.open_directory(given.pool)
    spec = process.Spec(
        name='warm',
        ram=ram.provide(pool, 'warm-ram', given.memory << 20),
        nvdimms=(pool.create_image('warm', base=given.template),),
        arguments=(*('-kernel', given.kernel, '-initrd', given.initrd), *('-append', given.append)),
        accelerator=given.accelerator,
    )
    try:
        with tempfile.TemporaryDirectory(prefix='pcow-') as directory:
            run(process.Process(spec, os.path.join(directory, 'warm')), given, directory)
    finally:
        for name in ('warm', 'warm-ram'):
            pool.delete_image(name)


if __name__ == '__main__':
    main()
