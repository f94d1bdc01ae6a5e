# SPDX-License-Identifier: Apache-2.0
"""Images that stand for a checkpoint of a server, from which others go on."""
