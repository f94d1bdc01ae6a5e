# SPDX-License-Identifier: Apache-2.0
"""A QEMU without a guest that has a pcow NVDIMM and a qcow2 disk, the carrier of VM states."""

from collections.abc import Iterator
import contextlib
import json
from pathlib import Path
import random
import subprocess
import threading
import time
from typing import Any

from tests.functional import images
from tests.functional import qemu

JOB_SECONDS = 120
RAM = 0x100000  # an address in guest RAM that nothing uses


def carrier_arguments(path: Path, more: str = '') -> tuple[str, ...]:
    return (
        '-blockdev',
        f'driver=qcow2,node-name=disk0,file.driver=file,file.filename={path}{more}',
        '-device',
        'virtio-blk-pci,drive=disk0,id=carrier',
    )


class Vm(qemu.Qemu):
    """With snapshots of the whole VM as libvirt takes them."""

    def job(self, command: str, tag: str, **arguments: Any) -> str:
        """Run a job to its end; returns its error, '' if there was none."""
        self.qmp(command, job_id='job', tag=tag, devices=['disk0'], **arguments)
        end = time.monotonic() + JOB_SECONDS
        while time.monotonic() < end:
            for job in self.qmp('query-jobs'):
                if job['id'] == 'job' and job['status'] == 'concluded':
                    self.qmp('job-dismiss', id='job')
                    return str(job.get('error', ''))
            time.sleep(0.005)
        raise AssertionError(f'{command} does not end')

    def save(self, tag: str) -> str:
        return self.job('snapshot-save', tag, vmstate='disk0')

    def load(self, tag: str) -> str:
        return self.job('snapshot-load', tag, vmstate='disk0')

    def delete(self, tag: str) -> str:
        return self.job('snapshot-delete', tag)

    def hmp(self, line: str) -> str:
        """What a command of the human monitor prints: older versions of libvirt use these."""
        return str(self.qmp('human-monitor-command', **{'command-line': line})).strip()

    def write_disk(self, value: int) -> None:
        """To the carrier, durable on return, as a guest would."""
        if message := self.hmp(
            f'qemu-io -d /machine/peripheral/carrier/virtio-backend "write -q -f -P {value} 0 64k"'
        ):
            raise AssertionError(message)

    def quit(self) -> None:
        """End in an orderly way; the answer may get lost when QEMU is fast."""
        with contextlib.suppress(ConnectionResetError):
            self.qmp('quit')
        if self.process.wait(qemu.START_SECONDS):
            raise AssertionError(
                f'QEMU ended with {self.process.returncode}: '
                f'{self.process.stderr and self.process.stderr.read()}'
            )

    def status(self) -> str:
        return str(self.qmp('query-status')['status'])

    def snapshots(self) -> list[dict[str, Any]]:
        (info,) = self.qmp('query-pcow')
        return list(info['snapshots'])

    def names(self) -> list[str]:
        return [str(snapshot['name']) for snapshot in self.snapshots()]

    def disk_names(self) -> list[str]:
        (node,) = [
            node for node in self.qmp('query-named-block-nodes') if node['node-name'] == 'disk0'
        ]
        return [str(snapshot['name']) for snapshot in node['image'].get('snapshots', ())]

    def trees(self) -> tuple[list[str], list[str]]:
        return sorted(self.names()), sorted(self.disk_names())


@contextlib.contextmanager
def under_load(vm: Vm, starts: tuple[int, ...], length: int) -> Iterator[None]:
    """Pages of guest memory are stored to at random meanwhile, as long as QEMU lives.

    :param starts: addresses of the ranges
    :param length: of each, in bytes
    """

    def stores() -> None:
        # it ends with QEMU
        with contextlib.suppress(OSError, ValueError, AssertionError):
            while True:
                page = random.randrange(length // 4096)
                vm.write(random.choice(starts) + page * 4096, random.randbytes(4096))

    thread = threading.Thread(target=stores, daemon=True)
    thread.start()
    try:
        yield
    finally:
        vm.process.kill()
        thread.join(60)


def interrupt(vm: Vm, command: str, name: str, seconds: float) -> None:
    """Kill it so much later than a command begins: QEMU answers when the work is done."""
    killer = threading.Timer(seconds, vm.process.kill)
    killer.start()
    with contextlib.suppress(OSError, AssertionError):
        getattr(vm, command)(name)
    killer.join()
    vm.process.wait()


def image_names(path: Path) -> list[str]:
    """Of a pcow image that nobody has open."""
    text = run('pcow-img', 'snapshot', '-l', '--output=json', path)
    return sorted(snapshot['name'] for snapshot in json.loads(text))


def disk_names(path: Path) -> list[str]:
    """Of a qcow2 file that nobody has open."""
    return sorted(
        snapshot['name']
        for snapshot in json.loads(run('qemu-img', 'info', '--output=json', path)).get(
            'snapshots', ()
        )
    )


def disk_holds(path: Path, value: int) -> bool:
    """The carrier, also while a QEMU has it open that does nothing with it."""
    done = subprocess.run(
        ['qemu-io', '-r', '-U', '-f', 'qcow2', '-c', f'read -q -P {value} 0 64k', path],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=images.TIMEOUT,
        check=False,
    )
    if done.returncode and 'verification failed' not in done.stdout:
        raise AssertionError(f'{path}: {done.stdout}{done.stderr}')
    return not done.returncode


def run(name: str, *arguments: object) -> str:
    program = images.program(name) if name.startswith('pcow-') else name
    done = subprocess.run(
        [program, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=images.TIMEOUT,
        check=False,
    )
    if done.returncode:
        raise AssertionError(f'{name} {arguments}: {done.stdout}{done.stderr}')
    return done.stdout
