# SPDX-License-Identifier: Apache-2.0
"""A family of VMs at random: checkpoints, reverts, forks, forks of forks, deletions, kills at any
moment; RAM and memory of each are compared with a model, byte by byte.

``PCOW_RANDOM_SECONDS`` is how long it works: hours, by hand. ``PCOW_RANDOM_SEED`` repeats a run.
"""

import collections
from collections.abc import Callable
import dataclasses
import os
from pathlib import Path
import random
import time

from testtools import content

from tests.functional import checkpoint_case
from tests.functional import images
from tests.functional import vm_state

SECONDS = float(os.environ.get('PCOW_RANDOM_SECONDS', '15'))
_MOST_VMS, _MOST_CHECKPOINTS = 6, 4
_KILL_SECONDS = 0.03  # in which a command comes to its end
_KILLED_FORKS = 0.4  # part of them
_PAGE = 4096
# Some lie side by side, some in a slab of their own, the last one at the end
_OFFSETS = [
    *(number * _PAGE for number in range(12)),
    *(8 * images.MIB + number * 9 * _PAGE for number in range(8)),
    *(number * 2 * images.MIB + 5 * _PAGE for number in range(6, 28, 2)),
    checkpoint_case.SIZE - _PAGE,
]

Place = tuple[str, int]  # image and offset
State = dict[Place, bytes]  # what a page holds; zeros if it is not there


class _Vm(checkpoint_case.Vm):
    def begin_as_fork(self, _name: str = '') -> str:
        """Load what it stands on; the error, '' if there was none."""
        self.begin_qmp('pcow-checkpoint-revert')
        return str(self.end_qmp('pcow-checkpoint-revert').get('error', {}).get('desc', ''))


@dataclasses.dataclass
class _Checkpoint:
    state: State
    children: int = 0


@dataclasses.dataclass
class _Member:
    """A VM of the family, which runs unless it has just been killed."""

    number: int
    directory: Path
    ram: Path
    image: Path
    parent: _Checkpoint | None
    vm: _Vm | None = None
    state: State = dataclasses.field(default_factory=dict)
    checkpoints: dict[str, _Checkpoint] = dataclasses.field(default_factory=dict)

    def running(self) -> _Vm:
        assert self.vm is not None
        return self.vm

    def address(self, place: Place) -> int:
        image, offset = place
        return offset + (self.running().address('nv0') if image == 'mem0' else vm_state.RAM)

    def has_children(self) -> bool:
        return any(one.children for one in self.checkpoints.values())


