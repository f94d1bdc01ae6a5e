# SPDX-License-Identifier: Apache-2.0
"""Pictures of text: boxes on a grid, and arrows between them, as SVG.

A source is a text file, one thing a line; ``#`` begins a comment::

    alt The whole picture in words, for whoever does not see it. May be given in several lines.
    grid 150 60                      pixels of a cell
    see FILE: WORD, WORD             words that this picture takes from a file of the sources
    box NAME X Y WxH STYLE | text / second line
    arrow FROM TO | label            from edge to edge; FROM.right, TO.top: of the middle of a side
    text X Y | words                 without a box

Places and sizes are in cells, and may have fractions. What does not fit is an error.
"""

import dataclasses
from html import escape
import math
from pathlib import Path
import re

MARGIN = 8
FONT = 13
LINE = 17
SMALL = 11.5
# of a wide letter, in ems: so much at the most takes one of a sans-serif font on the average
LETTER = 0.56

# fill, line, dashes
STYLES = {
    'plain': ('#ffffff', '#444444', ''),
    'own': ('#d5ebd0', '#2f6b25', ''),
    'frozen': ('#dbe7f5', '#2d5585', ''),
    'shared': ('#efe3f3', '#6b3a7d', ''),
    'absent': ('#f4f4f4', '#888888', '4 3'),
    'trap': ('#fbe3cf', '#a4530c', ''),
    'group': ('none', '#999999', '2 3'),
}
SIDES = {'left': (0.0, 0.5), 'right': (1.0, 0.5), 'top': (0.5, 0.0), 'bottom': (0.5, 1.0)}
_WORDS = re.compile(r'^(?P<words>[^|]*?)(?:\s*\|\s*(?P<label>.*))?$')

Point = tuple[float, float]


class PictureInvalid(ValueError):
    """The message names the file and the line."""


@dataclasses.dataclass(frozen=True)
class Box:
    x: float
    y: float
    width: float
    height: float
    style: str
    lines: list[str]

    def at(self, side: str) -> Point:
        across, down = SIDES[side]
        return self.x + across * self.width, self.y + down * self.height

    @property
    def middle(self) -> Point:
        return self.x + self.width / 2, self.y + self.height / 2

    def edge_towards(self, point: Point) -> Point:
        """Where the line from the middle to a point leaves the box."""
        x, y = self.middle
        dx, dy = point[0] - x, point[1] - y
        share = max(abs(dx) / (self.width / 2), abs(dy) / (self.height / 2), 1e-9)
        return x + dx / share, y + dy / share


@dataclasses.dataclass
class Picture:
    alt: str = ''
    cell: Point = (150.0, 60.0)
    # file of the sources: words that have to be in it
    facts: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    boxes: dict[str, Box] = dataclasses.field(default_factory=dict)
    arrows: list[tuple[str, str, list[str]]] = dataclasses.field(default_factory=list)
    texts: list[tuple[Point, list[str]]] = dataclasses.field(default_factory=list)


def _split(label: str | None) -> list[str]:
    return [line.strip() for line in (label or '').split(' / ')] if label else []


def _check_fits(box: Box) -> None:
    if box.style == 'group':
        return
    widest = max((len(line) for line in box.lines), default=0)
    if widest * FONT * LETTER > box.width or len(box.lines) * LINE > box.height:
        raise ValueError(f'{" / ".join(box.lines)!r} does not fit into its box')


def _add(picture: Picture, line: str) -> None:
    match = _WORDS.match(line)
    assert match  # noqa: S101 - it matches everything
    kind, *words = match['words'].split()
    lines = _split(match['label'])
    width, height = picture.cell
    if kind == 'alt':
        picture.alt = f'{picture.alt} {line.partition(" ")[2].strip()}'.strip()
    elif kind == 'grid':
        picture.cell = float(words[0]), float(words[1])
    elif kind == 'see':
        file, _colon, seen = line.partition(' ')[2].partition(': ')
        picture.facts.setdefault(file, []).extend(word.strip() for word in seen.split(','))
    elif kind == 'box':
        name, x, y, size, style = words
        across, down = (float(number) for number in size.split('x'))
        if name in picture.boxes or style not in STYLES:
            raise ValueError(f'{name} is there already, or there is no style {style}')
        box = Box(float(x) * width, float(y) * height, across * width, down * height, style, lines)
        _check_fits(box)
        picture.boxes[name] = box
    elif kind == 'arrow':
        for end in words:
            name, _dot, side = end.partition('.')
            if name not in picture.boxes or (side and side not in SIDES):
                raise ValueError(f'there is no {end}')
        start, end = words
        picture.arrows.append((start, end, lines))
    elif kind == 'text':
        picture.texts.append(((float(words[0]) * width, float(words[1]) * height), lines))
    else:
        raise ValueError(f'{kind!r} is nothing that can be drawn')


