# SPDX-License-Identifier: Apache-2.0
"""Entry point of tools/openstack-aio."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import signal
import sys

from pcow_driver.common import exception
from pcow_driver.common import interrupt
from tools.lib.openstack_aio import allinone
from tools.lib.openstack_aio import failures
from tools.lib.openstack_aio import hosts as hosts_module
from tools.lib.openstack_aio import life_cycle
from tools.lib.openstack_aio import options
from tools.lib.openstack_aio import processes
from tools.lib.openstack_aio import settings as settings_module
from tools.lib.openstack_aio import tempest
from tools.lib.openstack_aio import times
from tools.lib.openstack_aio import volume_cycle
from tools.lib.openstack_aio import volume_kills

_LINES = 40
_LINES_OF_EACH = 3


def _existing(chosen: argparse.Namespace) -> settings_module.Settings:
    found = settings_module.Settings.load(chosen.state)
    if found is None:
        raise exception.PcowError(
            reason=f'there is no all-in-one in {chosen.state}: run tools/openstack-aio up'
        )
    return found


def _up(chosen: argparse.Namespace) -> int:
    settings = settings_module.Settings.load(chosen.state) or settings_module.Settings.create(
        chosen.state
    )
    offset = settings.port_offset if chosen.port_offset is None else chosen.port_offset
    if offset != settings.port_offset and (settings.state / 'databases').exists():
        raise exception.UsageInvalid(
            reason=f'--port-offset {offset}: the databases in {settings.state} name the ports with '
            f'offset '
            f'{settings.port_offset}; run tools/openstack-aio down --purge first'
        )
    wanted = dataclasses.replace(
        settings,
        port_offset=offset,
        compute_driver=chosen.compute_driver,
        debug=chosen.debug,
        volume_backends=chosen.volume_backends,
        pool=chosen.pool,
    )
    with allinone.locked(wanted):
        machine = allinone.AllInOne(wanted)
        if machine.processes.all() and wanted != settings:
            raise exception.UsageInvalid(
                reason='it runs with other options: run tools/openstack-aio down first'
            )
        if not machine.is_up():
            machine.up()
        machine.say(f'up; now: . {os.path.relpath(wanted.openrc)}')
    return 0


def _down(chosen: argparse.Namespace) -> int:
    settings = settings_module.Settings.load(chosen.state)
    if settings is None:
        print(f'there is no all-in-one in {chosen.state}')
        return 0
    with allinone.locked(settings):
        machine = allinone.AllInOne(settings)
        machine.down(chosen.purge)
        machine.say('down, and nothing is kept' if chosen.purge else 'down')
    return 0


def _status(chosen: argparse.Namespace) -> int:
    machine = allinone.AllInOne(_existing(chosen))
    names = machine.processes.names()
    for name in names:
        pid = machine.processes.pid(name)
        state = (
            f'running  pid {pid}'
            if pid
            else f'ENDED    {processes.log_tail(machine.processes.log(name), 1)}'
        )
        print(f'{name:24} {state}')
    if not machine.is_up():
        print('some of it does not run: tools/openstack-aio up starts it' if names else 'down')
        return 1
    volumes = ', '.join(machine.settings.volume_backends) or 'nothing'
    print(f'up; servers on {machine.settings.compute_driver}, volumes on {volumes}')
    return 0


def _logs(chosen: argparse.Namespace) -> int:
    settings = _existing(chosen)
    paths = sorted(settings.logs.glob('*.log'))
    if chosen.service:
        paths = [path for path in paths if path.stem == chosen.service]
        if not paths:
            raise exception.PcowError(
                reason=f'there is no log of {chosen.service}; there are those of '
                f'{", ".join(sorted(path.stem for path in settings.logs.glob("*.log")))}'
            )
    for path in paths:
        lines = path.read_text(errors='replace').splitlines()
        print(f'==> {path} <==')
        print('\n'.join(lines[-(chosen.lines or (_LINES if chosen.service else _LINES_OF_EACH)) :]))
    return 0


def _node2(chosen: argparse.Namespace) -> int:
    settings = _existing(chosen)
    wanted = dataclasses.replace(settings, shared_pools=chosen.shared_pools)
    with allinone.locked(wanted):
        machine = allinone.AllInOne(wanted)
        if not machine.is_up():
            raise exception.PcowError(reason='it is not up: run tools/openstack-aio up')
        if wanted != settings and machine.has_node2():
            raise exception.UsageInvalid(
                reason='node2 runs with other pools: run tools/openstack-aio down first'
            )
        wanted.save()
        machine.node2(chosen.compute_driver or settings.compute_driver)
        machine.say('node2 is up')
    return 0


def _image(chosen: argparse.Namespace) -> int:
    machine = allinone.AllInOne(_existing(chosen))
    if not machine.is_up():
        raise exception.PcowError(reason='it is not up: run tools/openstack-aio up')
    image, *flavors = machine.image(chosen.debian)
    machine.say(f'image {image}; flavors {", ".join(flavors)}')
    return 0


def _life_cycle(chosen: argparse.Namespace) -> int:
    machine = allinone.AllInOne(_existing(chosen))
    if not machine.is_up():
        raise exception.PcowError(reason='it is not up: run tools/openstack-aio up')
    rows = _rows(chosen.row, volume_cycle.ROWS if chosen.volume else failures.ROWS)
    machine.image(debian=False)
    life = (
        volume_cycle.VolumeCycle(machine.api, machine.has_node2())
        if chosen.volume
        else failures.Failures(machine.api, machine.has_node2(), hosts_module.Hosts(machine))
    )
    return _status_of(life.run(rows, _say))


def _volume_kills(chosen: argparse.Namespace) -> int:
    machine = allinone.AllInOne(_existing(chosen))
    if not machine.is_up():
        raise exception.PcowError(reason='it is not up: run tools/openstack-aio up')
    machine.api.log_in()
    known = volume_kills.ROWS
    if settings_module.NODE2.name not in machine.api.hypervisors():
        known = tuple(name for name in known if name != 'migrate')
    return _status_of(
        volume_kills.VolumeKills(machine, chosen.kills).run(_rows(chosen.row, known), _say)
    )


def _rows(wanted: list[str] | None, known: tuple[str, ...]) -> tuple[str, ...]:
    rows = tuple(name.replace('-', '_') for name in wanted or known)
    unknown = [name for name in rows if name not in known]
    if unknown:
        raise exception.UsageInvalid(reason=f'--row {unknown[0]}: there are {", ".join(known)}')
    return rows


def _say(result: life_cycle.Result) -> None:
    print(f'{result.row:20} {result.outcome:8} {result.seconds:6.1f} s  {result.words}', flush=True)


def _status_of(results: list[life_cycle.Result]) -> int:
    return 1 if any(result.outcome == 'FAILED' for result in results) else 0


def _times(chosen: argparse.Namespace) -> int:
    machine = allinone.AllInOne(_existing(chosen))
    if not machine.is_up():
        raise exception.PcowError(reason='it is not up: run tools/openstack-aio up')
    machine.image(debian=False)
    print(times.table(times.measure(machine.api, hosts_module.Hosts(machine), chosen.servers)))
    return 0


def _tempest(chosen: argparse.Namespace) -> int:
    machine = allinone.AllInOne(_existing(chosen))
    if not machine.is_up():
        raise exception.PcowError(reason='it is not up: run tools/openstack-aio up')
    machine.image(debian=False)
    found = tempest.Tempest(machine.settings, machine.api).run(
        chosen.suite, chosen.only, machine.say
    )
    print(tempest.table(found))
    return 1 if found.failed or not found.passed else 0


_COMMANDS = {
    'up': _up,
    'down': _down,
    'status': _status,
    'logs': _logs,
    'node2': _node2,
    'image': _image,
    'life-cycle': _life_cycle,
    'volume-kills': _volume_kills,
    'times': _times,
    'tempest': _tempest,
}


def _hang_up(_number: int, _frame: object) -> None:
    raise SystemExit(128 + signal.SIGHUP)


def main() -> int:
    # errors are told once, by the lines below
    logging.getLogger().addHandler(logging.NullHandler())
    interrupt.install()
    signal.signal(signal.SIGHUP, _hang_up)
    try:
        chosen = options.parse(sys.argv[1:])
        return _COMMANDS[chosen.command](chosen)
    except exception.PcowError as e:
        print(f'openstack-aio: {e}', file=sys.stderr)
        return 1
    except OSError as e:
        print(f'openstack-aio: {e.filename or "the system"}: {e.strerror}', file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print('openstack-aio: interrupted', file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == '__main__':
    sys.exit(main())
