# SPDX-License-Identifier: Apache-2.0
"""Bar charts as SVG, drawn with matplotlib (extra "bench")."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pcow_driver.common import exception

_COLOURS = {'pcow': '#4c72b0', 'limit': '#55a868', 'raw memory': '#8c8c8c'}
_OTHER_COLOURS = ('#c44e52', '#dd8452', '#8172b3', '#937860')
_GROUP_WIDTH = 0.8


@dataclasses.dataclass(frozen=True)
class Bars:
    """Groups of bars side by side; a missing value (None) leaves its place empty."""

    title: str
    unit: str  # of the values, under the axis
    groups: tuple[str, ...]
    series: dict[str, tuple[float | None, ...]]  # by side; one value for each group
    log: bool = False  # logarithmic axis

    def draw(self, path: Path) -> None:
        """Write the SVG; the same figures give the same file.

        :raises PcowError: matplotlib is not installed
        """
        try:
            import matplotlib

            matplotlib.use('svg')
            from matplotlib import pyplot
        except ImportError:
            raise exception.PcowError(
                reason='matplotlib is not installed: run tools/build, or pip install pcow[bench]'
            ) from None
        # Fixed names inside the file, and text as text: small, and no change in git without a
        # change of figures.
        with matplotlib.rc_context(
            {'svg.hashsalt': 'pcow', 'svg.fonttype': 'none', 'font.size': 9}
        ):
            figure, axes = pyplot.subplots(
                figsize=(8, 0.5 + 0.2 * len(self.groups) * (len(self.series) + 1))
            )
            height = _GROUP_WIDTH / len(self.series)
            others = iter(_OTHER_COLOURS * len(self.series))
            for number, (side, values) in enumerate(self.series.items()):
                places = [
                    group - _GROUP_WIDTH / 2 + (number + 0.5) * height
                    for group in range(len(values))
                ]
                shown = [value or 0.0 for value in values]
                axes.barh(
                    places, shown, height, label=side, color=_COLOURS.get(side) or next(others)
                )
            axes.set_yticks(range(len(self.groups)), self.groups)
            axes.invert_yaxis()
            axes.set_xscale('log' if self.log else 'linear')
            axes.set_xlabel(self.unit)
            axes.set_title(self.title)
            axes.legend()
            axes.grid(axis='x', alpha=0.3)
            axes.set_axisbelow(True)
            figure.savefig(path, format='svg', bbox_inches='tight', metadata={'Date': None})
            pyplot.close(figure)
