# SPDX-License-Identifier: Apache-2.0
"""Writing images of format 1, the published prototype's, as doc/source/reference/format.rst
describes it.
"""

from pathlib import Path
import struct

PAGE = 4096


def write(
    path: Path,
    clusters: int,
    data: dict[int, bytes],
    *,
    cluster_size: int = 65536,
    base: str = '',
    bitmaps: dict[int, int] | None = None,
) -> None:
    """One segment.

    :param clusters: virtual size in clusters
    :param data: content of each cluster of the guest that the image holds; cluster_size bytes
    :param bitmaps: pages that were copied, where a cluster is not whole
    """
    entries = (cluster_size - 64) // 8
    if len(data) > entries:
        raise ValueError('more than one segment')
    super_cluster = struct.pack('<III4s48s', cluster_size, clusters, 0, b'NBJL', base.encode())
    meta = struct.pack('<I60x', len(data))
    for cluster in data:
        meta += struct.pack('<II', cluster, (bitmaps or {}).get(cluster, 0))
    with path.open('wb') as file:
        file.write(super_cluster.ljust(cluster_size, b'\0'))
        file.write(meta.ljust(cluster_size, b'\0'))
        for content in data.values():
            file.write(content)
        # the prototype makes the file as long as its segment
        file.truncate(cluster_size * (2 + entries))
