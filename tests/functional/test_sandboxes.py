# SPDX-License-Identifier: Apache-2.0
"""The example of the documentation as it stands: forks of a warm interpreter, without libvirt."""

import contextlib
import dataclasses
import os
from pathlib import Path
import re
import signal
import subprocess
import sys

from pcow_driver.common import exception
from pcow_driver.copies import fork
from pcow_driver.images import image
from pcow_driver.vm import checkpoint
from pcow_driver.vm import process
from pcow_driver.vm import tree
from tests.functional import images
from tests.functional import libvirt_vm
from tools.lib.quickstart import guest

JOBS = 4
_SECONDS = 600


class SandboxTest(libvirt_vm.HostTestCase):
    def test_example(self) -> None:
        """Each job has the list that its parent made, and nothing is left of any."""
        place = self.host.place
        made, _cache = guest.prepare(self.host.run, None, None, None, ('python3-minimal',))
        template = place.image_path('python')
        place.pcowctl(
            *('template', 'build', '--source-format', 'qcow2'),
            *(str(made.image), place.reference(template)),
        )
        pool = template.parent
        before = sorted(path.name for path in pool.iterdir())
        done = subprocess.run(
            [
                *(
                    sys.executable,
                    images.TOP / 'doc/source/howto/sandboxes.py',
                    pool,
                    template.stem,
                ),
                *('--kernel', made.kernel, '--initrd', made.initrd, '--accelerator', 'tcg'),
                *('--append', 'console=ttyS0 quiet rw pcow.init=shell', '--ready', 'ready'),
                *('--jobs', str(JOBS), '--config-file', place.config),
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)
        self.assertEqual(
            [(str(number), str(number * number + 100000)) for number in range(JOBS)],
            re.findall(r'^job (\d+): (\d+) after', done.stdout, re.MULTILINE),
        )
        self.assertEqual(before, sorted(path.name for path in pool.iterdir()))
        self.assertEqual([], self.processes(str(pool)))

    @staticmethod
    def processes(word: str) -> list[bytes]:
        """Command lines of the QEMUs that have it in theirs."""
        found = []
        for path in Path('/proc').glob('[0-9]*/cmdline'):
            with contextlib.suppress(OSError):
                text = path.read_bytes()
                if b'qemu-system' in text and word.encode() in text:
                    found.append(text)
        return found

    def spec(self, name: str) -> process.Spec:
        paths = [self.host.place.image_path(word) for word in (f'{name}-ram', name)]
        for path, size in zip(paths, ('64M', '16M'), strict=True):
            libvirt_vm.run(images.program('pcow-img'), 'create', '-q', path, size)
            self.addCleanup(path.unlink, missing_ok=True)
        return process.Spec(
            name=name, ram=str(paths[0]), nvdimms=(str(paths[1]),), accelerator='tcg'
        )

    def test_verbs(self) -> None:
        """Without a guest: a firmware that finds nothing to boot."""
        directory = self.host.directory / 'verbs'
        with process.Process(self.spec('verbs'), str(directory / 'parent')) as vm:
            self.assertRaises(exception.DomainInvalid, checkpoint.take, vm, 'off')
            vm.start()
            self.assertGreater(checkpoint.take(vm, 'one').pause, 0)
            checkpoint.take(vm, 'two', max_wait=250)
            self.assertFalse(checkpoint.revert(vm, 'one', max_wait=250).started)
            (current,) = (one.name for one in tree.checkpoints(vm) if one.current)
            self.assertEqual('one', current)
            child = process.fork(vm, 'one', 'child', str(directory / 'child'))
            with child:
                self.assertTrue(child.active())
                self.assertNotEqual(vm.uuid, child.uuid)
                clusters = {
                    image.info(path, force_share=True).cluster_size for path in child.writable()
                }
                self.assertEqual({fork.VM_CLUSTER_SIZE}, clusters)
                with self.assertRaisesRegex(exception.QmpFailed, 'stand'):
                    checkpoint.delete(vm, 'one')
                self.assertRaises(exception.DomainInvalid, process.delete_images, child)
                with self.assertRaises(exception.ImageExists):
                    process.fork(vm, 'two', 'child', str(directory / 'other'))
                checkpoint.take(child, 'own')
                with process.fork(child, 'own', 'grand', str(directory / 'grand')) as grand:
                    pass
                other = process.Process(child.spec, child.directory)
                with self.assertRaisesRegex(exception.DomainInvalid, 'a QEMU has'):
                    other.start()
            with self.assertRaises(exception.ImageHasChildren):
                process.delete_images(child)
            process.delete_images(grand)
            process.delete_images(child)
            checkpoint.delete(vm, 'one')
            vm.end()
            self.assertFalse(vm.active())
            self.assertEqual(['two'], [one.name for one in tree.checkpoints(vm)])
            self.assertTrue(checkpoint.revert(vm, 'two').started)
            self.assertTrue(vm.active())
            self.assertRaises(exception.DomainInvalid, vm.start)
        self.assertFalse(vm.active())
        checkpoint.delete(vm, 'two')

    def test_directory_of_somebody_else(self) -> None:
        directory = self.host.directory / 'others'
        directory.mkdir()
        (directory / 'log').symlink_to(self.host.directory / 'precious')
        with process.Process(self.spec('others'), str(directory)) as vm:
            self.assertRaises(exception.DomainInvalid, vm.start)
            directory.chmod(0o777)
            with self.assertRaisesRegex(exception.DomainInvalid, 'only this user'):
                vm.start()
        self.assertFalse((self.host.directory / 'precious').exists())

    def test_what_two_cannot_share(self) -> None:
        spec = dataclasses.replace(self.spec('shared'), arguments=('-netdev', 'user,id=n'))
        directory = self.host.directory / 'shared'
        with process.Process(spec, str(directory / 'parent')) as vm:
            vm.start()
            checkpoint.take(vm, 'one')
            with self.assertRaisesRegex(exception.DomainInvalid, '-netdev'):
                process.fork(vm, 'one', 'two', str(directory / 'two'))
            with process.fork(vm, 'one', 'two', str(directory / 'two'), spec.arguments) as child:
                self.assertTrue(child.active())
            process.delete_images(child)

    def test_answer_that_is_late(self) -> None:
        """The next command is answered, whatever became of the one before."""
        with process.Process(self.spec('late'), str(self.host.directory / 'late')) as vm:
            vm.start()
            assert vm._process is not None and vm._qmp is not None
            vm._qmp._socket.settimeout(0.5)
            os.kill(vm._process.pid, signal.SIGSTOP)
            try:
                self.assertRaises(exception.QmpFailed, checkpoint.take, vm, 'late')
            finally:
                os.kill(vm._process.pid, signal.SIGCONT)
            tree.checkpoints(vm)
            checkpoint.take(vm, 'next')
            self.assertIn('next', [one.name for one in tree.checkpoints(vm)])

    def test_qemu_does_not_start(self) -> None:
        spec = self.spec('broken')
        wrong = process.Spec(
            name='broken', ram=spec.ram, accelerator='tcg', arguments=('-device', 'no-such')
        )
        with process.Process(wrong, str(self.host.directory / 'broken')) as vm:
            with self.assertRaisesRegex(exception.DomainInvalid, 'no-such'):
                vm.start()
            self.assertFalse(vm.active())
