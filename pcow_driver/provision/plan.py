# SPDX-License-Identifier: Apache-2.0
"""Steps that change the host: shown as they would be typed, carried out in order, undone in reverse
if one fails.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import shlex

from oslo_log import log as logging

from pcow_driver.common import exception
from pcow_driver.common import interrupt

LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Step:
    """One change.

    ``show`` gives the shell command that does the same, or a sentence in brackets where there is
    none; what an earlier step finds out may change it. ``undo`` takes the change back; it is called
    only after ``do`` returned, and only because a later step failed.
    """

    show: Callable[[], str]
    do: Callable[[], None]
    undo: Callable[[], None] | None = None


def command_line(*args: str) -> str:
    return shlex.join(args)


@dataclasses.dataclass
class Plan:
    steps: list[Step] = dataclasses.field(default_factory=list)

    def add(
        self, shown: str, do: Callable[[], None], undo: Callable[[], None] | None = None
    ) -> None:
        self.steps.append(Step(lambda: shown, do, undo))

    def add_command(
        self,
        command: Callable[[], tuple[str, ...]],
        do: Callable[[tuple[str, ...]], None],
        undo: Callable[[], None] | None = None,
    ) -> None:
        """A step whose command depends on what earlier steps find out."""
        self.steps.append(Step(lambda: command_line(*command()), lambda: do(command()), undo))

    def lines(self) -> Iterator[str]:
        """What would be done, a line each."""
        return (step.show() for step in self.steps)

    def run(self, report: Callable[[str], None] = LOG.info) -> None:
        """Carry everything out.

        :param report: gets each step's line before it is done
        :raises PcowError: a step failed; those before it were undone, newest first, as far as they
            can be
        """
        with contextlib.ExitStack() as undo:
            for step in self.steps:
                report(step.show())
                step.do()
                if step.undo is not None:
                    undo.callback(_undo, step.show(), step.undo)
            undo.pop_all()


def _undo(shown: str, undo: Callable[[], None]) -> None:
    try:
        with interrupt.clearing_up():
            undo()
    except (exception.PcowError, OSError) as e:
        LOG.warning('"%s" could not be undone: %s', shown, e)
