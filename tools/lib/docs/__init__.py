# SPDX-License-Identifier: Apache-2.0
"""What the build of the documentation makes of other files: pictures of text, pages of code.

No module here but ``extension`` needs Sphinx.
"""
