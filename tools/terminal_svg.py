"""What a terminal shows, as SVG: one still picture, or a session that plays by itself, without
scripts or fonts of its own.

`Screen` understands what rich and this project write: text, colours, and the moves of a progress
line. It keeps all lines, as a terminal that one can scroll back. Drawn lines, blocks and braille
dots become shapes, so that they join in every font.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

PAGE, INK, SOFT, EDGE = "#14191f", "#e8edf2", "#a3b0bd", "#36414c"
SIXTEEN = (
    "#4d5966",
    "#ff8a80",
    "#2fc79a",
    "#d8c440",
    "#58b4f0",
    "#e88fc4",
    "#7cc6dc",
    "#e8edf2",
    "#77838f",
    "#ff8a80",
    "#2fc79a",
    "#d8c440",
    "#58b4f0",
    "#e88fc4",
    "#7cc6dc",
    "#ffffff",
)
"""Colours of a terminal's theme, all at contrast 3:1 or more on the page but the first, which
nothing is written in.
"""
LEAST_LIGHT = 0.5
"""Of a colour of the other 240: darker ones are lightened, as a dark terminal's theme does."""
WIDTH, HEIGHT, SIZE, PADDING = 7.8, 18, 13, 16
"""Of a character and of a line, in pixels."""
FONTS = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
_PART = re.compile(
    r"\x1b\[([?\d;]*)([A-Za-z])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|([\r\n])|([^\x1b\r\n]+)"
)
_GAP = re.compile(r" {2,}")


class Style(NamedTuple):
    colour: str = ""
    bold: bool = False
    dim: bool = False


PLAIN = Style()
Line = tuple[tuple[str, Style], ...]
"""(text, style), left to right."""


