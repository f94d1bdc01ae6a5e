# SPDX-License-Identifier: Apache-2.0
"""What it costs to be protected: a fixation, going on after it, automatic checkpoints, RAM on an
image. ``place`` has the guest that all of it is measured with, ``program.c`` is what runs in it.
"""
