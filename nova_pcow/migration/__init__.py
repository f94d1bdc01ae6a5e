# SPDX-License-Identifier: Apache-2.0
"""Servers that go to another host, with their images."""
