# SPDX-License-Identifier: Apache-2.0
"""Entry point of tools/quickstart."""

import logging
import sys

from pcow_driver.common import exception
from tools.lib.quickstart import job
from tools.lib.quickstart import options
from tools.lib.quickstart import state
from tools.lib.quickstart import supervisor
from tools.lib.quickstart import teardown


def _stop() -> int:
    kept = [run for run in state.all_runs() if run.kept]
    for run in kept:
        teardown.tear_down(run)
        print(f'ended {run.domain_name}')
    if not kept:
        print('nothing is kept')
    return 0


def main() -> int:
    # errors are told once, by the lines below
    logging.getLogger().addHandler(logging.NullHandler())
    try:
        chosen = options.parse(sys.argv[1:])
        teardown.reap()
        if chosen.stop:
            return _stop()
        return supervisor.supervise(lambda run: job.perform(run, chosen))
    except exception.PcowError as e:
        print(f'quickstart: {e}', file=sys.stderr)
        return 1


if __name__ == '__main__':
    sys.exit(main())
