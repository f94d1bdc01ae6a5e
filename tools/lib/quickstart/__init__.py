# SPDX-License-Identifier: Apache-2.0
"""The main job on real parts: a template, a VM that boots from a thin image on it, a snapshot, a
revert.

``tools/quickstart`` builds what is needed and runs ``python -m tools.lib.quickstart``.
"""
