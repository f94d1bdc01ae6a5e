# SPDX-License-Identifier: Apache-2.0
"""The benchmarks, one module each; its name is the word after ``tools/bench``.  A module has

* ``HELP``: one line;
* ``add_arguments(parser)``: its options;
* ``run(options) -> dict``: measure, clean up, and return
  ``{"rows": [...], "machine": {...}, ...}``, which is kept as JSON; progress may be printed. Raises
  :class:`pcow_driver.common.exception.PcowError`;
* ``tables(result) -> list[Table]``: what is printed, and what the documentation shows;
* ``plots(result) -> dict[str, Bars]``: by name of the SVG file (without the suffix); may be empty.

``tables`` and ``plots`` work from the JSON alone: ``tools/bench docs`` calls them without measuring
anything.
"""
