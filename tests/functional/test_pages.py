# SPDX-License-Identifier: Apache-2.0
"""How pages are read whose commands tests type, and that each page has such a test."""

from pathlib import Path
import re
import tempfile
import unittest
from unittest import mock

from tests.functional import pages

_TEXT = r"""
Title
=====

.. contents::
   :local:

1. In a list,
   of two lines::

    pcowctl pool list
    # uname -r

   goes on here.

2. And::

    openstack flavor create \
        --ram 1 small

Last
----

::

    $ pcowctl pool show fast

        indented

no block: ``x::`` is not one
    pcowctl doctor
"""


class PagesTest(unittest.TestCase):
    def setUp(self) -> None:
        super().setUp()
        directory = tempfile.TemporaryDirectory(prefix='pcow-test-')
        self.addCleanup(directory.cleanup)
        Path(directory.name, 'page.rst').write_text(_TEXT)
        patch = mock.patch.object(pages, 'DOCUMENTS', Path(directory.name))
        patch.start()
        self.addCleanup(patch.stop)

    def test_lines(self) -> None:
        self.assertEqual(
            [
                'pcowctl pool list',
                'uname -r',
                'openstack flavor create --ram 1 small',
                'pcowctl pool show fast',
                'indented',
            ],
            pages.Page('page').lines,
        )
        self.assertEqual(
            ['pcowctl pool show fast', 'indented'], pages.Page('page', only='Last').lines
        )

    def test_check(self) -> None:
        page = pages.Page('page', {'^uname|^indented$': 'output', '^openstack ': 'elsewhere'})
        self.assertEqual(2, len(page.commands()))
        page.take('pool list')
        with self.assertRaisesRegex(AssertionError, 'no reason is given: .*pool show fast'):
            page.check()
        page.took('pcowctl pool show fast')
        page.check()
        self.assertRaises(AssertionError, page.find, 'pool')
        self.assertRaises(AssertionError, page.find, 'no such')
        page = pages.Page('page', {'.': 'all', '^no such$': 'is gone'})
        with self.assertRaisesRegex(AssertionError, r'not there: .*no such'):
            page.check()

    def test_shell(self) -> None:
        shell = pages.Shell(Path('/'), {'X': 'y'}, {'there': 'here'}, prelude='z=1')
        self.assertEqual('here y 1 /\n', shell.type('echo there $X $z $PWD'))
        self.assertEqual('', shell.type('false; echo on', 1))
        self.assertRaises(AssertionError, shell.type, 'false | true')


class EachPageTest(unittest.TestCase):
    def test_each_page_has_a_test(self) -> None:
        tests = ''.join(
            path.read_text()
            for path in Path(__file__).parent.glob('*.py')
            if path != Path(__file__)
        )
        found = [*pages.DOCUMENTS.glob('howto/*.rst'), *pages.DOCUMENTS.glob('tutorial/*.rst')]
        self.assertGreater(len(found), 20)
        for path in found:
            name = f'{path.parent.name}/{path.stem}'
            if path.stem != 'index' and pages.Page(name).lines:
                # by its name, or as one of howto_pages
                typed = re.search(rf"'{name}'|^    '{path.stem}': {{", tests, re.MULTILINE)
                self.assertTrue(typed, name)
