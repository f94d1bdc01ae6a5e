# SPDX-License-Identifier: Apache-2.0

import dataclasses
import itertools

from pcow_driver.fixation import records

_WAY = (records.State.RUNS, records.State.FIXATING, records.State.FIXATED)


def enter(uuid: str, record: records.Record) -> None:
    """Have a domain be in this state, on a way that is legal."""
    records.forget(uuid)
    before = [records.State.RUNS]
    if record.state in _WAY:
        before = [*itertools.takewhile(lambda state: state is not record.state, _WAY)]
    for state in before:
        records.write(uuid, dataclasses.replace(record, state=state))
    records.write(uuid, record)
