# SPDX-License-Identifier: Apache-2.0
"""What all of it uses: what a flavor asks for, errors, names, values in the metadata of servers."""
