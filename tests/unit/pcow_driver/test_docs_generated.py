# SPDX-License-Identifier: Apache-2.0
"""What the build of the documentation makes of the schema and of the lists of options."""

import ast
import re

from tests.unit.pcow_driver import base
from tools.lib.docs import options
from tools.lib.docs import qapi

_NUMBERS = re.compile(r'u?int\d*$|size$')
_SIZES = {'uint8', 'uint32', 'uint64'}
_UNIT = re.compile(
    r'\b(bytes|seconds|nanoseconds|milliseconds|percentage|number of|version of)\b', re.IGNORECASE
)


class SchemaTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.entries = {entry.name: entry for entry in qapi.entries(base.TOP)}

    def test_all_of_the_schema(self) -> None:
        text = qapi.schema_file(base.TOP).read_text()
        named = re.findall(r"^\{ '(?:enum|struct|command|event)': '([^']+)'", text, re.MULTILINE)
        self.assertGreater(len(named), 15)
        self.assertEqual([], sorted(set(named) - set(self.entries)))

    def test_none_without_pcow(self) -> None:
        """Nothing defines them in a QEMU that is built without it: it could not be linked."""
        text = qapi.schema_file(base.TOP).read_text()
        own = [entry for entry in self.entries.values() if f"'{entry.name}'" in text]
        self.assertGreater(len(own), 15)
        self.assertEqual([], [entry.name for entry in own if entry.code.get('if') != 'CONFIG_PCOW'])

    def test_each_number_has_a_unit(self) -> None:
        without = [
            f'{entry.name}.{member}'
            for entry in self.entries.values()
            for member, kind in entry.types().items()
            if _NUMBERS.match(kind) and not _UNIT.search(' '.join(entry.members[member]))
        ]
        self.assertEqual([], without)

    def test_each_type_is_explained(self) -> None:
        used = {
            kind.strip('[]') for entry in self.entries.values() for kind in entry.types().values()
        }
        self.assertEqual(set(), used - set(self.entries) - {'', 'str', 'bool', 'int'} - _SIZES)

    def test_examples_are_whole(self) -> None:
        """What query-pcow's example answers has every member that is not optional."""
        example = '\n'.join(self.entries['query-pcow'].examples).partition('<-')[2]
        answer = ast.literal_eval(
            example.strip().replace('false', 'False').replace('true', 'True')
        )['return'][0]
        info, stats = self.entries['PcowInfo'], self.entries['PcowStats']
        self.assertEqual(set(info.types()), set(answer))
        self.assertEqual(set(stats.types()), set(answer['stats']))

    def test_columns(self) -> None:
        """QEMU 10.2 does not take more, but in examples."""
        text = re.sub(
            r'^# \.\. qmp-example::.*?^##$',
            '',
            qapi.schema_file(base.TOP).read_text(),
            flags=re.MULTILINE | re.DOTALL,
        )
        self.assertEqual([], re.findall(r'^#.{70,}$', text, re.MULTILINE))

    def test_page(self) -> None:
        page = '\n'.join(qapi.page(base.TOP, 'command'))
        self.assertIn('Returns: list of `PcowInfo`_.', page)
        self.assertIn('``max-wait`` (uint32, optional)', page)
        self.assertIn('- if the VM is running', page)
        self.assertIn('``pcow-low``', '\n'.join(qapi.page(base.TOP, 'property')))

    def test_comment_of_another(self) -> None:
        with self.assertRaisesRegex(qapi.SchemaInvalid, 'members and comments differ'):
            list(
                qapi.parse(
                    "##\n# @A:\n#\n# @b: text\n##\n{ 'struct': 'A', 'data': {'c': 'int'} }\n"
                )
            )


class OptionsTest(base.TestCase):
    def test_all_of_the_samples(self) -> None:
        shown = {
            line.strip('`')
            for group in ('pcow', 'pcow_privileged', 'nova_pcow', 'backend_defaults')
            for line in options.page(group)
            if line.startswith('``')
        }
        samples = {
            name
            for sample in (base.TOP / 'etc/pcow').glob('*.sample')
            for name in re.findall(r'^#(\w+) =', sample.read_text(), re.MULTILINE)
        }
        self.assertGreater(len(samples), 20)
        self.assertEqual(samples, shown)

    def test_type_and_default(self) -> None:
        page = '\n'.join(options.page('nova_pcow'))
        self.assertIn('Number, 0 to 64; default: ``8``.', page)
        self.assertIn('``true`` or ``false``; default: ``false``.', page)

    def test_unknown_group(self) -> None:
        with self.assertRaisesRegex(ValueError, 'no option is in a group none'):
            options.page('none')
