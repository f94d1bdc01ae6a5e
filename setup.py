# SPDX-License-Identifier: Apache-2.0
import os
import sys

import setuptools

# setup.cfg names a command of this package, and pip's isolated build does not look where it is.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
setuptools.setup(setup_requires=['pbr>=6.0.0'], pbr=True)
