# SPDX-License-Identifier: Apache-2.0
"""What is wrong on this host, and what may be deleted."""
