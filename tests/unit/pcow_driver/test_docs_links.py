# SPDX-License-Identifier: Apache-2.0
"""What the documentation points at is there: pages, files of the sources, tests."""

from pathlib import Path
import re

from tests.unit.pcow_driver import base

_PAGES = base.TOP / 'doc/source'
_DOC = re.compile(r':doc:`(?:[^`<]*<)?(?P<target>[^`>]+)>?`')
_ENTRY = re.compile(
    r'^   (?P<target>(?:tutorial|howto|explanation|reference|man|contributor)/\S+)$'
)
_FILE = re.compile(
    r'``(?P<path>(?:cinder_pcow|devstack|doc|etc|nova_pcow|pcow_driver|qemu-backend|releasenotes'
    r'|tests|tools)/[\w./*{}@-]+)``'
)
_TEST = re.compile(r'``(?P<name>test_\w+)(?P<suffix>\.c|\.py)?``')


def _texts() -> dict[Path, str]:
    pages = [*_PAGES.rglob('*.rst'), base.TOP / 'README.rst', base.TOP / 'CONTRIBUTING.rst']
    return {page: page.read_text(encoding='utf-8') for page in sorted(pages)}


_UNIT = base.TOP / 'etc/systemd/system'


class SecurityPageTest(base.TestCase):
    """It falls behind where something runs as root and is not on it, and where a line stands for
    itself.
    """

    def setUp(self) -> None:
        super().setUp()
        self.page = (_PAGES / 'explanation/security.rst').read_text()

    def section(self, title: str) -> str:
        return self.page.partition(f'\n{title}\n{"=" * len(title)}\n')[2].partition('\n====')[0]

    def test_who_runs(self) -> None:
        told = self.section('Who runs as whom')
        units = {unit.name for unit in _UNIT.glob('*.service')}
        self.assertIn('pcow-protect.service', units)
        by_its_program = {'pcow-nbd@.service'}  # pcow-nbd-unit
        self.assertEqual(
            [], sorted(unit for unit in units - by_its_program if f'``{unit}``' not in told)
        )
        for program in ('pcow-nbd-unit', 'pcow-privsep-helper', '/etc/qemu/pcow-hook'):
            self.assertIn(f'``{program}``', told)

    def test_each_line_names_a_test(self) -> None:
        bullets = re.split(r'\n\* ', '\n' + self.section('What is within reach'))[1:]
        self.assertGreater(len(bullets), 5)
        without = [one.split('\n')[0] for one in bullets if not self.names_a_test(one)]
        self.assertEqual([], without)
        for title in ('Who runs as whom', 'What is out of reach'):
            rows = self.section(title).split('\n   * - ')[2:]
            self.assertGreater(len(rows), 5)
            self.assertEqual([], [row for row in rows if not self.names_a_test(row)])

    @staticmethod
    def names_a_test(text: str) -> bool:
        """Or says that there is none."""
        words = ('``test_', '``tests/', 'No test')
        return any(word in text for word in words)


class LinksTest(base.TestCase):
    def test_pages(self) -> None:
        missing, seen = [], 0
        for page, text in _texts().items():
            for match in _DOC.finditer(text):
                seen += 1
                target = match['target']
                folder = _PAGES if target.startswith('/') else page.parent
                if not (folder / f'{target.lstrip("/")}.rst').is_file():
                    missing.append(f'{page.name}: {target}')
        self.assertGreater(seen, 100)
        self.assertEqual([], missing)

    def test_each_page_is_in_the_contents(self) -> None:
        index = (_PAGES / 'index.rst').read_text()
        listed = {match['target'] for line in index.splitlines() if (match := _ENTRY.match(line))}
        pages = {
            str(page.relative_to(_PAGES).with_suffix(''))
            for page in _PAGES.glob('*/*.rst')
            if page.parent.name != 'man' or page.stem == 'index'
        }
        self.assertEqual(pages, listed)

    def test_files(self) -> None:
        missing, seen = [], 0
        for page, text in _texts().items():
            for match in _FILE.finditer(text):
                seen += 1
                # {a,b} is the shell's
                pattern = re.sub(r'\{[^}]*\}', '*', match['path']).rstrip('/')
                if not list(base.TOP.glob(pattern)):
                    missing.append(f'{page.name}: {match["path"]}')
        self.assertGreater(seen, 50)
        self.assertEqual([], missing)

    def test_tests(self) -> None:
        """A test that is named is a file, or in one."""
        files = [
            path
            for path in (base.TOP / 'tests').rglob('*')
            if path.suffix in ('.c', '.h', '.py') and path.is_file()
        ]
        files += (base.TOP / 'qemu-backend').rglob('meson.build')
        known = {path.stem for path in files} | {
            path.name for path in (base.TOP / 'tests').rglob('test_*') if path.is_dir()
        }
        code = '\n'.join(path.read_text(errors='replace') for path in files)
        missing = [
            f'{page.name}: {match[0]}'
            for page, text in _texts().items()
            # there are Tempest's as well, in pages of what was run
            if not page.stem.startswith('evidence-')
            for match in _TEST.finditer(text)
            if match['name'] not in known and match['name'] not in code
        ]
        self.assertEqual([], missing)


class ShapeTest(base.TestCase):
    def test_pages_for_operators(self) -> None:
        """What you need (or what to do), what you see, what if it fails."""
        wanted = {
            False: ('What you need', 'What you see', 'If it fails'),
            True: ('What you see', 'What to do', 'If it fails'),
        }
        pages = sorted((_PAGES / 'howto').glob('*.rst'))
        self.assertGreater(len(pages), 15)
        missing = [
            f'{page.name}: {title}'
            for page in pages
            for title in wanted[page.stem.startswith('runbook-')]
            if not re.search(rf'^{title}.*\n===', page.read_text(), re.MULTILINE)
        ]
        self.assertEqual([], missing)

    def test_who_tested_what_is_for_contributors(self) -> None:
        told = re.compile(r'unit tests|functional tests|\b2026-\d\d-\d\d\b|\(row ``')
        self.assertEqual(
            [],
            [
                f'{page.name}: {match[0]}'
                for page in sorted((_PAGES / 'howto').glob('*.rst'))
                for match in told.finditer(page.read_text())
            ],
        )
