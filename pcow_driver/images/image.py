# SPDX-License-Identifier: Apache-2.0
"""Images and chains, through pcow-img.

Paths are handed on as absolute ones, so that no name can be taken for an option or a protocol;
formats are always given, never guessed. Every function raises ToolFailed with what pcow-img said,
ToolNotFound if it is not there, and ToolOutputInvalid if it speaks another dialect.
"""

from collections.abc import Iterator
import contextlib
import os
from typing import Any

from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.images import model
from pcow_driver.images import protection

FORMAT = 'pcow'
FORMAT_1 = 'pcow1'


def _run(*args: str, ok_exit_codes: tuple[int, ...] = (0,)) -> str:
    return tool.run(tool.find('pcow_img'), *args, ok_exit_codes=ok_exit_codes)


def _json(*args: str, ok_exit_codes: tuple[int, ...] = (0,)) -> Any:
    command, *rest = args
    return tool.run_json(
        tool.find('pcow_img'), command, '--output=json', *rest, ok_exit_codes=ok_exit_codes
    )


def _array(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise exception.ToolOutputInvalid(tool='pcow-img', reason=f'{what} is not an array')
    return value


@contextlib.contextmanager
def _refused_for_damage() -> Iterator[None]:
    """Exit code 2 of what makes checksums.

    :raises ChecksumsRefused:
    """
    try:
        yield
    except exception.ToolFailed as e:
        if e.details['exit_code'] != 2:
            raise
        raise exception.ChecksumsRefused(**e.details) from e


def _existing(path: str) -> str:
    """The absolute path of a file that is there.

    :raises ImageNotFound:
    """
    path = os.path.abspath(path)
    if not os.path.exists(path):
        raise exception.ImageNotFound(path=path)
    return path


def check_virtual_size(size: int) -> int:
    """Return ``size`` if an image may have it.

    :raises InvalidSize:
    """
    if size <= 0 or size % units.SLAB_SIZE:
        raise exception.InvalidSize(
            size=size,
            reason=f'sizes are multiples of 2 MiB; the next one is '
            f'{units.round_up(max(size, 1), units.SLAB_SIZE)}',
        )
    if size > units.MAX_VIRTUAL_SIZE:
        raise exception.InvalidSize(size=size, reason='the largest image has 16 TiB')
    return size


def create(path: str, size: int, *, cluster_size: int | None = None) -> None:
    """Make an empty image of ``size`` bytes, a multiple of 2 MiB.

    :raises ImageExists: ``path`` is there already
    :raises InvalidSize:
    """
    _create(path, check_virtual_size(size), cluster_size, [], {})


def create_overlay(
    path: str,
    base: str,
    *,
    size: int | None = None,
    base_snapshot: str | None = None,
    base_format: str = FORMAT,
    cluster_size: int | None = None,
) -> None:
    """Make a thin image on ``base``, which lies in the same directory.

    :param size: virtual size in bytes; that of the base if not given
    :param base_snapshot: snapshot of the base to stand on, rather than its active layer
    :param base_format: FORMAT or FORMAT_1
    :raises ImageExists: ``path`` is there already
    :raises ImageNotFound: ``base`` is not there
    :raises InvalidSize:
    """
    virtual_size, arguments = (
        None if size is None else check_virtual_size(size),
        ['-b', _existing(base), '-F', base_format],
    )
    if base_snapshot is None:
        _create(path, virtual_size, cluster_size, arguments, {})
    else:
        with protection.lifted(base):  # the snapshot is marked in it
            _create(path, virtual_size, cluster_size, arguments, {'base_snapshot': base_snapshot})


def _create(
    path: str, size: int | None, cluster_size: int | None, args: list[str], options: dict[str, str]
) -> None:
    path = os.path.abspath(path)
    if os.path.lexists(path):
        raise exception.ImageExists(path=path)
    if cluster_size is not None:
        options['cluster_size'] = str(cluster_size)
    for key, value in options.items():
        args += ['-o', f'{key}={_escape(value)}']
    _run('create', '-f', FORMAT, *args, path, *([] if size is None else [str(size)]))


def _escape(value: str) -> str:
    """A value inside ``-o key=value``, where a comma ends the value unless it is doubled."""
    return value.replace(',', ',,')


def info(path: str, *, image_format: str = FORMAT, force_share: bool = False) -> model.ImageInfo:
    """Describe one image.

    :param force_share: also while somebody writes to it; figures that change meanwhile are then
    approximate :raises ImageNotFound:
    """
    return model.ImageInfo.from_json(
        _json('info', *_share(force_share), '-f', image_format, _existing(path))
    )


def chain(
    path: str, *, image_format: str = FORMAT, force_share: bool = False
) -> list[model.ImageInfo]:
    """Describe an image and its bases, top first.

    :raises ImageNotFound:
    """
    value = _json(
        'info', '--backing-chain', *_share(force_share), '-f', image_format, _existing(path)
    )
    return [model.ImageInfo.from_json(item) for item in _array(value, 'the chain')]


def list_directory(
    directory: str, *files: str, base_uuid: str | None = None, cache: str | None = None
) -> dict[str, model.Summary | str]:
    """What images are in a directory, by file name, or why one cannot be read; all by one program,
    which takes no lock.

    :param files: only those of these names; none: all
    :param base_uuid: only those that stand on this image, and those that cannot be read and may
    :param cache: file in which the program remembers what has not changed, and beside which, what
        images stood on
    """
    wanted = [] if base_uuid is None else ['--base-uuid', base_uuid]
    arguments = [*_cached(cache), *wanted, '--', os.path.abspath(directory), *files]
    found: dict[str, model.Summary | str] = {}
    for item in _array(_json('list', *arguments), 'the list'):
        data = model.Reader(item, 'list')
        error, name = data.optional_string('error'), data.string('name')
        if '\N{REPLACEMENT CHARACTER}' in name:
            name = _name_of(directory, data.integer('inode')) or name
        found[name] = model.Summary.from_json(item) if error is None else error
    return found


def total(directory: str, *files: str, cache: str | None = None) -> model.Total:
    """The sums over the images of a directory, by a program that does not say more of them.

    :param files: only those of these names; none: all
    :param cache: as of :func:`list_directory`
    """
    return model.Total.from_json(
        _json('list', '--total', *_cached(cache), '--', os.path.abspath(directory), *files)
    )


def _cached(cache: str | None) -> list[str]:
    return [] if cache is None else ['--cache', cache]


def _name_of(directory: str, inode: int) -> str | None:
    """What is no UTF-8, or not printable, is not in what was read of JSON."""
    with os.scandir(directory) as entries:
        return next((entry.name for entry in entries if entry.inode() == inode), None)


def _share(force_share: bool) -> list[str]:
    return ['-U'] if force_share else []


def check(
    path: str,
    *,
    repair: bool = False,
    leaks_only: bool = False,
    accept_loss: bool = False,
    force_share: bool = False,
) -> model.CheckResult:
    """Check one file (not its bases).  Damage is a result, not an error.

    :param leaks_only: with ``repair``: give space back, and leave an image with corruptions alone
    :param accept_loss: repair also what loses something, and keep that beside the image; without
        it such a repair is ``refused``
    :param force_share: take no lock; what somebody writes to meanwhile may look damaged. Not with
    ``repair`` :raises ImageNotFound:
    :raises ImageProtected: a template is to be repaired, and this user may not
    """
    path = _existing(path)
    with protection.lifted(path) if repair else contextlib.nullcontext():
        return model.CheckResult.from_json(
            _json(
                'check',
                *_share(force_share),
                *(['-r', 'leaks' if leaks_only else 'all'] if repair else []),
                *(['--accept-loss'] if repair and accept_loss else []),
                path,
                ok_exit_codes=(0, 2, 3),
            )
        )


def check_data(path: str, *, rate: int = 0, force_share: bool = False) -> model.CheckResult:
    """As :func:`check`, and compare the data of the file with their checksums.

    :param rate: bytes of data a second at most; 0: as fast as it goes
    :raises ImageNotFound:
    """
    return model.CheckResult.from_json(
        _json(
            'check',
            '--data',
            *([f'--rate={rate}'] if rate else []),
            *_share(force_share),
            _existing(path),
            ok_exit_codes=(0, 2, 3),
        )
    )


def checksum(path: str, snapshot: str, *, rate: int = 0, accept_damage: bool = False) -> None:
    """Make checksums of the data of a snapshot, and of those below it, that have none; those that
    have one are compared. A VM may use the image meanwhile.

    :param rate: bytes of data a second at most; 0: as fast as it goes
    :param accept_damage: make them also of what is known to be damaged, which counts as whole then
    :raises ImageNotFound:
    :raises InvalidName:
    :raises ChecksumsRefused: some of it is damaged and got none; the rest has them
    """
    with _refused_for_damage():
        _run(
            'checksum',
            '-q',
            *([f'--rate={rate}'] if rate else []),
            *(['--accept-damage'] if accept_damage else []),
            _existing(path),
            names.check_snapshot_name(snapshot),
        )


def map_extents(path: str, *, force_share: bool = False) -> list[model.Extent]:
    """Where the guest's data lies, in order of guest address.

    :raises ImageNotFound:
    """
    value = _json('map', *_share(force_share), _existing(path))
    return [model.Extent.from_json(item) for item in _array(value, 'the map')]


def measure(path: str, image_format: str) -> model.Measure:
    """Size that ``path`` would have as a pcow image.

    :raises ImageNotFound:
    """
    return model.Measure.from_json(
        _json('measure', '-f', image_format, '-O', FORMAT, _existing(path))
    )


def snapshot_list(path: str, *, force_share: bool = False) -> list[model.Snapshot]:
    """Snapshots in order of creation.

    :raises ImageNotFound:
    """
    value = _json('snapshot', '-l', *_share(force_share), _existing(path))
    return [model.Snapshot.from_json(item) for item in _array(value, 'the list of snapshots')]


def mark_arriving(path: str) -> None:
    """Let no VM start with an empty image but one that migrates to it, whose QEMU takes the mark
    off when it has all arrived.

    :raises ImageNotFound:
    """
    _run('snapshot', '-c', names.ARRIVING_MARK, _existing(path))


def snapshot_create(path: str, name: str) -> None:
    """Freeze the active layer as snapshot ``name``.

    :raises ImageNotFound:
    :raises InvalidName:
    """
    _run('snapshot', '-c', names.check_new_snapshot_name(name), _existing(path))


def snapshot_revert(path: str, name: str) -> None:
    """Drop what was written since; other branches of the tree stay.

    :raises ImageNotFound:
    :raises InvalidName:
    """
    _run('snapshot', '-a', names.check_snapshot_name(name), _existing(path))


def snapshot_delete(path: str, name: str) -> int:
    """Merge the snapshot's data into the layers that stand on it.

    :return: bytes given back to the pool
    :raises ImageNotFound:
    :raises InvalidName:
    """
    value = _json('snapshot', '-d', names.check_snapshot_name(name), _existing(path))
    return model.Reader(value, 'snapshot -d').integer('freed')


def snapshot_unpin(path: str, name: str) -> None:
    """Look that no image stands on the snapshot any more, and let it be deleted; also while
    somebody writes to the image.

    :raises ImageNotFound:
    :raises InvalidName:
    """
    with protection.lifted(path):
        _run('snapshot', '--unpin', names.check_snapshot_name(name), _existing(path))


def snapshot_rename(path: str, name: str, new_name: str) -> None:
    """Give a snapshot another name.

    :raises ImageNotFound:
    :raises InvalidName:
    """
    _run(
        'snapshot',
        '--rename',
        names.check_snapshot_name(name),
        names.check_new_snapshot_name(new_name),
        _existing(path),
    )


def convert(
    source: str,
    source_format: str,
    target: str,
    target_format: str = FORMAT,
    *,
    snapshot: str | None = None,
    cluster_size: int | None = None,
    sealed: bool = False,
    checksums: bool | None = None,
    accept_damage: bool = False,
) -> None:
    """Copy an image into a new file of another format; sparse stays sparse. What is known to be
    damaged is refused: data of a sealed image that its checksums do not fit, or data that may be
    lost.

    :param snapshot: snapshot of a pcow ``source`` to copy, rather than its active layer; also while
        somebody writes to it
    :param sealed: make a template of a pcow ``target``
    :param checksums: of its data, see :func:`check_data`. None: unless damage is accepted, as they
        would call it whole
    :param accept_damage: copy it as it is
    :raises ImageNotFound: ``source`` is not there
    :raises ImageExists: ``target`` is there already
    """
    target = os.path.abspath(target)
    if os.path.lexists(target):
        raise exception.ImageExists(path=target)
    args = [] if snapshot is None else ['-l', names.check_snapshot_name(snapshot)]
    if cluster_size is not None:
        args += ['-o', f'cluster_size={cluster_size}']
    if sealed:
        args += ['-o', 'sealed=on']
    if checksums is not None:
        args += ['-o', f'checksums={"on" if checksums else "off"}']
    if accept_damage:
        args += ['--accept-damage']
    _run('convert', '-f', source_format, '-O', target_format, *args, _existing(source), target)


def resize(path: str, size: int, *, shrink: bool = False) -> None:
    """Set the virtual size; ``shrink`` allows giving up data beyond the new end.

    :raises ImageNotFound:
    :raises InvalidSize:
    """
    _run(
        'resize', *(['--shrink'] if shrink else []), _existing(path), str(check_virtual_size(size))
    )


def rebase(path: str, base: str | None, *, base_format: str = FORMAT, unsafe: bool = False) -> None:
    """Stand on another base (None: on none). The guest sees no change, unless ``unsafe``: then only
    the name changes.

    :raises ImageNotFound:
    """
    target = (
        ['-b', '']
        if base is None
        else ['-b', os.path.abspath(base) if unsafe else _existing(base), '-F', base_format]
    )
    _run('rebase', *(['-u'] if unsafe else []), *target, _existing(path))


def commit(path: str) -> None:
    """Copy the active layer into the base, and empty the layer.

    :raises ImageNotFound:
    """
    _run('commit', _existing(path))


def compare(first: str, first_format: str, second: str, second_format: str) -> bool:
    """Whether guests would read the same from both.

    :raises ImageNotFound:
    """
    path = tool.find('pcow_img')
    try:
        tool.run(
            path,
            'compare',
            '-f',
            first_format,
            '-F',
            second_format,
            _existing(first),
            _existing(second),
        )
    except exception.ToolFailed as e:
        if e.details['exit_code'] == 1:
            return False
        raise
    return True


def seal(path: str, *, checksums: bool = False) -> None:
    """Make a template of it: no writer may open it any more.

    :param checksums: make some of its data before, see :func:`check_data`
    :raises ImageNotFound:
    :raises ChecksumsRefused: some of its data is damaged; it is not sealed
    """
    with _refused_for_damage():
        _run('seal', *(['--checksums'] if checksums else []), _existing(path))


def unseal(path: str) -> None:
    """Allow writers again; what stands on it then notices a change of its base.

    :raises ImageNotFound:
    """
    protection.unprotect(_existing(path))
    _run('unseal', path)


def probe(path: str) -> str:
    """Persistence class of a directory, in which a file can be made, or of a file: ``volatile``,
    ``page-cache`` or ``pmem``.

    :raises ToolFailed:
    """
    return model.Reader(_json('probe', os.path.abspath(path)), 'probe').persistence()
