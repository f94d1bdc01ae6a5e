# SPDX-License-Identifier: Apache-2.0
"""tools/bench: runs a benchmark, keeps its figures, and turns figures into the tables and plots of
the documentation.

A benchmark is a module of :mod:`tools.lib.bench.commands`; what one must have is told there.
"""
