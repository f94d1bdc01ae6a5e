# SPDX-License-Identifier: Apache-2.0
"""What somebody made so that a tool says too much, or what a script cannot read."""

import json
import os
from pathlib import Path
import subprocess

from tests.functional import images
from tests.functional.images import KIB
from tests.functional.images import MIB
from tests.functional.images import SLAB

_OWNERS, _BITMAPS = 64 * KIB, MIB
_SLABS = 16384  # of one group
_RANGES = (_SLABS - 1) * 256
_MOST_TOLD = 1000
_MOST_OUTPUT = 2 * MIB
_HEADER = b'{"pcow-rescue": 1, "uuid": "00", "date": 1}\n'


class BoundsTest(images.ImageTestCase):
    def scattered(self) -> Path:
        """A file of little more than 1 MiB on which each second page of 32 GiB is lost."""
        path = self.create_plain('a.pcow', '8M')
        with path.open('r+b') as file:
            file.truncate(_SLABS * SLAB)
        images.patch(path, _OWNERS + 8, b'\xff' * 8 * (_SLABS - 1))
        images.patch(path, _BITMAPS, b'\x55' * 64 * _SLABS)
        return path

    def test_losses(self):
        path = self.scattered()
        output = self.img('check', '--output=json', path, code=2)
        self.assertLess(len(output), _MOST_OUTPUT)
        found = json.loads(output)
        self.assertEqual(_MOST_TOLD, len(found['lost']))
        self.assertEqual(_RANGES - _MOST_TOLD, found['lost-left-out'])
        self.assertEqual(_RANGES * 4096, found['lost-size'])
        self.assertLess(len(found['findings']), _MOST_TOLD + 10)
        text = self.img('check', path, code=2)
        self.assertLess(len(text), _MOST_OUTPUT)
        self.assertIn(f'Loss: {_RANGES - 100} more ranges', text)

    def test_rescue_file(self):
        """The table is printed line by line; JSON is made in memory."""
        path, count = self.path('a.rescue'), 50000
        path.write_bytes(
            _HEADER
            + b'{"layer": 1, "parent": 0, "size": 4096}\n' * count
            + b'{"lost": "data", "layer": 1, "length": 4096, "there": 0}\n' * count
            + b'{"end": %d, "lost-size": 1}\n{"repaired": true}\n' % count
        )
        output = self.img('rescue', '--output=json', path)
        self.assertLess(len(output), _MOST_OUTPUT)
        found = json.loads(output)
        for key in ('layers', 'lost'):
            self.assertEqual(_MOST_TOLD, len(found[key]))
            self.assertEqual(count - _MOST_TOLD, found[f'{key}-left-out'])
        self.assertEqual(count + 2, len(self.img('rescue', path).splitlines()))


class TextTest(images.ImageTestCase):
    """Whatever an image holds: JSON is UTF-8."""

    name = b'"\xff\xc3(\xe2\x82\xac\xed\xa0\x80'
    shown = '"\ufffd\ufffd(\u20ac\ufffd\ufffd\ufffd'

    def output(self, *args: object, code: int = 0) -> bytes:
        result = subprocess.run(
            [images.program('pcow-img'), *map(str, args)],
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=images.TIMEOUT,
        )
        self.assertEqual(code, result.returncode, result)
        return result.stdout

    def json(self, *args: object, code: int = 0) -> object:
        return json.loads(self.output(*args, '--output=json', code=code).decode())

    def test_names_that_are_not_utf8(self):
        path = self.create_plain('a.pcow', '8M')
        self.io(path, 'write -P 1 0 64k')
        self.img('snapshot', '-c', os.fsdecode(self.name), path)
        self.io(path, 'write -P 2 0 64k')
        self.assertEqual(self.shown, self.json('snapshot', '-l', path)[0]['name'])
        self.assertEqual(self.shown, self.json('info', path)['snapshots'][0]['name'])
        with path.open('r+b') as file:
            file.truncate(SLAB)
        found = self.json('check', path, code=2)
        self.assertIn(self.shown, [item.get('snapshot') for item in found['lost']])
        self.output('check', '-q', '-r', 'all', '--accept-loss', path)
        rescue = self.path('a.pcow.rescue')
        named = [
            json.loads(line)
            for line in rescue.read_bytes().decode().splitlines()
            if '"snapshot"' in line
        ]
        self.assertEqual({self.shown}, {item['snapshot'] for item in named})
        listed = self.json('rescue', rescue)
        self.assertIn(self.shown, [item.get('snapshot') for item in listed['layers']])
        self.assertIn(self.shown, [item.get('snapshot') for item in listed['lost']])

    def test_rescue_file(self):
        """Of a line what is known is told, and nothing else."""
        path = self.path('a.rescue')
        path.write_bytes(
            _HEADER
            + b'{"layer": 1, "size": 4096, "snapshot": "\xff", "other": "\xff"}\n'
            + b'{"lost": "\xff", "layer": 1, "snapshot": "\xff\\u0001", "other": {}}\n'
            + b'{"end": 1, "lost-size": 0}\n'
        )
        listed = self.json('rescue', path)
        self.assertEqual(
            [{'layer': 1, 'parent': 0, 'size': 4096, 'snapshot': '\ufffd'}], listed['layers']
        )
        self.assertEqual(
            [
                {
                    'lost': 'unknown',
                    'layer': 1,
                    'snapshot': '\ufffd\x01',
                    'length': 0,
                    'there': 0,
                    'kept': 0,
                }
            ],
            listed['lost'],
        )
