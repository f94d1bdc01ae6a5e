# SPDX-License-Identifier: Apache-2.0
"""What the user sees: steps with their time and sizes, and the table at the end; the same as JSON
for scripts.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import json
from pathlib import Path
import statistics
import time
from typing import Any

from pcow_driver.common import units

BOOT_TARGET = 1.1  # pcow boot time / raw boot time, at most
OVERLAY_TARGET_SECONDS = 0.010
OVERLAY_TARGET_SIZE = units.MIB


def seconds(value: float) -> str:
    """A duration for people."""
    return f'{value * 1000:.1f} ms' if value < 1 else f'{value:.2f} s'


@dataclasses.dataclass
class Report:
    """Figures of one run: sizes in bytes, times in seconds."""

    steps: list[tuple[str, float]] = dataclasses.field(default_factory=list)
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def step(self, number: int, title: str) -> Iterator[None]:
        print(f'[{number}] {title} ...', flush=True)
        begun = time.perf_counter()
        yield
        took = time.perf_counter() - begun
        self.steps.append((title, took))
        print(f'    took {seconds(took)}', flush=True)

    def say(self, text: str) -> None:
        print(f'    {text}', flush=True)

    def judgements(self) -> dict[str, bool]:
        """Each target and whether it was met."""
        figures = self.figures
        return {
            'overlay_time': figures['overlay_seconds'] < OVERLAY_TARGET_SECONDS,
            'overlay_size': figures['overlay_size'] < OVERLAY_TARGET_SIZE,
            'boot_ratio': figures['boot_ratio'] <= BOOT_TARGET,
        }

    def set_boots(self, raw: list[float], pcow: list[float]) -> None:
        """Boot times in seconds, in the order in which the boots alternated."""
        self.figures |= {
            'boot_raw_seconds': raw,
            'boot_pcow_seconds': pcow,
            'boot_ratio': statistics.median(pcow) / statistics.median(raw),
        }

    def rows(self) -> list[tuple[str, str, str]]:
        """What was measured, its value, its target."""
        figures, met = (
            self.figures,
            {key: 'met' if value else 'MISSED' for key, value in self.judgements().items()},
        )

        def size(key: str) -> str:
            return units.format_size(figures[key])

        rows = [
            ('pool', f'{figures["pool"]} ({figures["persistence"]})', ''),
            ('accelerator', figures['accelerator'], ''),
            ('source (qcow2)', f'{size("source_size")} of {size("source_virtual_size")}', ''),
            ('template', f'{size("template_size")} of {size("template_virtual_size")}', ''),
            (
                'overlay, new',
                size('overlay_size'),
                f'< {units.format_size(OVERLAY_TARGET_SIZE)}: {met["overlay_size"]}',
            ),
            ('overlay, at the end', size('overlay_final_size'), ''),
            ('bytes the guest could see', f'{figures["guest_bytes"]} ({size("guest_bytes")})', ''),
            (
                'create an overlay',
                seconds(figures['overlay_seconds']),
                f'< {seconds(OVERLAY_TARGET_SECONDS)}: {met["overlay_time"]}',
            ),
            ('boot from raw (median)', seconds(statistics.median(figures['boot_raw_seconds'])), ''),
            (
                'boot from pcow (median)',
                seconds(statistics.median(figures['boot_pcow_seconds'])),
                '',
            ),
            (
                'boot, pcow / raw',
                f'{figures["boot_ratio"]:.3f}',
                f'<= {BOOT_TARGET}: {met["boot_ratio"]}',
            ),
            ('snapshot of the running guest', seconds(figures['snapshot_seconds']), ''),
            ('revert', seconds(figures['revert_seconds']), ''),
            ('boot after the revert', seconds(figures['revert_boot_seconds']), ''),
        ]
        return rows + [(f'step: {title}', seconds(took), '') for title, took in self.steps]

    def print_table(self) -> None:
        rows = [('what', 'value', 'target'), *self.rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        rule = '+'.join('-' * (width + 2) for width in widths)
        print()
        for number, row in enumerate(rows):
            print(
                ' '
                + ' | '.join(
                    cell.ljust(width) for cell, width in zip(row, widths, strict=True)
                ).rstrip()
            )
            if number == 0:
                print(rule)

    def write_json(self, path: Path) -> None:
        """Write the figures; the file appears when it is complete."""
        value = self.figures | {
            'targets_met': self.judgements(),
            'steps': [{'title': title, 'seconds': took} for title, took in self.steps],
        }
        part = path.with_name(f'.{path.name}.part')
        part.write_text(json.dumps(value, indent=1) + '\n')
        part.replace(path)
