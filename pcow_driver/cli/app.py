# SPDX-License-Identifier: Apache-2.0
"""Entry point of pcowctl."""

import argparse
from importlib import metadata
import io
import logging
import signal
import sys
from typing import Any

from cliff import app
from cliff import commandmanager
from oslo_config import cfg

from pcow_driver.common import conf
from pcow_driver.common import exception
from pcow_driver.common import interrupt


def _version() -> str:
    try:
        return metadata.version('pcow')
    except metadata.PackageNotFoundError:
        return 'unknown (not installed)'


class PcowCtl(app.App):
    """Pools, templates, images and snapshots of pcow, and what this host lacks for it."""

    def __init__(self) -> None:
        super().__init__(
            description=self.__doc__,
            version=_version(),
            deferred_help=True,
            command_manager=commandmanager.CommandManager('pcowctl'),
        )

    def build_option_parser(self, *args: Any, **kwargs: Any) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = super().build_option_parser(*args, **kwargs)
        parser.add_argument(
            '--config-file',
            action='append',
            metavar='FILE',
            help='Configuration file, may be given more than once; default: pcow.conf in ~/.pcow '
            'and /etc/pcow.',
        )
        return parser

    def configure_logging(self) -> None:
        super().configure_logging()
        if not self.options.debug:
            # what it finds is in the error that follows
            logging.getLogger('oslo_utils.imageutils').setLevel(logging.CRITICAL)

    def initialize_app(self, argv: list[str]) -> None:
        try:
            conf.CONF(
                [], project='pcow', prog='pcow', default_config_files=self.options.config_file
            )
            for option in conf.OPTS:
                conf.CONF.pcow[option.name]  # values are looked at only when they are used
        except (
            cfg.ConfigFilesNotFoundError,
            cfg.ConfigFileParseError,
            cfg.ConfigFileValueError,
        ) as e:
            raise exception.ConfigInvalid(reason=str(e)) from None


def main(argv: list[str] | None = None) -> int:
    interrupt.install()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # names of files that are not UTF-8 are printed as they are
        sys.stdout.reconfigure(errors='surrogateescape')
    try:
        return int(PcowCtl().run(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == '__main__':
    sys.exit(main())
