# SPDX-License-Identifier: Apache-2.0
"""Snapshots of servers, suspended ones, and those that go back in place."""