class FamilyTest(checkpoint_case.CheckpointTestCase):
    def setUp(self) -> None:
        super().setUp()
        seed = os.environ.get('PCOW_RANDOM_SEED', str(random.SystemRandom().randrange(1 << 32)))
        self.addDetail('seed', content.text_content(seed))
        self.random = random.Random(seed)
        self.family: list[_Member] = []
        self.numbers = 0
        self.done: collections.Counter[str] = collections.Counter()

    def test_family(self) -> None:
        founder = self.member(None)
        self.ram.rename(founder.ram)
        self.image.rename(founder.image)
        self.start_member(founder)
        self.addCleanup(self.end_all)
        steps: list[tuple[int, Callable[[], None]]] = [
            (30, self.store),
            (6, self.compare_one),
            (10, self.take),
            (10, self.revert),
            (6, self.delete),
            (8, self.fork),
            (4, self.kill),
            (6, self.kill_in_the_midst),
            (3, self.leave),
        ]
        weights = [weight for weight, _step in steps]
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            ((_weight, step),) = self.random.choices(steps, weights)
            step()
            self.done[step.__name__] += 1
        for one in self.family:
            self.compare(one)
            one.running().quit()
        self.end_all()
        for one in self.family:
            for path in (one.ram, one.image):
                vm_state.run('pcow-img', 'check', path)
        if SECONDS > 60:
            print(f'\n{dict(self.done)}')

    # ---- members ---------------------------------------------------------------------------------

    def member(self, parent: _Checkpoint | None) -> _Member:
        self.numbers += 1
        directory = self.directory / f'vm{self.numbers}'
        directory.mkdir()
        one = _Member(
            self.numbers,
            directory,
            self.directory / f'{self.numbers}-ram.pcow',
            self.directory / f'{self.numbers}.pcow',
            parent,
        )
        self.family.append(one)
        return one

    def start_member(self, one: _Member, *more: str) -> None:
        one.vm = checkpoint_case.start(one.directory, one.ram, one.image, *more, kind=_Vm)
        one.vm.__enter__()

    def end(self, one: _Member) -> None:
        if one.vm is not None:
            vm, one.vm = one.vm, None
            vm.process.kill()
            vm.__exit__(None, None, None)

    def end_all(self) -> None:
        for one in self.family:
            self.end(one)

    def one(self, fits: Callable[[_Member], bool] = lambda _one: True) -> _Member | None:
        found = [one for one in self.family if fits(one)]
        return self.random.choice(found) if found else None

    # ---- steps -----------------------------------------------------------------------------------

    def store(self) -> None:
        one = self.random.choice(self.family)
        for _number in range(self.random.randrange(1, 8)):
            place = (self.random.choice(('mem0', 'ram0')), self.random.choice(_OFFSETS))
            begin = self.random.choice((0, self.random.randrange(_PAGE)))
            data = self.random.randbytes(self.random.choice((8, _PAGE)))[: _PAGE - begin]
            one.running().write(one.address(place) + begin, data)
            before = one.state.get(place, bytes(_PAGE))
            one.state[place] = before[:begin] + data + before[begin + len(data) :]

    def compare_one(self) -> None:
        self.compare(self.random.choice(self.family))

    def compare(self, one: _Member) -> None:
        for image in ('mem0', 'ram0'):
            for offset in _OFFSETS:
                place = (image, offset)
                found = one.running().read(one.address(place), _PAGE)
                if found != one.state.get(place, bytes(_PAGE)):
                    self.fail(f'VM {one.number}, {image} at {offset:#x}: {dict(self.done)}')

    def take(self) -> None:
        one = self.one(lambda one: len(one.checkpoints) < _MOST_CHECKPOINTS)
        if one is not None:
            name = self.new_name()
            self.assertEqual('', one.running().save(name))
            one.checkpoints[name] = _Checkpoint(dict(one.state))

    def new_name(self) -> str:
        return f'c{sum(self.done.values())}'

    def chosen(self) -> tuple[_Member, str] | None:
        one = self.one(lambda one: bool(one.checkpoints))
        return None if one is None else (one, self.random.choice([*one.checkpoints]))

    def revert(self) -> None:
        found = self.chosen()
        if found is not None:
            self.go_back(*found)

    def go_back(self, one: _Member, name: str) -> None:
        self.assertEqual('', one.running().load(name))
        one.state = dict(one.checkpoints[name].state)
        self.compare(one)

    def delete(self) -> None:
        found = self.chosen()
        if found is None:
            return
        one, name = found
        said = one.running().delete(name)
        if one.checkpoints[name].children:
            self.assertIn('stand', said)
        else:
            self.assertEqual('', said)
            del one.checkpoints[name]
        self.assertEqual(set(one.checkpoints), set(one.running().checkpoints()))

    def fork(self) -> None:
        found = self.chosen() if len(self.family) < _MOST_VMS else None
        if found is None:
            return
        parent, name = found
        base = parent.checkpoints[name]
        child = self.member(base)
        base.children += 1
        self.make(child.ram, parent.ram, name)
        self.make(child.image, parent.image, name)
        self.start_member(child, '-S')
        if self.random.random() < _KILLED_FORKS:
            vm_state.interrupt(
                child.running(), 'begin_as_fork', '', self.random.uniform(0, _KILL_SECONDS)
            )
            self.end(child)
            self.done['fork killed'] += 1
            self.start_member(child, '-S')
        self.assertEqual('', child.running().begin_as_fork())
        child.running().qmp('cont')
        assert child.parent is not None
        child.state = dict(child.parent.state)
        self.compare(child)

    def kill(self) -> None:
        one = self.random.choice(self.family)
        self.end(one)
        self.go_on(one, {})

    def kill_in_the_midst(self) -> None:
        found = self.chosen()
        if found is None:
            return
        one, name = found
        command = self.random.choice(('save', 'load', 'delete'))
        possible = {}
        if command == 'save':
            name = self.new_name()
            possible = {name: _Checkpoint(dict(one.state))}
        elif command == 'delete':
            if one.checkpoints[name].children:
                return
            possible = {name: one.checkpoints.pop(name)}
        seconds = self.random.uniform(0, _KILL_SECONDS)
        vm_state.interrupt(one.running(), command, name, seconds)
        self.end(one)
        self.go_on(one, possible)

    def go_on(self, one: _Member, possible: dict[str, _Checkpoint]) -> None:
        """Of one that was killed, from a checkpoint: one of these may be there as well."""
        self.start_member(one, '-S')
        there = set(one.running().checkpoints())
        one.checkpoints |= {name: item for name, item in possible.items() if name in there}
        self.assertEqual(set(one.checkpoints), there)
        self.done.update({f'{"after" if name in there else "before"}': 1 for name in possible})
        if there:
            self.go_back(one, self.random.choice([*one.checkpoints]))
            one.running().qmp('cont')
        else:  # it boots: what its RAM holds is worth nothing, and of its memory nothing is lost
            one.running().qmp('cont')
            for offset in _OFFSETS:
                for image in ('mem0', 'ram0'):
                    place = (image, offset)
                    found = one.running().read(one.address(place), _PAGE)
                    if image == 'mem0':
                        self.assertEqual(one.state.get(place, bytes(_PAGE)), found)
                    one.state[place] = found

    def leave(self) -> None:
        one = self.one(lambda one: not one.has_children() and one.parent is not None)
        if one is not None:
            self.end(one)
            self.family.remove(one)
            one.ram.unlink()
            one.image.unlink()
            assert one.parent is not None
            one.parent.children -= 1
