# SPDX-License-Identifier: Apache-2.0
"""What differs from Nova's libvirt driver: only overrides.

Each module adds those of one concept to the one below: ``volumes``, ``snapshots``, ``warm_ends``,
``warm_starts``, ``resizes``, ``deletion``, ``live_arrivals``, ``live_migrations``, ``creation``,
``moves``, ``domains`` and ``persistent``. What they do is in the other packages.
"""
