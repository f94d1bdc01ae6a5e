# SPDX-License-Identifier: Apache-2.0
"""What this host writes down of servers and of warm images: it outlives the service."""
