# SPDX-License-Identifier: Apache-2.0
"""Random work on a QEMU with images on a pool that is full now and then: every byte is compared
with a model.

``PCOW_TEST_SEED`` is printed, and repeats a run as far as threads and the kernel let it.
``PCOW_RANDOM_SECONDS`` is how long it works: hours, by hand.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import dataclasses
import itertools
import os
import subprocess
import time

from tests.functional import images
from tests.functional import model
from tests.functional import test_qemu_backend as backend
from tests.functional import virtio
from tests.functional import vm_state
from tests.functional.qemu_random import display
from tests.functional.qemu_random import network
from tests.functional.qemu_random import storage
from tests.functional.qemu_random import world

SECONDS = float(os.environ.get('PCOW_RANDOM_SECONDS', '40'))
STEPS = 120  # of one QEMU
TRIES = 20
# Why a snapshot may be refused, of a slow disk and of a busy machine
SLOW = 'a disk has not ended its requests'
BUSY = 'an iothread does not stop in the time'
RANDOM = 8  # slot
MEMORY = 2  # of the arguments come before those of the images
ENGINES = ('minor', 'signal')


@dataclasses.dataclass
class State:
    """What a VM had that was saved."""

    contents: list[model.Content]
    screen: display.Screen


class RandomWork(storage.StorageWork, network.NetworkWork, display.DisplayWork):
    def setUp(self) -> None:
        super().setUp()
        self.carrier = self.directory / 'carrier.qcow2'
        vm_state.run('qemu-img', 'create', '-q', '-f', 'qcow2', self.carrier, '1M')
        self.states: dict[str, State] = {}

    # ---- one QEMU ----

    def start(self) -> world.Vm:
        self.addresses = {}
        self.engines = [self.random.choice(ENGINES) for _ in self.images]
        self.done['machines with RAM on an image' if self.has_ram else 'machines'] += 1
        self.log = [f'engines {self.engines}, RAM on an image: {self.has_ram}']
        ram = world.BEGIN + world.SIZE if self.has_ram else 128 * images.MIB
        self.more = (
            '-m',
            f'{ram // images.MIB}M,slots=8,maxmem=8G',
            *self.device_arguments(),
            '-object',
            'rng-builtin,id=random',
            '-device',
            f'virtio-rng-pci,rng=random,addr={RANDOM}',
            *vm_state.carrier_arguments(self.carrier),
        )
        return world.Vm(self.directory, *self.arguments())

    def arguments(self) -> list[str]:
        memory = [
            image.arguments(engine)
            for image, engine in zip(self.images, self.engines, strict=False)
        ]
        return [*self.more[:MEMORY], *itertools.chain.from_iterable(memory), *self.more[MEMORY:]]

    def set_up(self) -> None:
        super().set_up()
        self.rng = virtio.Random(self.vm, RANDOM)

    # ---- what happens ----

    def do_store(self) -> None:
        image = self.random.choice(self.images)
        offset, length = self.some()
        data = self.random.randbytes(length)
        self.note(f'store {image.id} {offset:#x} {length:#x}')
        self.vm.write(self.address(image, offset), data)
        self.stored(image, offset, data, not self.full, 'a store')

    def do_load(self) -> None:
        image = self.random.choice(self.images)
        offset, length = self.some()
        self.note(f'load {image.id} {offset:#x} {length:#x}')
        self.compare(image, offset, length, 'a load')

    def do_random(self) -> None:
        image = self.random.choice(self.images)
        if self.would_wait([image]):
            return
        offset, length = self.some(1, 4096)
        self.note(f'rng {image.id} {offset:#x} {length:#x}')
        before = bytes(image.content.data[offset : offset + length])
        self.rng.fill([(self.address(image, offset), length)])
        found = self.load(image, offset, length)
        if self.full:
            self.go_on()
            found = self.load(image, offset, length)
        elif length >= 8 and found == before:
            self.wrong(f'{self.log[-1]} did not come')
        image.content.store(offset, found)

    def attempt(self, command: str, **arguments: str) -> bool:
        def work() -> str:
            self.vm.begin_qmp(command, **arguments)
            return self.error(command)

        return self.judge(command, self.again(work))

    def error(self, command: str) -> str:
        """Of one that was begun; '' if it has none."""
        return str(self.vm.end_qmp(command).get('error', {}).get('desc', ''))

    def again(self, work: Callable[[], str]) -> str:
        """Until it succeeds or is refused for good: threads have some time only to stop."""
        for _ in range(TRIES):
            error = work()
            if 'Try again' not in error or (self.under_way and SLOW in error):
                break
            self.done['again'] += 1
        return error

    def judge(self, command: str, error: str) -> bool:
        """Did it succeed? It must, but in a full pool and beside a request that a slow disk has."""
        if error:
            self.note(f'{command}: {error}')
            if self.under_way and SLOW in error:
                self.done['refused beside a slow disk'] += 1
            elif not self.full:
                self.wrong(self.log[-1])
        return not error

    def beside_a_request(self, image: world.Image) -> None:
        self.random.choice((self.do_create, self.do_create, self.do_flush, self.do_delete))(image)

    def begin_create(self, image: world.Image) -> Callable[[], None]:
        name = self.prepare_create(image)
        content = image.content.copy()
        self.vm.begin_qmp(
            'pcow-snapshot-create', **{'id': image.id, 'name': name, 'max-wait': 60000}
        )

        def end() -> None:
            error = self.error('pcow-snapshot-create')
            if BUSY not in error and self.judge('pcow-snapshot-create', error):
                self.done['create that waits'] += 1
                image.snapshots[name] = content

        return end

    def prepare_create(self, image: world.Image) -> str:
        """Its name."""
        if len(image.snapshots) >= world.SNAPSHOTS:
            self.do_delete(image)
        self.made += 1
        self.note(f'create {image.id} s{self.made}')
        return f's{self.made}'

    def do_create(self, image: world.Image | None = None) -> None:
        image = image or self.random.choice(self.images)
        name = self.prepare_create(image)
        if self.attempt('pcow-snapshot-create', id=image.id, name=name):
            image.snapshots[name] = image.content.copy()

    def do_delete(self, image: world.Image | None = None) -> None:
        image = image or self.random.choice(self.images)
        names = [name for name in image.snapshots if name not in self.states]
        if names:
            name = self.random.choice(names)
            self.note(f'delete {image.id} {name}')
            if self.attempt('pcow-snapshot-delete', id=image.id, name=name):
                del image.snapshots[name]

    def do_flush(self, image: world.Image | None = None) -> None:
        self.vm.qmp('pcow-flush', id=(image or self.images[0]).id)

    def do_revert(self) -> None:
        image = self.random.choice(self.images)
        if image.snapshots:
            name = self.random.choice(list(image.snapshots))
            self.note(f'revert {image.id} {name}')
            self.vm.qmp('stop')
            if self.attempt('pcow-snapshot-revert', id=image.id, name=name):
                image.content = image.snapshots[name].copy()
            self.vm.qmp('cont')
            self.set_up()  # it was reset
            self.compare(image, 0, world.SIZE, self.log[-1])

    def do_save(self) -> None:
        if self.with_nvme or self.full:
            return
        if self.states:
            name = next(iter(self.states))
            self.note(f'delvm {name}')
            self.wrong(self.vm.delete(name))
            del self.states[name]
            for image in self.images:
                image.snapshots.pop(name, None)
        self.made += 1
        name = f's{self.made}'
        self.note(f'savevm {name}')
        self.wrong(self.again(lambda: self.vm.save(name)))
        self.states[name] = State([image.content.copy() for image in self.images], self.screen())
        for image in self.images:
            image.snapshots[name] = image.content.copy()

    def do_load_vm(self) -> None:
        if self.with_nvme or self.full or not self.states:
            return
        name = self.random.choice(list(self.states))
        state = self.states[name]
        if len(state.contents) != len(self.images):
            return
        self.note(f'loadvm {name}')
        self.wrong(self.vm.load(name))
        for image, content in zip(self.images, state.contents, strict=True):
            image.content = content.copy()
        self.vm.qmp('cont')
        self.screen_is(state.screen, self.log[-1])
        self.set_up()
        self.compare_all(self.log[-1])

    def do_plug(self) -> None:
        if len(self.images) > 3 or self.full:
            return
        image = self.create(len(self.images))
        self.note(f'plug {image.id}')
        self.vm.qmp(
            'object-add',
            qom_type='memory-backend-file',
            id=image.id,
            share=True,
            mem_path=str(image.path),
            size=world.SIZE,
            **{'pcow-full': image.policy},
        )
        self.vm.qmp(
            'device_add',
            driver='nvdimm',
            memdev=image.id,
            id=image.device,
            **{world.VOLATILE: True},
        )
        self.images.append(image)

    def do_fill(self) -> None:
        if self.full:
            (self.pool / 'neighbour').unlink()
        else:
            with (self.pool / 'neighbour').open('wb', 0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(images.MIB))
            with (self.pool / 'neighbour').open('ab', 0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
        self.full = not self.full
        self.note(f'full {self.full}')
        if not self.full and self.vm.qmp('query-status')['status'] == 'io-error':
            # a device's store that came by itself has found no space: the operator's part
            self.note('cont')
            self.vm.qmp('cont')

    def do_stop(self) -> None:
        self.vm.qmp('stop')
        self.vm.qmp('cont')

    def do_reset(self) -> None:
        self.note('reset')
        self.vm.qmp('system_reset')
        self.vm.wait_event('RESET')
        self.set_up()

    def live(self, end: float) -> None:
        without_queues: dict[Callable[[], None], int] = {
            self.do_store: 12,
            self.do_load: 4,
            self.do_create: 4,
            self.do_delete: 3,
            self.do_flush: 2,
            self.do_plug: 1,
            self.do_fill: 2,
        }
        work = without_queues | {
            self.do_transfer: 24,
            self.do_overlapping: 8,
            self.do_random: 4,
            self.do_send: 10,
            self.do_draw: 8,
            self.do_answer: 3,
            self.do_revert: 2,
            self.do_save: 1,
            self.do_load_vm: 1,
            self.do_stop: 1,
            self.do_reset: 1,
        }
        with self.start() as self.vm:
            try:
                self.set_up()
                self.compare_all('start')
                for step in range(STEPS):
                    if time.monotonic() > end:
                        break
                    # A device whose queue must be copied first would wait for space
                    now = without_queues if self.full and self.has_ram else work
                    (act,) = self.random.choices(list(now), list(now.values()))
                    self.done[act.__name__] += 1
                    act()
                    if step % 40 == 39:
                        self.compare_all(self.log[-1])
                if self.full:
                    self.do_fill()
                self.compare_all('the end')
                if not self.with_nvme and len(self.images) == len(self.engines):
                    self.migrate()
                else:
                    self.vm.quit()
            except (AssertionError, OSError) as error:
                if 'PCOW_TEST_SEED' in str(error):
                    raise
                self.vm.process.kill()
                stderr = self.vm.process.stderr
                said = stderr.read() if stderr and not stderr.closed else ''
                self.wrong(f'{error!r}, QEMU: {self.vm.process.wait()} {said[-2000:]}')
        for image in self.images:
            backend.tool('pcow-img', 'check', image.path)

    def migrate(self) -> None:
        """To images of the same kind beside these, which go away."""
        self.note('migrate')
        self.done['migrate'] += 1
        if self.states:
            self.do_save()
            self.wrong(self.vm.delete(next(iter(self.states))))
        names, self.states = list(self.states), {}
        for image in self.images:
            image.snapshots = {
                name: content for name, content in image.snapshots.items() if name not in names
            }
            while image.snapshots:
                self.do_delete(image)
        left = [image.path for image in self.images]
        for image in self.images:
            self.make_file(image)
        there = self.directory / f'there{self.made}'
        there.mkdir()
        uri = f'unix:{there}/migration'
        screen = self.screen()
        with world.Vm(there, *self.arguments(), '-incoming', uri) as target:
            back = [{'capability': 'return-path', 'state': self.random.random() < 0.8}]
            self.vm.qmp('migrate-set-capabilities', capabilities=back)
            self.vm.qmp('migrate', uri=uri)
            end = time.monotonic() + vm_state.JOB_SECONDS
            while (found := self.vm.qmp('query-migrate'))['status'] not in ('completed', 'failed'):
                self.assertLess(time.monotonic(), end)
                time.sleep(0.02)
            self.wrong(
                found.get('error-desc', '') or ('' if found['status'] == 'completed' else 'failed')
            )
            self.assertEqual('running', target.wait_status('running'))
            self.vm.quit()
            self.vm = target
            self.screen_is(screen, 'migration')
            self.set_up()
            self.compare_all('migration')
            for _ in range(10):
                self.do_store()
                self.do_transfer()
                self.do_send()
            self.compare_all('stores after a migration')
            target.quit()
        for path in left:
            path.unlink()

    def renew(self) -> None:
        """No snapshots, and fewer images: a pool of this size holds no more."""
        for name in self.states:
            for path in (image.path for image in self.images):
                subprocess.run(
                    [images.program('pcow-img'), 'snapshot', '-d', name, path],
                    capture_output=True,
                    check=False,
                )
            for image in self.images:
                image.snapshots.pop(name, None)
            subprocess.run(['qemu-img', 'snapshot', '-d', name, self.carrier], check=True)
        self.states = {}
        for image in self.images[2:]:
            image.path.unlink()
        del self.images[2:]
        for image in list(self.images):
            if self.random.random() < (0.3 if image.number else 0.6):
                image.path.unlink()
                made = self.create(image.number)
                self.images[image.number] = made

    def work(self) -> None:
        print(f'{self.kind}: PCOW_TEST_SEED={self.seed}', flush=True)
        if self.absent:
            print(f'this QEMU was built without {sorted(self.absent)}')
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            self.live(end)
            self.renew()
        print(dict(self.done))


class RandomTest(RandomWork):
    """In a pool without persistence."""

    def test_random_work(self) -> None:
        self.work()


class Ext4Test(RandomWork):
    """In a pool of class page-cache, as the next one."""

    kind = 'ext4'

    def test_random_work(self) -> None:
        self.work()


class XfsTest(RandomWork):
    kind = 'xfs'

    def test_random_work(self) -> None:
        self.work()
