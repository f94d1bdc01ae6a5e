# SPDX-License-Identifier: Apache-2.0
"""Entry point of pcowctl."""

import argparse
import difflib
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
from pcow_driver.virt import libvirt_call


def _version() -> str:
    try:
        return metadata.version('pcow')
    except metadata.PackageNotFoundError:
        return 'unknown (not installed)'


_ALIKE = 0.8  # of two names, as difflib sees it


class PcowCtl(app.App):
    """Pools, templates, images and snapshots of pcow, and what this host lacks for it."""

    def __init__(self) -> None:
        super().__init__(
            description=self.__doc__,
            version=_version(),
            deferred_help=True,
            command_manager=commandmanager.CommandManager('pcowctl'),
        )
        self._words: list[str] = []

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

    def run_subcommand(self, argv: list[str]) -> int:
        self._words = argv
        return int(super().run_subcommand(argv))

    def get_fuzzy_matches(self, cmd: str) -> list[str]:
        """Commands that are like what was typed; else those that begin with the same word."""
        known = [name for name, _entry in self.command_manager]
        typed = {' '.join(self._words[:count]) for count in range(1, len(self._words) + 1)}
        scores = {
            name: difflib.SequenceMatcher(
                None, name, ' '.join(self._words[: len(name.split())])
            ).ratio()
            for name in known
        }
        best = max(scores.values())
        if best > _ALIKE and not typed & set(known):
            return sorted(name for name in known if scores[name] == best)
        return [name for name in sorted(known) if name.split()[0] == cmd]

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
        status = int(PcowCtl().run(sys.argv[1:] if argv is None else argv))
        libvirt_call.await_undone(lambda words: print(f'pcowctl: {words}', file=sys.stderr))
        return status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == '__main__':
    sys.exit(main())
