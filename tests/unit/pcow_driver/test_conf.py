# SPDX-License-Identifier: Apache-2.0
import configparser
import io
from pathlib import Path

from oslo_config import cfg
from oslo_config import generator

import pcow_driver
from pcow_driver.common import conf
from tests.unit.pcow_driver import base


class SampleTest(base.TestCase):
    def test_samples_are_current(self) -> None:
        """If not: tox -e genconfig."""
        for name in ('pcow', 'nova_pcow', 'cinder_pcow'):
            options = cfg.ConfigOpts()
            generator.register_cli_opts(options)
            options(
                [], default_config_files=[str(base.TOP / f'etc/oslo-config-generator/{name}.conf')]
            )
            output = io.StringIO()
            generator.generate(options, output)
            self.assertEqual(
                (base.TOP / f'etc/pcow/{name}.conf.sample').read_text(encoding='utf-8'),
                output.getvalue(),
            )


class PackageTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.setup_cfg = configparser.ConfigParser()
        self.setup_cfg.read(base.TOP / 'setup.cfg', encoding='utf-8')

    def test_data_files_exist(self) -> None:
        lines = [line for line in self.setup_cfg['files']['data_files'].splitlines() if line]
        self.assertTrue(lines)
        for line in lines:
            self.assertTrue((base.TOP / line.split('=')[1].strip()).is_file(), line)

    def test_every_command_is_reachable(self) -> None:
        """Each module of cli, and Nova's, has its commands among the entry points, and each entry
        point can be loaded.
        """
        entries = dict(
            line.split(' = ')
            for line in self.setup_cfg['entry_points']['pcowctl'].splitlines()
            if line
        )
        loaded = set()
        for target in entries.values():
            module, _colon, name = target.partition(':')
            command = getattr(__import__(module, fromlist=[name]), name)
            self.assertTrue(command.__doc__)
            loaded.add(module)
        helpers = {'__init__', 'app', 'common', 'hints'}
        modules = {
            path.stem for path in Path(pcow_driver.__file__).parent.joinpath('cli').glob('*.py')
        } - helpers
        self.assertEqual(
            {f'pcow_driver.cli.{name}' for name in modules} | {'nova_pcow.cli'}, loaded
        )

    def test_group(self) -> None:
        self.assertEqual(
            ['pcow', 'pcow_privileged'], [group.name for group, _options in conf.list_opts()]
        )
