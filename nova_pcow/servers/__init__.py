# SPDX-License-Identifier: Apache-2.0
"""What a server has here: its images, RAM, volumes, and its domain."""
