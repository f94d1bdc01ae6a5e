# SPDX-License-Identifier: Apache-2.0
"""What all of the driver stands on: options, errors, names, sizes, locks, and the programs that it
runs.
"""
