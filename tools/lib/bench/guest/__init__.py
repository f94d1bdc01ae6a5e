# SPDX-License-Identifier: Apache-2.0
"""A guest with the same file system on pcow, on a raw NVDIMM and on qcow2, for
:mod:`tools.lib.bench.commands.guest`.
"""
