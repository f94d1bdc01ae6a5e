# SPDX-License-Identifier: Apache-2.0
"""Volumes of images of Glance, and images of volumes.

An image becomes a template of the pool when it is first needed; every volume of it is a thin image
on that. No parser reads an image that :func:`pcow_driver.templates.template.inspect_source` has not
accepted. Formats are given, and never told from content, which a guest can write. No path is taken
from an image.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from cinder import exception as cinder_exception
from cinder.image import image_utils
from cinder.volume import volume_utils
from oslo_config import cfg
from oslo_log import log as logging

from cinder_pcow import errors
from cinder_pcow import validation
from cinder_pcow import volumes as volumes_module
from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.copies import clone
from pcow_driver.copies import verify
from pcow_driver.copies import view
from pcow_driver.export import nbd
from pcow_driver.pools import device
from pcow_driver.templates import template_cache

LOG = logging.getLogger(__name__)

_CONTAINER = 'bare'
_SIGNATURE = 'img_signature'
_BLOCK_SIZE = '1M'


class Images:
    def __init__(self, volumes: volumes_module.Volumes) -> None:
        self._volumes = volumes

    def clone(
        self, context: Any, volume: Any, image_meta: dict[str, Any], image_service: Any
    ) -> bool:
        """Make a volume on the template of an image.

        :return: False if Cinder has to fetch the image itself: to unpack a compressed one, or to
            verify its signature
        :raises ImageUnacceptable: its format is another one, or its content is not what it says; or
        it is too large :raises VolumeBackendAPIException:
        """
        validation.check_volume(volume)
        properties = image_meta.get('properties') or {}
        if image_meta.get('container_format') != _CONTAINER or (
            cfg.CONF.verify_glance_signatures != 'disabled' and properties.get(_SIGNATURE)
        ):
            return False
        image_id, disk_format = image_meta['id'], str(image_meta.get('disk_format'))
        image_utils.check_image_conversion_disable(disk_format, 'raw', image_id)
        size = volume.size * units.GIB
        source = template_cache.SourceImage(
            image_id,
            image_meta.get('os_hash_value') or image_meta.get('checksum') or '',
            disk_format,
        )

        def fetch(path: str) -> None:
            image_utils.fetch(context, image_service, image_id, path, None, None)

        def accept(needed: int) -> None:
            _check_size(needed, size)

        with _acceptable(image_id):
            pool = self._volumes.backend.pool_of(volume)
            with template_cache.TemplateCache(pool).template(source, fetch, accept) as name:
                clone.on_base(
                    pool, name, pool, volume.name, size, max_chain=self._volumes.max_chain
                )
        return True

    def copy_to_volume(
        self, context: Any, volume: Any, image_service: Any, image_id: str, *, over_data: bool
    ) -> None:
        """Fill a volume with an image that Cinder fetches and inspects.

        :param over_data: the volume may hold data, of which nothing is left; else it is new and
        empty :raises ImageUnacceptable: :raises VolumeBackendAPIException:
        """
        with _acceptable(image_id), _temporary(volume) as raw:
            image_utils.fetch_to_raw(
                context, image_service, image_id, raw, _BLOCK_SIZE, size=volume.size
            )
            _check_size(os.path.getsize(raw), volume.size * units.GIB)
            LOG.info('Image %s is copied to %s', image_id, volume.name)
            path = self._volumes.path(volume)
            window = device.window(path)
            options = ['--target-is-zero']
            if over_data:
                # what lies behind the image becomes zeros, too
                os.truncate(raw, window.size)
                options = []
            with nbd.serve(path, window=window) as uri:
                tool.run(
                    tool.find('qemu_img'),
                    'convert',
                    '-f',
                    'raw',
                    '-O',
                    'raw',
                    '-n',
                    *options,
                    raw,
                    uri,
                )

    def copy_to_image(
        self, context: Any, volume: Any, image_service: Any, image_meta: dict[str, Any]
    ) -> None:
        """Upload what a volume holds at this moment, also while a guest writes to it. What is known
        to be damaged is refused: an image of Glance would say that it is whole.

        :raises ImageConversionNotAllowed:
        :raises VolumeBackendAPIException:
        """
        disk_format = image_meta['disk_format']
        image_utils.check_image_conversion_disable(
            disk_format, 'raw', image_meta['id'], upload=True
        )
        with _temporary(volume) as path:
            with errors.translated():
                pool = self._volumes.backend.locate(volume)
                validation.check_size(pool.existing_path(volume.name), volume)
                verify.check_chain(pool.existing_path(volume.name))
                with view.serve(pool, volume.name, validation.look(volume)) as uri:
                    tool.run(
                        tool.find('qemu_img'),
                        'convert',
                        '-f',
                        'raw',
                        '-O',
                        image_utils.fixup_disk_format(disk_format),
                        uri,
                        path,
                    )
            volume_utils.upload_volume(
                context, image_service, image_meta, path, volume, volume_format=disk_format
            )


def _temporary(volume: Any) -> Any:
    """The path of an empty file; by this end of its name the service knows at its start what it
    left when it died.
    """
    return image_utils.temporary_file(suffix=volume_utils.extract_host(volume.service_topic_queue))


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise exception.InvalidSize(
            size=size,
            reason=f'the volume has {limit} bytes; choose a size of {-(-size // units.GIB)} GiB',
        )


@contextlib.contextmanager
def _acceptable(image_id: str) -> Any:
    try:
        yield
    except (exception.SourceRejected, exception.InvalidSize) as e:
        raise cinder_exception.ImageUnacceptable(image_id=image_id, reason=str(e)) from e
    except exception.PcowError as e:
        raise cinder_exception.VolumeBackendAPIException(data=str(e)) from e
