# SPDX-License-Identifier: Apache-2.0
"""Pools in Placement: what is offered, and what servers claim."""
