# SPDX-License-Identifier: Apache-2.0
"""Guests that boot from a disk image on an NVDIMM through the boot shim."""

from __future__ import annotations

import dataclasses
from pathlib import Path
import subprocess
from typing import ClassVar

from pcow_driver.common import conf
from pcow_driver.images import info_block
from pcow_driver.templates import template
from pcow_driver.virt import boot
from tests.functional import linux_guest
from tests.functional import test_qemu_backend as backend
from tools.lib.quickstart import guest
from tools.lib.quickstart import state
from tools.lib.quickstart import teardown

MEMORY = 256
GRUBENV = 1024  # bytes of that file
BOOT_SECONDS = 900  # of two kernels, one after the other
SLOW = 600  # a command of Debian's, under emulation


@dataclasses.dataclass(frozen=True)
class Shim:
    kernel: Path
    initrd: Path


class BootTestCase(backend.QemuTestCase):
    cache: ClassVar[guest.Cache]  # of what the images are made of

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        teardown.reap()
        run = state.Run.create()
        cls.addClassCleanup(teardown.tear_down, run)
        cls.cache = guest.Cache(run)

    def setUp(self) -> None:
        super().setUp()
        conf.CONF([], project='pcow', default_config_files=[])
        start = boot.shim()
        assert start.initrd is not None
        self.shim = Shim(Path(start.kernel), Path(start.initrd))

    def make_image_of(
        self,
        disk: Path,
        disk_format: str,
        root_offset: int = 0,
        configuration: str | None = None,
        environment: str = '',
        align: bool = False,
    ) -> None:
        """
        :param root_offset: of an ext4 root in the disk, for ``configuration``
        :param configuration: for the file grub.cfg
        :param environment: beside that, for grubenv: lines NAME=VALUE
        :param align: as ``pcowctl template build --align``
        """
        namespace, place = self.directory / 'namespace', self.directory / 'inside'
        source = template.inspect_source(str(disk), disk_format)
        if align:
            source = template.aligned(source, str(self.directory))
        total = template.virtual_size(source.disk_size, info_block.PageMap.RAM)
        template.write_namespace(str(namespace), source, total, info_block.PageMap.RAM)
        if configuration is not None:
            offset = info_block.data_offset(total, info_block.PageMap.RAM) + root_offset
            place.mkdir()
            subprocess.run(['mount', '-o', f'loop,offset={offset}', namespace, place], check=True)
            try:
                (place / 'boot/grub/grub.cfg').write_text(configuration)
                if environment:
                    block = f'# GRUB Environment Block\n{environment}'.ljust(GRUBENV, '#')
                    (place / 'boot/grub/grubenv').write_text(block)
            finally:
                subprocess.run(['umount', place], check=True)
        backend.tool('pcow-img', 'convert', '-f', 'raw', '-O', 'pcow', namespace, self.image)
        namespace.unlink()

    def start(
        self,
        more: str = '',
        ready: bytes = rb'pcow-ready\r?\n',
        cpus: int = 1,
        memory: int = MEMORY,
        device: tuple[str, ...] = backend.DEVICE,
    ) -> linux_guest.LinuxGuest:
        return linux_guest.LinuxGuest(
            self.shim,
            self.directory,
            *('-object', f'memory-backend-file,id=mem0,mem-path={self.image},share=on'),
            *device,
            # the console is named before that
            more=f'{boot.SHIM_CMDLINE.removeprefix("console=ttyS0 quiet ")} {more}',
            memory=memory,
            ready=ready,
            boot_seconds=BOOT_SECONDS,
            cpus=cpus,
        )

    def stop(self, vm: linux_guest.LinuxGuest) -> None:
        vm.run('mount -o remount,ro /')
        vm.quit()