class Screen:
    """Feed it what a program writes; `shown` is what it then shows."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self._rows: list[list[tuple[str, Style]]] = [[]]
        self._row = self._column = 0
        self._style = PLAIN

    def feed(self, text: str) -> None:
        for numbers, letter, move, plain in _PART.findall(text):
            if plain:
                for character in plain:
                    self._put(character)
            elif move == "\r":
                self._column = 0
            elif move == "\n":
                self._to_row(self._row + 1)
            elif letter == "m":
                self._style = styled(self._style, [int(n or 0) for n in numbers.split(";")])
            elif letter == "A":
                self._row = max(0, self._row - int(numbers or 1))
            elif letter == "K":
                self._rows[self._row] = (
                    [] if numbers == "2" else self._rows[self._row][: self._column]
                )

    def shown(self) -> list[Line]:
        return [tuple(_runs(row)) for row in self._rows]

    def _put(self, character: str) -> None:
        if self._column >= self.columns:
            self._to_row(self._row + 1)
            self._column = 0
        row = self._rows[self._row]
        row += [(" ", PLAIN)] * (self._column - len(row))
        row[self._column : self._column + 1] = [(character, self._style)]
        self._column += 1

    def _to_row(self, row: int) -> None:
        self._row = row
        while len(self._rows) <= row:
            self._rows.append([])


def styled(style: Style, codes: Sequence[int]) -> Style:
    """After a sequence of SGR codes: bold, dim, and colours of 16 or 256; backgrounds are left out."""
    left = list(codes)
    while left:
        code = left.pop(0)
        if code == 0:
            style = PLAIN
        elif code in (1, 2):
            style = style._replace(bold=True) if code == 1 else style._replace(dim=True)
        elif code == 22:
            style = style._replace(bold=False, dim=False)
        elif 30 <= code <= 37 or 90 <= code <= 97:
            style = style._replace(colour=SIXTEEN[code - 30 if code < 90 else code - 82])
        elif code == 39:
            style = style._replace(colour="")
        elif code in (38, 48) and left[:1] == [5]:
            colour, left = of_256(left[1]), left[2:]
            style = style._replace(colour=colour) if code == 38 else style
        elif code in (38, 48) and left[:1] == [2]:
            colour, left = "#{:02x}{:02x}{:02x}".format(*left[1:4]), left[4:]
            style = style._replace(colour=colour) if code == 38 else style
    return style


def of_256(n: int) -> str:
    """A colour of xterm's palette, lightened where it would be hard to see."""
    if n < 16:
        return SIXTEEN[n]
    cube = [(0, 95, 135, 175, 215, 255)[(n - 16) // by % 6] for by in (36, 6, 1)]
    levels = [8 + 10 * (n - 232)] * 3 if n >= 232 else cube
    lift = max(0.0, LEAST_LIGHT - max(levels) / 255 * 0.6)
    return "#" + "".join(f"{round(level + lift * (255 - level)):02x}" for level in levels)


def _runs(row: Sequence[tuple[str, Style]]) -> Iterator[tuple[str, Style]]:
    text, style = "", PLAIN
    for character, own in row:
        if own != style and text:
            yield text, style
            text = ""
        text, style = text + character, own
    if text.strip() or text:
        yield text, style


def still(lines: Sequence[Line], columns: int, title: str) -> str:
    """The whole of it as one picture; `title` says it to whoever does not see it."""
    while lines and not "".join(text for text, _ in lines[-1]).strip():
        lines = lines[:-1]
    rows = "".join(drawn(line, i) for i, line in enumerate(lines))
    return _framed(rows, columns, len(lines), title, "")


class Shown(NamedTuple):
    """What the terminal shows from a moment on, in seconds."""

    at_s: float
    lines: Sequence[Line]


def playing(frames: Sequence[Shown], columns: int, rows: int, end_s: float, title: str) -> str:
    """It plays for `end_s` seconds and begins again. Every version of a line is drawn once and
    shown while it lasts; the picture moves up as the terminal scrolls. Whoever asks for less motion
    sees the last moment.
    """
    versions: list[tuple[int, Line, float, float]] = []
    current: dict[int, tuple[Line, float]] = {}
    scrolls: list[tuple[float, int]] = [(0.0, 0)]
    for frame in frames:
        for i in range(max(len(frame.lines), len(current))):
            line = frame.lines[i] if i < len(frame.lines) else ()
            before = current.get(i, ((), 0.0))
            if line != before[0]:
                if before[0]:
                    versions.append((i, before[0], before[1], frame.at_s))
                current[i] = (line, frame.at_s)
        top = max(0, len(frame.lines) - rows)
        if top != scrolls[-1][1]:
            scrolls.append((frame.at_s, top))
    versions += [(i, line, since, end_s) for i, (line, since) in current.items() if line]
    spans = sorted({(since, until) for _, _, since, until in versions})
    names = {span: f"s{n}" for n, span in enumerate(spans)}
    style = [f"g[class]{{animation:{end_s:.2f}s step-end infinite}}"]
    for (since, until), name in names.items():
        last = until >= end_s
        a, b = 100 * since / end_s, 100 * until / end_s
        steps = f"0%{{opacity:0}}{a:.3f}%{{opacity:1}}" + ("" if last else f"{b:.3f}%{{opacity:0}}")
        style.append(
            f"@keyframes {name}{{{steps}}}.{name}{{animation-name:{name}!important;opacity:{int(last)}}}"
        )
    moves = "".join(
        f"{100 * at / end_s:.3f}%{{transform:translateY({-HEIGHT * top}px)}}" for at, top in scrolls
    )
    at_the_end = f"transform:translateY({-HEIGHT * scrolls[-1][1]}px)"
    style.append(
        f"@keyframes up{{{moves}}}#up{{animation:up {end_s:.2f}s step-end infinite;{at_the_end}}}"
    )
    style.append("@media (prefers-reduced-motion:reduce){g,#up{animation:none!important}}")
    groups = "".join(
        f'<g class="{names[span]}">{"".join(drawn(line, i) for i, line, *own in versions if tuple(own) == span)}</g>'
        for span in spans
    )
    window = f'<svg width="{columns * WIDTH:.0f}" height="{rows * HEIGHT + 4}"><g id="up">{groups}</g></svg>'
    return _framed(window, columns, rows, title, "".join(style))


def drawn(line: Line, row: int) -> str:
    """One line: words where their columns are, and shapes for what is drawn in characters."""
    out, column, top = [], 0, row * HEIGHT
    for text, style in line:
        colour = style.colour or (SOFT if style.dim else INK)
        look = f' fill="{colour}"' if colour != INK else ""
        look += ' font-weight="700"' if style.bold else ""
        words = "".join(" " if _is_drawn(c) else c for c in text)
        at = 0
        for part in _GAP.split(words):
            at = words.index(part, at) if part else at
            shift = len(part) - len(part.lstrip())
            if part.strip():
                length = len(part.strip()) * WIDTH
                out.append(
                    f'<text x="{(column + at + shift) * WIDTH:.1f}" y="{top + SIZE + 1}" textLength="{length:.1f}"{look}>'
                    f"{escape(part.strip(), quote=False)}</text>"
                )
            at += len(part)
        shapes = "".join(_shape(c, (column + i) * WIDTH, top) for i, c in _joined(text))
        out += [f'<path d="{shapes}" fill="{colour}"/>'] if shapes else []
        column += len(text)
    return "".join(out)


def _is_drawn(character: str) -> bool:
    return "\u2500" <= character <= "\u25ff" or "\u2800" <= character <= "\u28ff"


def _joined(text: str) -> Iterator[tuple[int, str]]:
    """(where it begins, the characters) of what is drawn: equal lines and blocks as one."""
    for match in re.finditer(r"(─+|━+|█+|[\u2500-\u25ff\u2801-\u28ff])", text):
        yield match.start(), match[0]


def _box(x: float, y: float, width: float, height: float) -> str:
    return f"M{x:.1f} {y:.1f}h{width:.1f}v{height:.1f}h{-width:.1f}z"


def _shape(characters: str, x: float, top: float) -> str:
    """The outline of what a character draws, in its cell whose corner is (x, top)."""
    c, width, middle = characters[0], len(characters) * WIDTH, top + HEIGHT / 2
    if "\u2801" <= c <= "\u28ff":
        dots = ord(c) - 0x2800
        places = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3))
        return "".join(
            _box(
                x + (0.25 + 0.5 * across) * WIDTH - 0.9,
                top + (0.125 + 0.25 * down) * HEIGHT - 0.9,
                1.8,
                1.8,
            )
            for bit, (across, down) in enumerate(places)
            if dots >> bit & 1
        )
    up, down = (
        _box(x + WIDTH / 2 - 0.5, top, 1, HEIGHT / 2),
        _box(x + WIDTH / 2 - 0.5, middle, 1, HEIGHT / 2),
    )
    left, right = (
        _box(x, middle - 0.5, WIDTH / 2, 1),
        _box(x + WIDTH / 2, middle - 0.5, WIDTH / 2, 1),
    )
    if c in "━╸╺":
        return _box(x, middle - 1.5, width, 3)
    lines = {"│": up + down, "┤": up + down + left, "└": up + right, "├": up + down + right}
    if c == "─":
        return _box(x, middle - 0.5, width, 1)
    if c in lines:
        return lines[c]
    if c == "█":
        return _box(x, top + 2, width, HEIGHT - 4)
    if c == "░":
        return _box(x, top + HEIGHT - 5, WIDTH, 1)
    if c == "▲":
        return f"M{x + 0.8:.1f} {top + 13:.1f}h{WIDTH - 1.6:.1f}l{-WIDTH / 2 + 0.8:.1f} -8z"
    return f"M{x + 1.4:.1f} {middle:.1f}a2.5 2.5 0 1 0 5 0a2.5 2.5 0 1 0 -5 0z"  # a dot


def _framed(content: str, columns: int, rows: int, title: str, style: str) -> str:
    width, height = columns * WIDTH + 2 * PADDING, rows * HEIGHT + 2 * PADDING
    font = f"text{{font-family:{FONTS};font-size:{SIZE}px;white-space:pre}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}"'
        f' height="{height:.0f}"'
        f' role="img" aria-labelledby="t"><title id="t">{escape(title)}</title><style>{font}{style}</style>'
        f'<rect x=".5" y=".5" width="{width - 1:.0f}" height="{height - 1:.0f}" rx="8" fill="{PAGE}" stroke="{EDGE}"/>'
        f'<g transform="translate({PADDING} {PADDING})" fill="{INK}">{content}</g></svg>\n'
    )
