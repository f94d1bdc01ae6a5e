# SPDX-License-Identifier: Apache-2.0
"""Serves an API on the loopback interface: usage: serve.py MODULE PORT [ARGUMENT OF THE
SERVICE...].

Runs in the Python environments of OpenStack, which need not know this package.
"""

import importlib
import sys

MAX_BODY = 1 << 40  # bytes: an image is uploaded in one request


def main() -> None:
    module, port = sys.argv[1], int(sys.argv[2])
    # the service reads its own arguments from there when it is imported
    sys.argv = [module, *sys.argv[3:]]
    application = importlib.import_module(module).application
    waitress = importlib.import_module('waitress')
    waitress.serve(
        application,
        host='127.0.0.1',
        port=port,
        threads=4,
        ident=module,
        channel_timeout=300,
        max_request_body_size=MAX_BODY,
    )


if __name__ == '__main__':
    main()
