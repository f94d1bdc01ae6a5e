# SPDX-License-Identifier: Apache-2.0

import inspect
import json
from pathlib import Path
import sys

from nova import exception as nova_exception
from nova.api.validation.extra_specs import validators as nova_validators
from nova.virt.libvirt import driver as libvirt_driver
from oslo_utils import importutils
from oslotest import base

from nova_pcow import compat
from nova_pcow import driver
from nova_pcow import loader


class CompatTest(base.BaseTestCase):
    def test_releases(self) -> None:
        compat.check()
        compat.check('34.0.1')
        compat.check('33.0.2')
        for version in ('32.1.0', '35.0.0.0rc1', 'unknown'):
            error = self.assertRaises(ImportError, compat.check, version)
            self.assertIn(version, str(error))

    def test_overrides(self) -> None:
        """Every method that exists in Nova's driver takes the same parameters here."""
        checked = 0
        ours_of_all = [
            one
            for one in driver.PcowLibvirtDriver.__mro__
            if one.__module__.startswith('nova_pcow.')
        ]
        for name, method in [item for one in ours_of_all for item in vars(one).items()]:
            original = getattr(libvirt_driver.LibvirtDriver, name, None)
            if not inspect.isfunction(method) or not inspect.isfunction(original):
                continue
            ours, theirs = (
                list(inspect.signature(item).parameters.values()) for item in (method, original)
            )
            named = [item for item in ours if item.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
            if len(named) < len(ours):  # what some releases do not have is passed on
                ours, theirs = named, theirs[: len(named)]
            self.assertEqual(
                [(item.name, item.default) for item in theirs],
                [(item.name, item.default) for item in ours],
                name,
            )
            checked += 1
        self.assertGreater(checked, 20)

    def test_overrides_of_33(self) -> None:
        """The same of the older release, which is not installed beside the newer one: of what its
        methods take there is a list.
        """
        methods = json.loads((Path(__file__).parent / 'nova_33_methods.json').read_text())
        checked = 0
        for one in driver.PcowLibvirtDriver.__mro__:
            if not one.__module__.startswith('nova_pcow.'):
                continue
            for name, method in vars(one).items():
                if name not in methods or not inspect.isfunction(method):
                    continue
                ours = list(inspect.signature(method).parameters.values())[1:]
                named = [one for one in ours if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
                theirs = methods[name] if len(named) == len(ours) else methods[name][: len(named)]
                self.assertEqual(
                    theirs,
                    [
                        one.name
                        if one.default is inspect.Parameter.empty
                        else f'{one.name}={one.default!r}'
                        for one in named
                    ],
                    name,
                )
                checked += 1
        self.assertGreater(checked, 20)

    def test_loading(self) -> None:
        loader.install()
        loader.install()
        self.assertEqual(
            1, len([finder for finder in sys.meta_path if isinstance(finder, loader.AliasFinder)])
        )
        self.assertIs(
            driver.PcowLibvirtDriver,
            importutils.import_class('nova.virt.nova_pcow.driver.PcowLibvirtDriver'),
        )
        self.assertRaises(ImportError, importutils.import_class, 'nova.virt.nova_pcow.driver.Other')

    def test_extra_specs(self) -> None:
        for name, value in (
            ('pcow:root', 'true'),
            ('pcow:data_mb', '128,2'),
            ('pcow:data_format', 'none,xfs'),
        ):
            nova_validators.validate(name, value)
        for name, value in (
            ('pcow:root', 'maybe'),
            ('pcow:data_mb', '3'),
            ('pcow:data_mb', '0'),
            ('pcow:data_mb', '2, 4'),
            ('pcow:data_mb', ','.join(['2'] * 9)),
            ('pcow:data_format', 'ext3'),
            ('pcow:rooot', 'true'),
        ):
            with self.subTest(name=name, value=value):
                self.assertRaises(
                    nova_exception.ValidationError, nova_validators.validate, name, value
                )
