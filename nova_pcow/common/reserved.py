# SPDX-License-Identifier: Apache-2.0
"""Names of the snapshots that the driver itself makes in the images of servers; administrators give
theirs other names.
"""

PREFIX = 'nova-'
# -ID of Nova's migration; until that is confirmed or reverted
RESIZE = f'{PREFIX}resize'
# of an image whose copy is on another host, until the move is confirmed or reverted
SENT = f'{PREFIX}sent'
# what a suspended server resumes from; libvirt knows it as well
SUSPENDED = f'{PREFIX}suspended'
UPLOAD_PREFIX = f'{PREFIX}image-'  # while it is made an image of Glance's
# -ID of an image of Glance's: the checkpoint that it stands for
WARM_PREFIX = f'{PREFIX}warm-'
