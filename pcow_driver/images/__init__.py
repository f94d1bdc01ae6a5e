# SPDX-License-Identifier: Apache-2.0
"""Image files by themselves: pcow-img as calls and typed values, their locks and protection, the
info block of an NVDIMM.
"""
