# SPDX-License-Identifier: Apache-2.0
"""Cinder's own test base with our driver under its real volume manager, and real pools and programs
under the driver.
"""

import contextlib
import os
from pathlib import Path
import shutil
import socket
import tempfile
from typing import Any

from cinder import context
from cinder import objects
from cinder.objects import fields
from cinder.tests.unit import fake_constants
from cinder.tests.unit import test
from cinder.tests.unit import utils
from cinder.volume import configuration
from cinder.volume import manager
from cinder.volume import volume_types
from oslo_config import cfg

from cinder_pcow import driver
from pcow_driver.common import conf
from pcow_driver.common import tool
from pcow_driver.images import image
from pcow_driver.images import model
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import registry
from tests.unit import libvirt_node

CONF = cfg.CONF
GROUP = 'pcow-backend'
HOST = f'{socket.gethostname()}@{GROUP}'
FILL = 0xA5


class PcowTestCase(test.TestCase):
    """``self.driver`` has the pools ``one`` and ``two``; ``self.manager`` is the volume manager
    that runs it.
    """

    def setUp(self) -> None:
        super().setUp()
        conf.register_opts(CONF)
        self.directory = tempfile.mkdtemp(prefix='pcow-test-cinder-', dir='/dev/shm')
        self.addCleanup(shutil.rmtree, self.directory)
        for name, value in {
            'state_path': os.path.join(self.directory, 'state'),
            'conversion_dir': self.directory,
            'libvirt_uri': f'test://{self.directory}/none',
        }.items():
            CONF.set_override(name, value, 'pcow')
            self.addCleanup(CONF.clear_override, name, 'pcow')
        os.mkdir(CONF.pcow.state_path)
        self.pools = {
            name: registry.PoolRegistry().create(name, os.path.join(self.directory, name))
            for name in ('one', 'two')
        }
        self.flags(
            host=socket.gethostname(),
            image_conversion_dir=os.path.join(self.directory, 'conversion'),
        )
        self.context = context.RequestContext(
            fake_constants.USER_ID, fake_constants.PROJECT_ID, is_admin=True
        )
        self.type_id = volume_types.create(
            self.context, 'pcow-pmem', {'volume_backend_name': 'pcow'}
        )['id']
        self.driver = self.make_driver()
        self.manager = manager.VolumeManager(host=HOST, service_name=GROUP)
        self.manager.driver = self.driver
        self.driver.set_initialized()
        self.manager.stats = {'allocated_capacity_gb': 0, 'pools': {}}

    def libvirt(self, path: str) -> None:
        """Let there be a libvirt, and a domain of it that has this image."""
        node = Path(self.directory, 'node.xml')
        node.write_text(libvirt_node.xml(path), encoding='utf-8')
        CONF.set_override('libvirt_uri', f'test://{node}', 'pcow')

    def make_driver(self, **options: Any) -> driver.PcowDriver:
        """A driver as cinder-volume makes it at its start."""
        values = configuration.Configuration(manager.volume_backend_opts, config_group=GROUP)
        made = driver.PcowDriver(host=HOST, configuration=values)
        for name, value in {'volume_backend_name': 'pcow', **options}.items():
            CONF.set_override(name, value, GROUP)
            self.addCleanup(CONF.clear_override, name, GROUP)
        made.do_setup(self.context)
        made.check_for_setup_error()
        return made

    def record(self, *, size: int = 1, pool: str = 'one', **values: Any) -> objects.Volume:
        """A volume in Cinder's database, as it is when a driver is asked to make it."""
        values.setdefault('volume_type_id', self.type_id)
        return utils.create_volume(self.context, size=size, host=f'{HOST}#{pool}', **values)

    def volume(self, **values: Any) -> objects.Volume:
        """A volume that the driver has made."""
        made = self.record(status='available', **values)
        self.driver.create_volume(made)
        return made

    def snapshot(self, volume: objects.Volume) -> objects.Snapshot:
        made = self.snapshot_record(volume)
        self.driver.create_snapshot(made)
        return made

    def snapshot_record(self, volume: objects.Volume) -> objects.Snapshot:
        made = utils.create_snapshot(
            self.context,
            volume.id,
            volume_size=volume.size,
            status=fields.SnapshotStatus.AVAILABLE,
            volume_type_id=volume.volume_type_id,
        )
        self.assertEqual(volume.id, made.volume.id)  # loads it
        return made

    def path(self, volume: objects.Volume, pool: str = 'one') -> str:
        return self.pools[pool].image_path(volume.name)

    def write(
        self,
        volume: objects.Volume,
        offset: int,
        fill: int = FILL,
        length: int = 65536,
        *,
        pool: str = 'one',
    ) -> None:
        """Into the data of a volume."""
        self.io(self.path(volume, pool), f'write -q -P {fill} {offset + (2 << 20)} {length}')

    def check_content(
        self,
        volume: objects.Volume,
        content: dict[int, int],
        length: int = 65536,
        *,
        pool: str = 'one',
    ) -> None:
        """What the data of a volume holds, by offset."""
        for offset, fill in content.items():
            self.io(self.path(volume, pool), f'read -q -P {fill} {offset + (2 << 20)} {length}')

    def io(self, path: str, command: str) -> None:
        output = tool.run(tool.find('pcow_io'), '--no-map', '-c', command, path)
        self.assertNotIn('Pattern verification failed', output)

    def files(self, pool: str = 'one') -> list[str]:
        """Images of a pool, and everything in it that is none."""
        return sorted(self.pools[pool].entries())

    def info(self, volume: objects.Volume, pool: str = 'one') -> model.ImageInfo:
        return image.info(self.path(volume, pool))

    def check_pools(self) -> None:
        """No image of any pool has damage or lost space."""
        for pool in self.pools.values():
            for name in pool.entries():
                if name.endswith('.pcow'):
                    self.assertTrue(image.check(os.path.join(pool.path, name)).clean, name)

    @contextlib.contextmanager
    def away(self, pool: pool_module.Pool) -> Any:
        """The directory of a pool is not there, as if its file system was not mounted."""
        Path(pool.path).rename(f'{pool.path}.away')
        try:
            yield
        finally:
            Path(f'{pool.path}.away').rename(pool.path)
