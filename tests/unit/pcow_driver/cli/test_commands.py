# SPDX-License-Identifier: Apache-2.0
"""pcowctl as people run it, as far as it needs no pcow-img."""

import json
import os
from pathlib import Path
import subprocess
import sys

from pcow_driver.cli import common
from pcow_driver.pools import pool
from pcow_driver.pools import registry
from tests.unit.pcow_driver import base

PROGRAM = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'), 'pcow-img')


class PcowCtlTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.config = self.directory / 'pcow.conf'
        self.config.write_text(
            f'[pcow]\nstate_path = {self.directory}/state\npcow_img = /no/such/pcow-img\n'
        )

    def _run(self, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, '-m', 'pcow_driver.cli.app', '--config-file', str(self.config), *args],
            cwd=base.TOP,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def _fails(self, *args: str, exit_code: int = 1) -> str:
        done = self._run(*args)
        self.assertEqual((exit_code, ''), (done.returncode, done.stdout), str(done))
        self.assertEqual(1, len(done.stderr.splitlines()), done.stderr)
        return done.stderr

    def test_one_line_on_error(self) -> None:
        self.assertIn('nosuch', self._fails('pool', 'show', 'nosuch'))
        self.assertIn('nosuch', self._fails('image', 'show', 'nosuch/image'))
        self.assertIn('POOL/NAME', self._fails('image', 'delete', 'image'))
        self.assertIn('/no/such.pcow', self._fails('snapshot', 'list', '/no/such.pcow'))
        self.assertIn('expected: IMAGE NAME', self._fails('snapshot', 'create', 'only-a-name'))
        self.assertIn(
            'expected: NAME', self._fails('snapshot', 'create', '--domain', 'vm', 'image', 'name')
        )
        self.assertIn(
            '--domain', self._fails('snapshot', 'create', '--device', 'x', 'image', 'name')
        )
        self.assertIn('--delete', self._fails('pool', 'garbage', '--dry-run', 'p'))

    def test_missing_program(self) -> None:
        registry.PoolRegistry().create('p', str(self.directory / 'p'))
        self.assertIn('[pcow] pcow_img', self._fails('image', 'create', 'p/vm', '--size', '2M'))

    def test_pool_check(self) -> None:
        """Whatever fails, the exit code is none of 'enough' and 'low', and what was found of the
        others is said.
        """
        self.config.write_text(
            f'[pcow]\nstate_path = {self.directory}/state\npcow_img = {PROGRAM}\n'
        )
        pools = registry.PoolRegistry()
        pools.create('gone', str(self.directory / 'gone'))
        pools.create('p', str(self.directory / 'p'))
        pools.set('p', low=100, critical=100)
        os.rename(self.directory / 'gone', self.directory / 'moved')
        figures = self.directory / 'pcow.prom'
        done = self._run('pool', 'check', '--prometheus', str(figures))
        self.assertEqual(3, done.returncode, done.stderr)
        self.assertIn('UNKNOWN gone: ', done.stdout)
        self.assertIn('CRITICAL p: ', done.stdout)
        for name, state in (('gone', 3), ('p', 2)):
            self.assertIn(f'pcow_pool_state{{pool="{name}"}} {state}\n', figures.read_text())
        done = self._run('pool', 'check', '--prometheus', '/no/such/directory/x.prom', 'p')
        self.assertEqual(3, done.returncode, done.stderr)
        self.assertIn('CRITICAL p: ', done.stdout)
        self.assertIn('UNKNOWN: /no/such/directory/x.prom cannot be written', done.stdout)
        (self.directory / 'state/pools.json').write_text('{')
        done = self._run('pool', 'check', '--prometheus', str(figures))
        self.assertEqual(3, done.returncode, done.stderr)
        self.assertIn('UNKNOWN: the state file ', done.stdout)
        self.assertIn('pcow_pools_unknown 1\n', figures.read_text())

    def test_pool_check_of_a_class_that_was_lost(self) -> None:
        """Guests flush, and it is no longer durable: enough space is no answer."""
        made = registry.PoolRegistry().create('p', str(self.directory / 'p'))
        marker = self.directory / 'p/.pcow-pool'
        marker.write_text(json.dumps(json.loads(marker.read_text()) | {'class': 'pmem'}))
        probe = self.script(
            'pcow-img',
            (
                f'#!/bin/sh\n[ "$1" = probe ] || exec {PROGRAM} "$@"\necho '
                f'\'{{"persistence": "page-cache"}}\'\n'
            ),
        )
        self.config.write_text(f'[pcow]\nstate_path = {self.directory}/state\npcow_img = {probe}\n')
        figures = self.directory / 'pcow.prom'
        done = self._run('pool', 'check', '--prometheus', str(figures))
        self.assertEqual(2, done.returncode, done.stderr)
        self.assertIn(
            f'CRITICAL p: {made.path} was class pmem when it was made, and is page-cache now',
            done.stdout,
        )
        self.assertIn('pcow_pool_state{pool="p"} 2\n', figures.read_text())

    def test_a_name_that_is_not_utf8(self) -> None:
        """It is printed as it is, and takes no other line away."""
        made = registry.PoolRegistry().create('p', str(self.directory / 'p'))
        with open(os.fsencode(made.path) + b'/v\xff.pcow', 'wb'):
            pass
        self.config.write_text(
            f'[pcow]\nstate_path = {self.directory}/state\npcow_img = {PROGRAM}\n'
        )
        strict = {**os.environ, 'PYTHONIOENCODING': 'utf-8:strict'}
        done = subprocess.run(
            [
                sys.executable,
                '-m',
                'pcow_driver.cli.app',
                '--config-file',
                str(self.config),
                'pool',
                'check',
            ],
            cwd=base.TOP,
            capture_output=True,
            check=False,
            env=strict,
        )
        self.assertNotIn(b'codec', done.stderr)
        self.assertIn(b'cannot be read: v\xff\n', done.stdout)

    def test_bad_configuration(self) -> None:
        self.config.write_text('[pcow]\ncluster_size = 17\n')
        self.assertIn('pcow.conf', self._fails('pool', 'list'))
        self.config.unlink()
        self.assertIn('pcow.conf', self._fails('pool', 'list'))

    def test_empty_list(self) -> None:
        done = self._run('pool', 'list', '-f', 'json')
        self.assertEqual((0, []), (done.returncode, json.loads(done.stdout)), done.stderr)

    def test_bad_sizes_and_unknown_options(self) -> None:
        for args in (
            ('image', 'create', 'p/vm', '--size', 'big'),
            ('template', 'build', 'x', 'p/t'),
            ('pool', 'create'),
        ):
            self.assertEqual(2, self._run(*args).returncode)

    def test_doctor_says_what_to_do(self) -> None:
        done = self._run('doctor', '-f', 'json')
        self.assertEqual(1, done.returncode, done.stderr)
        findings = json.loads(done.stdout)
        self.assertIn(
            'missing', {row['status'] for row in findings if row['check'] == '/no/such/pcow-img'}
        )
        for row in findings:
            self.assertEqual(row['status'] == 'ok', row['what to do'] == 'nothing to do', row)
            self.assertNotEqual('', row['found'])


class ReferenceTest(base.TestCase):
    def test_pool_or_path(self) -> None:
        made = registry.PoolRegistry().create('p', str(self.directory / 'p'))
        image = made.image_path('vm')
        with open(image, 'w'):
            pass
        self.assertEqual(image, common.image_path('p/vm'))
        self.assertEqual(image, common.image_path('p/vm.pcow'))
        self.assertEqual(image, common.image_path(image))
        found, name = common.split_reference('p/new')
        self.assertEqual((made, 'new'), (found, name))
        self.assertIsInstance(found, pool.Pool)

    def test_relative_paths(self) -> None:
        (self.directory / 'sub').mkdir()
        (self.directory / 'sub/vm.pcow').write_text('')
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.directory)
        for reference in ('sub/vm.pcow', './sub/vm.pcow'):
            self.assertEqual(str(self.directory / 'sub/vm.pcow'), common.image_path(reference))
