# SPDX-License-Identifier: Apache-2.0
"""The boot shim: a kernel of our configuration, and an initramfs with our two programs.

python3 -m tools.lib.boot_shim [--update] PROGRAMS DIRECTORY: PROGRAMS has pcow-boot-shim and
pcow-first-init; DIRECTORY gets kernel, initrd, config (the kernel's) and version.
"""

from __future__ import annotations

import argparse
from pathlib import Path
import subprocess
import tempfile

from tools.lib import boot_kernel
from tools.lib.quickstart import cpio


def _write(directory: Path, contents: dict[str, bytes]) -> None:
    """Replace files at once, whatever the umask is: a guest may be starting from them, as QEMU's
    user.
    """
    directory.chmod(0o755)
    parts = {}
    for name, data in contents.items():
        parts[name] = directory / f'.{name}.part'
        parts[name].write_bytes(data)
        parts[name].chmod(0o644)
    for name, part in parts.items():
        part.replace(directory / name)


def build(programs: Path, target: Path, *, update: bool = False) -> None:
    """Write kernel, initrd, config and version into ``target``.

    :param update: of the kernel, see boot_kernel.kernel()
    """
    kernel, version = boot_kernel.kernel(update=update)
    files = {}
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target, prefix='.part-') as directory:
        for program, place in (('pcow-boot-shim', 'init'), ('pcow-first-init', 'first-init')):
            files[place] = Path(directory, place)
            subprocess.run(['strip', '-o', files[place], programs / program], check=True)
        initrd = cpio.archive(files)
    contents = {
        'initrd': initrd,
        'kernel': (kernel / 'vmlinuz').read_bytes(),
        'config': (kernel / 'config').read_bytes(),
        'version': f'{version}\n'.encode(),
    }
    _write(target, contents)


if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--update', action='store_true')
    parser.add_argument('programs', type=Path)
    parser.add_argument('target', type=Path)
    options = parser.parse_args()
    build(options.programs, options.target, update=options.update)