def parse(text: str, name: str = 'picture') -> Picture:
    """
    :raises PictureInvalid:
    """
    picture = Picture()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith('#'):
            continue
        try:
            _add(picture, line)
        except ValueError as e:
            raise PictureInvalid(f'{name}:{number}: {e}') from e
    if not picture.alt or not picture.boxes:
        raise PictureInvalid(f'{name}: it needs "alt", which says it in words, and boxes')
    return picture


def _text(point: Point, lines: list[str], size: float, anchor: str = 'middle') -> list[str]:
    x, y = point
    first = y - (len(lines) - 1) * LINE / 2 + size * 0.35
    # white below it, so that a label on a line can be read
    widest = max((len(line) for line in lines), default=0) * size * LETTER
    left = x - widest / 2 if anchor == 'middle' else x
    return [
        f'<rect x="{left:.1f}" y="{first - size:.1f}" width="{widest:.1f}" '
        f'height="{len(lines) * LINE}" fill="#ffffff"/>',
        *(
            f'<text x="{x:.1f}" y="{first + number * LINE:.1f}" text-anchor="{anchor}" '
            f'font-size="{size}">{escape(line)}</text>'
            for number, line in enumerate(lines)
        ),
    ]


def _box(box: Box) -> list[str]:
    fill, line, dashes = STYLES[box.style]
    x, y = box.middle
    if box.style == 'group':
        label = _text((box.x + 8, box.y + LINE * 0.7), box.lines, SMALL, 'start')
    else:
        first = y - (len(box.lines) - 1) * LINE / 2 + FONT * 0.35
        label = [
            f'<text x="{x:.1f}" y="{first + number * LINE:.1f}" text-anchor="middle" '
            f'font-size="{FONT}">{escape(words)}</text>'
            for number, words in enumerate(box.lines)
        ]
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ''
    return [
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" '
        f'height="{box.height:.1f}" rx="4" fill="{fill}" stroke="{line}"{dashed}/>',
        *label,
    ]


def _ends(picture: Picture, start: str, end: str) -> tuple[Point, Point]:
    names = [word.partition('.') for word in (start, end)]
    boxes = [picture.boxes[name] for name, _dot, _side in names]
    fixed = [
        box.at(side) if side else None
        for box, (_name, _dot, side) in zip(boxes, names, strict=True)
    ]
    from_there = fixed[0] or boxes[0].edge_towards(fixed[1] or boxes[1].middle)
    return from_there, fixed[1] or boxes[1].edge_towards(fixed[0] or boxes[0].middle)


def _arrow(start: Point, end: Point) -> list[str]:
    (x1, y1), (x2, y2) = start, end
    length = math.hypot(x2 - x1, y2 - y1) or 1
    # the head is drawn by itself, as a marker needs a name that is unique in the page
    dx, dy = (x2 - x1) / length, (y2 - y1) / length
    left = x2 - 9 * dx - 4 * dy, y2 - 9 * dy + 4 * dx
    right = x2 - 9 * dx + 4 * dy, y2 - 9 * dy - 4 * dx
    head = ' '.join(f'{x:.1f},{y:.1f}' for x, y in ((x2, y2), left, right))
    return [
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2 - 8 * dx:.1f}" y2="{y2 - 8 * dy:.1f}" '
        'stroke="#444444"/>',
        f'<polygon points="{head}" fill="#444444"/>',
    ]


def draw(picture: Picture) -> str:
    """The picture as one SVG element, which has its own words for screen readers."""
    parts: list[str] = []
    for box in sorted(picture.boxes.values(), key=lambda box: box.style != 'group'):
        parts += _box(box)
    labels = list(picture.texts)
    for start, end, lines in picture.arrows:
        ends = _ends(picture, start, end)
        parts += _arrow(*ends)
        if lines:
            labels.append((((ends[0][0] + ends[1][0]) / 2, (ends[0][1] + ends[1][1]) / 2), lines))
    for point, lines in labels:
        parts += _text(point, lines, SMALL)
    width = max(box.x + box.width for box in picture.boxes.values()) + 2 * MARGIN
    height = max(box.y + box.height for box in picture.boxes.values()) + 2 * MARGIN
    alt = escape(picture.alt)
    return '\n'.join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{alt}" '
            f'viewBox="{-MARGIN} {-MARGIN} {width:.0f} {height:.0f}" width="{width:.0f}" '
            f'height="{height:.0f}" '
            'style="max-width: 100%; height: auto; background: #ffffff" '
            'font-family="sans-serif" fill="#111111">',
            f'<title>{alt}</title>',
            *parts,
            '</svg>',
        )
    )


def load(path: Path) -> Picture:
    """
    :raises PictureInvalid:
    """
    return parse(path.read_text(encoding='utf-8'), path.name)
