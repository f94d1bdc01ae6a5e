# SPDX-License-Identifier: Apache-2.0
"""Times of the same operations with Cinder's NFS driver (qcow2 files, snapshots on) and with ours,
in one run on one file system.

The share is a directory of the same tmpfs as the pools, bound to where the driver mounts: there is
no network between, so the NFS driver is faster here than it is anywhere else. PCOW_TEST_VOLUME_GIB
is the size of the volumes (10 for the figures of the documentation), PCOW_TEST_VOLUME_DATA_GIB how
much of it is data, which cannot be compressed; a tenth if not given. build/logs/volume-times.json
has the figures.
"""

from collections.abc import Callable
import functools
import hashlib
import json
import os
from pathlib import Path
import shutil
import subprocess
import tempfile
import time
from typing import Any

from cinder import privsep
from cinder.volume import volume_utils
from oslo_concurrency import processutils
from oslo_utils import importutils

from pcow_driver.common import units
from pcow_driver.images import image
from tests.unit.cinder_pcow import base
from tests.unit.cinder_pcow import test_images

SIZE = int(os.environ.get('PCOW_TEST_VOLUME_GIB', '1'))
DATA = float(os.environ.get('PCOW_TEST_VOLUME_DATA_GIB', SIZE / 10))
LOGS = Path(__file__).resolve().parents[3] / 'build' / 'logs'
ROWS = (
    'create from image, first',
    'create from image, second',
    'snapshot',
    'volume from snapshot',
    'clone',
    'revert',
)


