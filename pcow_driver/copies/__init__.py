# SPDX-License-Identifier: Apache-2.0
"""Images made from others: clones, forks, exports, consistent views, and their way to
another host.
"""
