"""Records a program's terminal as an SVG that can be played: ``python docs/recording.py OUTPUT.svg PROGRAM …``.

The program runs for real, on a pseudo-terminal. What it writes is read by a terminal emulator, whose screen is noted
whenever it has changed. The picture has these screens side by side and shows the last one. Opened as
``OUTPUT.svg#play`` it moves from one to the next at the times at which they were seen, divided by ``SPEED``.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import pyte

COLUMNS: Final = 96
ROWS: Final = 30
#: So much faster than it was.
SPEED: Final = 2.0
#: Look for changes so often, in seconds; and show the last screen for so long.
EVERY_S: Final = 0.4
HOLD_S: Final = 8.0
#: Of one character, in pixels.
WIDTH: Final = 8.4
HEIGHT: Final = 17
MARGIN: Final = 12

_FONTS: Final = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
_BACKGROUND: Final = "#151b23"
_COLORS: Final = {
    "default": "#d1d7e0",
    "green": "#3fb950",
    "red": "#ff7b72",
    "brown": "#d29922",
    "blue": "#58a6ff",
    "magenta": "#bc8cff",
    "cyan": "#39c5cf",
}

#: One line of the screen: text, color and boldness of each part, with the column that it begins at.
Line = tuple[tuple[int, str, str, bool], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """What was to be seen from a moment on, in seconds since the start."""

    at_s: float
    lines: tuple[Line, ...]


def record(command: Sequence[str]) -> list[Screen]:
    """Run a program until it ends; return each screen that it showed."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    # Another make shall not know that one has started this.
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    env["TERM"] = "xterm-256color"
    stream.feed(f"$ {' '.join(command)}\r\n".encode())
    begin = time.monotonic()
    with subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=env
    ) as program:
        os.close(terminal)
        found: list[Screen] = []
        for data in _read(reader):
            stream.feed(data)
            now = time.monotonic() - begin
            if not found or now - found[-1].at_s >= EVERY_S:
                _note(found, screen, now)
        _note(found, screen, time.monotonic() - begin)
    os.close(reader)
    if program.returncode:
        sys.exit(f"{command} ended with {program.returncode}")
    return found


def _read(reader: int) -> Iterator[bytes]:
    """Yield what the program writes, and nothing now and then, until it ends."""
    while True:
        if not select.select([reader], [], [], EVERY_S)[0]:
            yield b""
            continue
        try:
            data = os.read(reader, 65536)
        except OSError:  # Linux: the last who had the terminal open has closed it
            return
        if not data:
            return
        yield data


def _note(found: list[Screen], screen: pyte.Screen, at_s: float) -> None:
    lines = tuple(_line(screen.buffer[row]) for row in range(ROWS))
    if not found or found[-1].lines != lines:
        found.append(Screen(at_s=at_s, lines=lines))


def _line(cells: Any) -> Line:
    parts, column = [], 0
    for (color, bold), group in groupby(
        (cells[each] for each in range(COLUMNS)), lambda cell: (cell.fg, cell.bold)
    ):
        text = "".join(cell.data for cell in group)
        if text.strip():
            parts.append((column, text.rstrip(), color, bold))
        column += len(text)
    return tuple(parts)


def draw(screens: Sequence[Screen], *, title: str) -> str:
    """Return the picture."""
    width, height = COLUMNS * WIDTH + 2 * MARGIN, ROWS * HEIGHT + 2 * MARGIN
    total_s = screens[-1].at_s / SPEED + HOLD_S
    moves = "".join(
        f"{100 * screen.at_s / SPEED / total_s if number else 0:.3f}%{{transform:translateX({-number * width:.1f}px)}}"
        for number, screen in enumerate(screens)
    )
    last = f"transform:translateX({-(len(screens) - 1) * width:.1f}px)"
    names = {line: f"l{n}" for n, line in enumerate(_distinct(screens))}
    shown = "".join(
        f'<g transform="translate({number * width:.1f})">{_shown(screen, names)}</g>'
        for number, screen in enumerate(screens)
    )
    size = f'viewBox="0 0 {width:.1f} {height}" width="{width:.0f}" height="{height}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" id="play" {size} role="img">
<title>{escape(title)}</title>
<style>
text{{font:14px/1 {_FONTS};white-space:pre;fill:{_COLORS["default"]}}}
.b{{font-weight:bold}}
{"".join(f".{name}{{fill:{color}}}" for name, color in _COLORS.items())}
#strip{{{last}}}
#play:target #strip{{animation:play {total_s:.2f}s step-end infinite}}
@keyframes play{{{moves}}}
</style>
<defs>{"".join(_drawn(line, name) for line, name in names.items())}</defs>
<rect width="100%" height="100%" rx="8" fill="{_BACKGROUND}"/>
<g id="strip">{shown}</g>
</svg>
"""


def _distinct(screens: Sequence[Screen]) -> dict[Line, None]:
    return dict.fromkeys(line for screen in screens for line in screen.lines if line)


def _drawn(line: Line, name: str) -> str:
    parts = []
    for column, text, color, bold in line:
        # Leading spaces are left to the place, so that no renderer can collapse them.
        begin = column + len(text) - len(text.lstrip())
        text = text.lstrip()
        style = f"{color if color in _COLORS else 'default'}{' b' if bold else ''}"
        parts.append(
            f'<text x="{begin * WIDTH:.1f}" textLength="{len(text) * WIDTH:.1f}" class="{style}">'
            f"{escape(text)}</text>"
        )
    return f'<g id="{name}">{"".join(parts)}</g>'


def _shown(screen: Screen, names: dict[Line, str]) -> str:
    return "".join(
        f'<use href="#{names[line]}" x="{MARGIN}" y="{MARGIN + HEIGHT * row + 13}"/>'
        for row, line in enumerate(screen.lines)
        if line
    )


if __name__ == "__main__":
    output, *words = sys.argv[1:]
    about = f"A recorded run of {' '.join(words)}, played {SPEED:g} times as fast"
    Path(output).write_text(draw(record(words), title=about), encoding="utf-8")