class TimesTest(base.PcowTestCase):
    def setUp(self) -> None:
        super().setUp()
        # we are root, so nothing needs a daemon that is
        privsep.sys_admin_pctxt.set_client_mode(False)
        self.addCleanup(privsep.sys_admin_pctxt.set_client_mode, True)
        self.service = test_images.ImageService(os.path.join(self.directory, 'glance'))
        raw, qcow2 = Path(self.directory, 'disk.raw'), Path(self.directory, 'disk.qcow2')
        with open(raw, 'wb') as file:
            for _number in range(int(DATA * units.GIB) // units.MIB):
                file.write(os.urandom(units.MIB))
            file.truncate(SIZE * units.GIB)
        subprocess.run(
            ['qemu-img', 'convert', '-q', '-O', 'qcow2', str(raw), str(qcow2)], check=True
        )
        self.sum = _sum(raw)
        raw.unlink()
        self.meta = self.service.add(qcow2, 'qcow2')
        qcow2.unlink()
        self.stock = self.make_stock_driver()

    def make_stock_driver(self) -> Any:
        share = os.path.join(self.directory, 'share')
        os.mkdir(share)
        group, nfs = 'nfs', importutils.import_module('cinder.volume.drivers.nfs')
        manager, configuration = (
            importutils.import_module(f'cinder.volume.{name}')
            for name in ('manager', 'configuration')
        )
        values = configuration.Configuration(
            [*manager.volume_backend_opts, *nfs.nfs_opts, *nfs.remotefs.nas_opts],
            config_group=group,
        )
        mounts = tempfile.mkdtemp(prefix='pcow-test-nfs-')  # Cinder makes no files below /dev
        self.addCleanup(shutil.rmtree, mounts)
        list_of_shares = os.path.join(self.directory, 'shares')
        Path(list_of_shares).write_text('127.0.0.1:/share\n')
        programs = os.path.join(self.directory, 'bin')
        os.mkdir(programs)
        Path(programs, 'mount.nfs').write_text('#!/bin/sh\n')  # the driver asks whether it is there
        Path(programs, 'mount.nfs').chmod(0o755)
        path, os.environ['PATH'] = os.environ['PATH'], f'{programs}:{os.environ["PATH"]}'
        self.addCleanup(os.environ.__setitem__, 'PATH', path)
        for name, value in {
            'nfs_shares_config': list_of_shares,
            'nfs_mount_point_base': mounts,
            'nfs_qcow2_volumes': True,
            'nfs_snapshot_support': True,
            'nas_secure_file_operations': 'false',
            'nas_secure_file_permissions': 'false',
        }.items():
            base.CONF.set_override(name, value, group)
            self.addCleanup(base.CONF.clear_override, name, group)
        made = nfs.NfsDriver(host=f'{base.HOST}-nfs', configuration=values, execute=_execute)
        point = made._get_mount_point_for_share('127.0.0.1:/share')
        os.makedirs(point)
        subprocess.run(['mount', '--bind', share, point], check=True)
        self.addCleanup(subprocess.run, ['umount', point], check=True)
        made.do_setup(self.context)
        made.check_for_setup_error()
        made._ensure_shares_mounted()
        made.set_initialized()
        return made

    def from_image(self, driver: Any) -> Any:
        """As the flow of Cinder's manager does it."""
        volume = self.record(size=SIZE, status='downloading')
        _update, cloned = driver.clone_image(self.context, volume, None, self.meta, self.service)
        if not cloned:
            volume.update(driver.create_volume(volume) or {})
            volume.save()
            driver.copy_image_to_volume(self.context, volume, self.service, self.meta['id'])
        self.ready(volume)
        return volume

    @staticmethod
    def ready(volume: Any, update: Any = None) -> Any:
        volume.update({**(update or {}), 'status': 'available'})
        volume.save()
        return volume

    def times(
        self, driver: Any, revert: Callable[[Any, Any], None], content: Callable[[Any], str]
    ) -> dict[str, float]:
        took: dict[str, float] = {}

        def timed(row: str, operation: Callable[[], Any]) -> Any:
            os.sync()
            begun = time.monotonic()
            result = operation()
            took[row] = time.monotonic() - begun
            return result

        timed(ROWS[0], lambda: self.from_image(driver))
        volume = timed(ROWS[1], lambda: self.from_image(driver))
        self.assertEqual(self.sum, content(volume))
        snapshot = self.snapshot_record(volume)
        timed(ROWS[2], lambda: driver.create_snapshot(snapshot))
        for row, create, source in (
            (ROWS[3], driver.create_volume_from_snapshot, snapshot),
            (ROWS[4], driver.create_cloned_volume, volume),
        ):
            made = self.record(size=SIZE)
            update = timed(row, functools.partial(create, made, source))
            self.assertEqual(self.sum, content(self.ready(made, update)))
            driver.delete_volume(made)
        timed(ROWS[5], lambda: revert(volume, snapshot))
        self.assertEqual(self.sum, content(volume))
        return took

    def revert_generic(self, volume: Any, snapshot: Any) -> None:
        """What Cinder's manager does for a driver that has no revert of its own: a volume of the
        snapshot is copied back.
        """
        made = self.record(size=SIZE)
        self.ready(made, self.stock.create_volume_from_snapshot(made, snapshot))
        target = f'{self.stock.local_path(volume)}.revert'
        volume_utils.copy_volume(
            self.stock.local_path(made),
            target,
            os.path.getsize(self.stock.local_path(made)) // units.MIB + 1,
            '1M',
            sparse=True,
        )
        os.unlink(target)
        self.stock.delete_volume(made)

    def content_stock(self, volume: Any) -> str:
        raw = Path(self.directory, 'content')
        path = os.path.join(
            self.stock._local_volume_dir(volume), self.stock.get_active_image_from_info(volume)
        )
        subprocess.run(['qemu-img', 'convert', '-q', '-O', 'raw', path, str(raw)], check=True)
        return _sum(raw)

    def content_ours(self, volume: Any) -> str:
        raw = Path(self.directory, 'content')
        if raw.exists():
            raw.unlink()
        image.convert(self.path(volume), image.FORMAT, str(raw), 'raw')
        return _sum(raw, 2 * units.MIB)

    def test_beside_the_nfs_driver(self) -> None:
        ours = self.times(
            self.driver,
            lambda volume, snapshot: self.driver.revert_to_snapshot(self.context, volume, snapshot),
            self.content_ours,
        )
        stock = self.times(self.stock, self.revert_generic, self.content_stock)
        LOGS.mkdir(parents=True, exist_ok=True)
        figures = {
            row: {
                'pcow_s': round(ours[row], 3),
                'nfs_qcow2_s': round(stock[row], 3),
                'ratio': round(ours[row] / stock[row], 4),
            }
            for row in ROWS
        }
        text = json.dumps({'volume_gib': SIZE, 'data_gib': DATA, 'rows': figures}, indent=1)
        (LOGS / 'volume-times.json').write_text(f'{text}\n')
        for row in ROWS[3:]:  # what copies there, and does not here
            self.assertLess(ours[row], stock[row], figures)


def _execute(*command: str, run_as_root: bool = False, **options: Any) -> tuple[str, str]:
    """The test is root already."""
    options.pop('root_helper', None)
    output: tuple[str, str] = processutils.execute(*command, **options)
    return output


def _sum(path: Path, offset: int = 0) -> str:
    """Of what is not zero and where it is: a volume is mostly holes, which another driver may have
    filled.
    """
    digest, end = hashlib.sha256(), os.path.getsize(path)
    with open(path, 'rb') as file:
        position = offset
        while (position := _data_from(file.fileno(), position, end)) < end:
            position -= (position - offset) % units.MIB
            chunk = os.pread(file.fileno(), units.MIB, position)
            if chunk.strip(b'\0'):
                digest.update(b'%d ' % (position - offset) + chunk)
            position += units.MIB
    return digest.hexdigest()


def _data_from(fd: int, position: int, end: int) -> int:
    try:
        return os.lseek(fd, position, os.SEEK_DATA)
    except OSError:  # nothing but holes follows
        return end
