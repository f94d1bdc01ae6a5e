# SPDX-License-Identifier: Apache-2.0
"""Root works on the pool of a service, which has put a link where an image is expected: what the
link leads to is neither read nor changed.
"""

from __future__ import annotations

from collections.abc import Callable
import hashlib
import inspect
import os
from pathlib import Path
from typing import Any

from pcow_driver.common import exception
from pcow_driver.images import image
from pcow_driver.pools import pool as pool_module
from pcow_driver.snapshots import attached
from pcow_driver.snapshots import trash
from pcow_driver.templates import template_cache
from tests.unit.pcow_driver import base

SERVICE = 65534
SIZE = 4 << 20
REFUSED = (exception.ImageNotFound, exception.ImageExists, exception.ToolFailed)
# are given no image, or (measure) one of another format
OTHERS = {'list_directory', 'total', 'check_virtual_size', 'probe', 'measure'}


class LinksOfServicesTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        self.configure(pcow_img=str(programs / 'pcow-img'))
        self.mine, self.other = (
            pool_module.make(name, str(self.directory / name)) for name in ('mine', 'other')
        )
        self.template = self.other.create_image('t', size=SIZE)
        image.seal(self.template)
        self.volume = self.other.create_image('v', size=SIZE)
        image.snapshot_create(self.volume, 's')
        self.links = {
            self.link('t', self.template): self.template,
            self.link('v', self.volume): self.volume,
        }
        self.link('gone', str(self.directory / 'nothing'))
        os.chown(self.mine.path, SERVICE, SERVICE)

    def link(self, name: str, target: str) -> str:
        path = self.mine.image_path(name)
        os.symlink(target, path)
        os.chown(path, SERVICE, SERVICE, follow_symlinks=False)
        return path

    def state(self) -> dict[str, Any]:
        """Of the other pool."""
        return {
            path.name: (
                path.stat().st_mode,
                path.stat().st_mtime_ns,
                path.stat().st_uid,
                hashlib.sha256(path.read_bytes()).hexdigest(),
            )
            for path in Path(self.other.path).iterdir()
        }

    def calls(self, path: str) -> dict[str, list[Callable[[], object]]]:
        """Of each function of images.image that is given images."""
        new = str(self.directory / 'mine/new.pcow')
        return {
            'create': [lambda: image.create(path, SIZE)],
            'create_overlay': [
                lambda: image.create_overlay(path, self.template),
                lambda: image.create_overlay(new, path),
                lambda: image.create_overlay(new, path, base_snapshot='s'),
            ],
            'info': [lambda: image.info(path), lambda: image.info(path, force_share=True)],
            'chain': [lambda: image.chain(path)],
            'check': [
                lambda: image.check(path),
                lambda: image.check(path, repair=True, accept_loss=True),
            ],
            'check_data': [lambda: image.check_data(path)],
            'checksum': [lambda: image.checksum(path, 's')],
            'map_extents': [lambda: image.map_extents(path)],
            'snapshot_list': [lambda: image.snapshot_list(path)],
            'mark_arriving': [lambda: image.mark_arriving(path)],
            'snapshot_create': [lambda: image.snapshot_create(path, 'new')],
            'snapshot_revert': [lambda: image.snapshot_revert(path, 's')],
            'snapshot_delete': [lambda: image.snapshot_delete(path, 's')],
            'snapshot_unpin': [lambda: image.snapshot_unpin(path, 's')],
            'snapshot_rename': [lambda: image.snapshot_rename(path, 's', 'new')],
            'convert': [
                lambda: image.convert(path, 'pcow', new),
                lambda: image.convert(self.template, 'pcow', path),
            ],
            'resize': [lambda: image.resize(path, 2 * SIZE)],
            'rebase': [
                lambda: image.rebase(path, self.template),
                lambda: image.rebase(path, None, unsafe=True),
            ],
            'commit': [lambda: image.commit(path)],
            'compare': [
                lambda: image.compare(path, 'pcow', self.template, 'pcow'),
                lambda: image.compare(self.template, 'pcow', path, 'pcow'),
            ],
            'seal': [lambda: image.seal(path)],
            'unseal': [lambda: image.unseal(path)],
        }

    def refuse(self, call: Callable[..., object], *arguments: object) -> None:
        try:
            call(*arguments)
        except REFUSED:
            return
        self.fail(f'{call} {arguments} was not refused')

    def test_each_call_on_an_image(self) -> None:
        before = self.state()
        for path in (*self.links, self.mine.image_path('gone')):
            for calls in self.calls(path).values():
                for call in calls:
                    self.refuse(call)
        self.assertEqual(before, self.state())
        public = {
            name
            for name, value in inspect.getmembers(image, inspect.isfunction)
            if not name.startswith('_')
        }
        self.assertEqual(public - OTHERS, set(self.calls('')))

    def test_deletions(self) -> None:
        before = self.state()
        for name in ('t', 'v', 'gone'):
            for snapshot in (None, 's'):
                # who has the pool may say that it was deleted before
                trash._mark(self.mine, trash.Mark(name, snapshot))
        for name in ('t', 'v', 'gone'):
            trash.collect_snapshot(self.mine, name, 's')
            self.assertTrue(trash.delete_snapshot(self.mine, name, 's'))
            self.assertTrue(trash.delete_image(self.mine, name))
            trash.collect(self.mine)
        self.assertEqual(before, self.state())
        self.assertEqual([], trash.marks(self.mine))

    def test_deletions_behind_a_link_of_root(self) -> None:
        """Such a link is no image of the pool either."""
        for path in self.links:
            os.chown(path, 0, 0, follow_symlinks=False)
        self.test_deletions()

    def test_marks_in_another_directory(self) -> None:
        elsewhere = self.directory / 'elsewhere'
        elsewhere.mkdir()
        Path(self.mine.path, trash.DIRECTORY).symlink_to(elsewhere)
        self.assertRaises(exception.PoolInvalid, trash.mark_snapshot, self.mine, 'v', 's')
        self.assertEqual([], os.listdir(elsewhere))
        key = Path(trash._mark_path(self.mine, trash.Mark('v', 's'))).name
        (elsewhere / key).touch()
        trash.keep_snapshot(self.mine, 'v', 's')
        self.assertEqual([key], os.listdir(elsewhere))

    def test_other_users_of_an_image(self) -> None:
        before, cache = self.state(), template_cache.TemplateCache(self.mine)
        for path, name in zip(self.links, ('t', 'v'), strict=True):
            self.refuse(attached.snapshot_create, path, 'new')
            self.refuse(attached.snapshot_delete, path, 's')
            self.refuse(attached.snapshot_rename, path, 's', 'new')
            with cache.named(name, lambda: None):
                pass
        self.assertEqual(before, self.state())

    def test_link_of_root(self) -> None:
        """It works as it did."""
        path = self.mine.image_path('v')
        os.chown(path, 0, 0, follow_symlinks=False)
        self.assertEqual(['s'], [one.name for one in image.snapshot_list(path)])
        image.snapshot_create(path, 'new')
        self.assertEqual(['s', 'new'], [one.name for one in image.snapshot_list(self.volume)])
