# SPDX-License-Identifier: Apache-2.0
"""Runs scenarios and writes a line of JSON for each: {"name", "accel", "pool", "kernel" (the
host's), "passed", "seconds", "figures" or "error" and "silent"}."""

from __future__ import annotations

import argparse
from collections.abc import Callable
import importlib
import json
import os
from pathlib import Path
import shutil
import sys
import time
import traceback
from typing import Any

from tests.vm import fsdax
from tests.vm import machine
from tests.vm import media
from tests.vm import power
from tests.vm import scenarios

_POOL_SCENARIO = 'pool-'
_POWER_SCENARIO = 'power-'
_CONFINEMENT_SCENARIO = 'confinement-'
_PERSIST_SCENARIO = 'persist-'


def run_one(name: str, pool: str, place: machine.Place) -> dict[str, Any]:
    """A scenario in a directory that is gone afterwards."""
    begun = time.monotonic()
    result: dict[str, Any] = {
        'name': name,
        'accel': place.accel,
        'pool': pool,
        'kernel': os.uname().release,
        'passed': False,
    }
    directory = place.pool / f'vm-test-{name}'
    try:
        scenario = (scenarios.ALL | media.ALL).get(name)
        if scenario is not None:
            directory.mkdir()
            result['figures'] = scenario(scenarios.Context(place, name, directory))
        elif name in fsdax.ALL:
            result['figures'] = fsdax.ALL[name](place, pool)
        elif name.startswith(_POWER_SCENARIO):
            result['figures'] = power.run(place, name.removeprefix(_POWER_SCENARIO))
        elif name.startswith(_CONFINEMENT_SCENARIO):
            result['figures'] = importlib.import_module('tests.vm.confinement').ALL[name]()
        elif name.startswith(_PERSIST_SCENARIO):
            persist = importlib.import_module('tests.vm.persist')
            result['figures'] = persist.run(name.removeprefix(_PERSIST_SCENARIO))
        else:
            # they need pcow_driver, which is not in every machine
            pools = importlib.import_module('tests.vm.pools')
            result['figures'] = pools.ALL[name.removeprefix(_POOL_SCENARIO)](place, pool)
        result['passed'] = True
    except machine.Failure as e:
        result['error'] = str(e)
        result['silent'] = isinstance(e, machine.Silence)
    except Exception:  # a mistake of the test is told the same way
        result['error'] = traceback.format_exc()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    result['seconds'] = round(time.monotonic() - begun, 2)
    return result


def run_all(
    wanted: list[tuple[str, str]],
    places: dict[str, machine.Place],
    report: Callable[[dict[str, Any]], None],
) -> bool:
    """Run (scenario, pool) pairs one after the other; whether all passed."""
    passed = True
    for name, pool in wanted:
        result = run_one(name, pool, places[pool])
        report(result)
        passed = passed and result['passed']
    return passed


def main() -> int:
    """Entry point in the outer machine: ``suite PLAN OUTPUT``."""
    parser = argparse.ArgumentParser()
    parser.add_argument('plan', type=Path)
    parser.add_argument('output', type=Path)
    arguments = parser.parse_args()
    plan = json.loads(arguments.plan.read_text())
    os.environ.update(plan['environment'])
    places = {pool: machine.Place.load(fields) for pool, fields in plan['places'].items()}
    with open(arguments.output, 'w', buffering=1) as output:

        def report(result: dict[str, Any]) -> None:
            output.write(json.dumps(result) + '\n')

        passed = run_all([(name, pool) for name, pool in plan['wanted']], places, report)
        output.write(json.dumps({'end': True}) + '\n')
    return 0 if passed else 1


if __name__ == '__main__':
    sys.exit(main())
