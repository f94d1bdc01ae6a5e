# SPDX-License-Identifier: Apache-2.0
"""Entry point of tools/vm-test."""

import logging
import sys

from pcow_driver.common import exception
from tests.vm import job
from tests.vm import options
from tools.lib.quickstart import supervisor
from tools.lib.quickstart import teardown


def main() -> int:
    # errors are told once, by the lines below
    logging.getLogger().addHandler(logging.NullHandler())
    try:
        chosen = options.parse(sys.argv[1:])
    except exception.PcowError as e:
        print(f'vm-test: {e}', file=sys.stderr)
        return 2
    teardown.reap()
    return supervisor.supervise(lambda run: job.perform(run, chosen), 'vm-test')


if __name__ == '__main__':
    sys.exit(main())
