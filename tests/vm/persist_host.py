# SPDX-License-Identifier: Apache-2.0
"""The root file system of the host of tests/vm/persist.py."""

from __future__ import annotations

from pathlib import Path

from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.images import info_block
from pcow_driver.templates import template
from tests.vm import confinement
from tests.vm import persist
from tests.vm import tree
from tools.lib.quickstart import cpio
from tools.lib.quickstart import guest
from tools.lib.quickstart import state

_FUNCTIONAL = tree.TOP / 'tests/functional'
_OUTER = Path(__file__).parent / 'outer'
_BUSYBOX = Path('/bin/busybox')
_MODULES = ('nfit', 'nd_pmem', 'ext4')
_SERVICES = ('pcow-fixate.service', 'pcow-protect.service')
_PROGRAMS = (
    *('env', 'sh', 'true', 'mount', 'umount', 'blkid', 'wipefs', 'dd', 'prlimit', 'qemu-img'),
    *('ndctl', 'mkfs.ext4', 'mkfs.xfs', 'xfs_io', 'systemctl', 'libvirtd', 'virsh'),
    'apparmor_parser',
)
_PCOWCTL = """\
#!/bin/sh
export PYTHONPATH=/suite:/suite/site PATH=/usr/local/bin:/usr/bin:/sbin
exec /usr/bin/python3 -B -c 'import sys; from pcow_driver.cli import app
sys.exit(app.main(sys.argv[1:]))' "$@"
"""
# Debian's, without the services around it
_LIBVIRTD = """\
[Unit]
Before=libvirt-guests.service
After=local-fs.target
[Service]
Type=notify
Environment=PATH=/usr/local/bin:/usr/sbin:/usr/bin
ExecStart=/usr/sbin/libvirtd
KillMode=process
Restart=on-failure
RuntimeDirectory=libvirt
RuntimeDirectoryPreserve=yes
"""
_QEMU_CONF = """\
security_driver = "none"
user = "root"
group = "root"
stdio_handler = "file"
cgroup_controllers = []
namespaces = []
"""
_LIBVIRTD_CONF = 'log_outputs = "3:file:/var/log/libvirtd.log"\n'
# there is no journal
_DROP_IN = f"""\
[Service]
StandardOutput=append:{persist.LOG}
StandardError=append:{persist.LOG}
"""
_DIRECTORIES = ('var/lib/libvirt/qemu', 'var/cache/libvirt/qemu', 'var/log/libvirt/qemu')
_SHUTDOWN_UNITS = ('poweroff.target', 'systemd-poweroff.service')


def _text(made: tree.Tree, target: str, text: str, mode: int = 0o644) -> None:
    path = made.directory / target
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def _add_guest(made: tree.Tree, run: state.Run, binaries: Path) -> None:
    """The guest of tests/functional, and what its NVDIMM begins with."""
    work = made.directory.with_name('guest')
    work.mkdir()
    program, plain, disk, namespace = (
        work / name for name in ('memory-check', 'plain', 'disk.qcow2', 'namespace')
    )
    source = _FUNCTIONAL / 'guest/memory-check.c'
    tool.run('/usr/bin/cc', '-static', '-O2', '-o', str(program), str(source))
    kernel, files = guest.prepare_kernel(guest.Cache(run), _MODULES)
    files |= {
        'init': _FUNCTIONAL / 'guest/init',
        'pcow/busybox': _BUSYBOX,
        'pcow/memory-check': program,
    }
    initrd = work / 'initrd'
    initrd.write_bytes(cpio.archive(files))
    made.add(kernel, persist.KERNEL)
    made.add(initrd, persist.INITRD)
    options = ('-q', '-b', '4096', '-m', '0', '-E', 'lazy_itable_init=0')
    tool.run('/sbin/mkfs.ext4', *options, str(plain), '56M')
    tool.run(*(tool.find('qemu_img'), 'convert', '-f', 'raw', '-O', 'qcow2', str(plain), str(disk)))
    inspected = template.inspect_source(str(disk), 'qcow2')
    size = template.virtual_size(inspected.virtual_size, info_block.PageMap.RAM)
    template.write_namespace(str(namespace), inspected, size, info_block.PageMap.RAM)
    image = work / 'nvdimm.pcow'
    words = ('convert', '-f', 'raw', '-O', 'pcow', str(namespace), str(image))
    tool.run(str(binaries / 'pcow-img'), *words)
    # its holes stay
    target = made.directory / persist.NVDIMM.lstrip('/')
    target.parent.mkdir(parents=True, exist_ok=True)
    tool.run('/bin/cp', '--sparse=always', str(image), str(target))
    for path in work.iterdir():
        path.unlink()
    work.rmdir()


def host_tree(directory: Path, run: state.Run, binaries: Path, udev: Path) -> tree.Tree:
    made = tree.Tree(directory)
    for name in ('pcow-img', 'pcow-io', 'qemu-system-x86_64'):
        made.add_program(binaries / name, f'/usr/local/bin/{name}')
    made.add_programs(_PROGRAMS)
    made.add_libvirt()
    made.add(tree.TOP / confinement.HOOK, confinement.HOOK_TARGET)
    for name in _SERVICES:
        made.add(tree.TOP / 'etc/systemd/system' / name, f'/etc/systemd/system/{name}')
        _text(made, f'etc/systemd/system/{name}.d/log.conf', _DROP_IN)
    _text(made, 'usr/local/bin/pcowctl', _PCOWCTL, 0o755)
    _text(made, 'etc/systemd/system/libvirtd.service', _LIBVIRTD)
    wants = made.directory / 'etc/systemd/system/multi-user.target.wants'
    wants.mkdir()
    (wants / 'libvirtd.service').symlink_to('../libvirtd.service')
    _text(made, 'etc/libvirt/qemu.conf', _QEMU_CONF)
    _text(made, 'etc/libvirt/libvirtd.conf', _LIBVIRTD_CONF)
    for name in _DIRECTORIES:
        (made.directory / name).mkdir(parents=True, exist_ok=True)
    made.add(_BUSYBOX, '/suite/busybox')
    for name in ('boot-suite', 'vm-test.service'):
        made.add(_OUTER / name, f'/suite/{name}')
    made.add_systemd(udev, *_SHUTDOWN_UNITS)
    made.add_firmware()
    made.add_python()
    made.add_pcowctl()
    made.add_packages('libvirt-python')
    made.add_tests('functional/moments', 'vm/persist')
    _add_guest(made, run, binaries)
    return made


ROOM = 256 * units.MIB  # of its file system for what it writes, and its journal
