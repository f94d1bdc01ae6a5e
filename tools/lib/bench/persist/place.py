# SPDX-License-Identifier: Apache-2.0
"""The guest, libvirt and the pool with which it is measured; pcow_driver works on them as it does
in pcowctl.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any

from pcow_driver.common import conf
from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.virt import domain_xml
from pcow_driver.virt import libvirt_host
from pcow_driver.virt import libvirt_xml
from tools.lib.quickstart import cpio
from tools.lib.quickstart import guest
from tools.lib.quickstart import libvirtd
from tools.lib.quickstart import orphans
from tools.lib.quickstart import state
from tools.lib.quickstart import teardown
from tools.lib.quickstart import vm
from tools.lib.quickstart import workplace

CMDLINE = 'console=ttyS0 quiet panic=-1 no_timer_check'
BOOT_SECONDS = 300.0
ROOM = 128  # MiB of its RAM that the guest needs besides
_HERE = Path(__file__).parent
_NVDIMM = 16 * units.MIB  # a domain has one; the guest leaves it alone


@dataclasses.dataclass(frozen=True)
class Place:
    run: state.Run
    workplace: workplace.Workplace
    daemon: libvirtd.Libvirtd
    libvirtd_pid: int
    connection: Any
    kernel: Path
    initrd: Path
    program: Path  # for the host

    def image(self, name: str, size: int) -> Path:
        """:param size: bytes"""
        path = self.workplace.image_path(name)
        image.create(str(path), size)
        return path

    @contextlib.contextmanager
    def vm(self, name: str, memory: int) -> Iterator[vm.Vm]:
        """A domain that has booted; nothing of it is left.

        :param memory: MiB
        """
        paths = [
            self.image(f'{name}-{memory}', _NVDIMM),
            self.image(f'{name}-{memory}-ram', memory * units.MIB),
        ]
        spec = domain_xml.Domain(
            name=f'{self.run.domain_name}-{name}-{memory}',
            memory=memory * units.MIB,
            nvdimms=[libvirt_xml.Nvdimm(path=str(paths[0]), size=_NVDIMM)],
            kernel=str(self.kernel),
            initrd=str(self.initrd),
            cmdline=CMDLINE,
            emulator=tool.find('emulator', build_first=True),
            ram=str(paths[1]),
        )
        made = vm.Vm(self.connection, spec, self.run.directory / f'{name}-{memory}.console')
        try:
            made.boot(BOOT_SECONDS)
            yield made
        finally:
            made.remove()
            for path in paths:
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def prepared() -> Iterator[Place]:
    """:raises PcowError: not as root; or a part of it is missing"""
    if os.geteuid() != 0:
        raise exception.PcowError(reason='making the guest needs root: run it as root')
    teardown.reap()
    run = state.Run.create()
    try:
        os.chdir('/')
        program = run.directory / 'program'
        tool.run('/usr/bin/cc', '-static', '-O2', '-o', str(program), str(_HERE / 'program.c'))
        kernel, files = guest.prepare_kernel(guest.Cache(run), guest.MODULES)
        files |= {
            'init': _HERE / 'init',
            'pcow/busybox': Path('/bin/busybox'),
            'pcow/program': program,
        }
        initrd = run.directory / 'initrd'
        initrd.write_bytes(cpio.archive(files))
        daemon = libvirtd.Libvirtd(run.directory)
        daemon.install_hook()
        made = workplace.Workplace(run, daemon.uri)
        conf.CONF(['--config-file', str(made.config)], project='pcow')
        made.make_pool(None)
        with orphans.adopted():
            process = daemon.start()
            with libvirt_host.connect() as connection:
                yield Place(run, made, daemon, process.pid, connection, kernel, initrd, program)
    finally:
        teardown.tear_down(run)
