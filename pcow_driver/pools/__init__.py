# SPDX-License-Identifier: Apache-2.0
"""Pools of this host: registered, measured, with room set aside; and the new images that appear in
them.
"""
