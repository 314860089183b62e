"""The picture of the four cases: `python -m docs.timelines` writes docs/_static/timelines.svg from the text below."""

from __future__ import annotations

from html import escape
from pathlib import Path

PICTURE = Path(__file__).parent / "_static" / "timelines.svg"

#: Cases; their lanes; parts of a lane: from, to, kind, words. Times are of 0 to 40.
CASES = """
1  A duplicate while the task runs
   worker 1 | 2 24 run runs
   worker 2 | 9 12 met back to the queue | 29 33 replay gets the result
   record   | 2 24 held PROCESSING | 24 40 done COMPLETED
2  A duplicate after the task is done
   worker 1 | 2 16 run runs
   worker 2 | 24 28 replay gets the result
   record   | 2 16 held PROCESSING | 16 40 done COMPLETED, with the result
3  A crash, and the redelivery
   worker 1 | 2 10 run runs | 10 10 crash killed
   worker 2 | 21 31 run runs again
   record   | 2 11 held PROCESSING | 11 21 free INTERRUPTED | 21 31 held PROCESSING | 31 40 done COMPLETED
4  A frozen worker that comes back
   worker 1 | 2 8 run runs | 8 33 frozen frozen for longer than its lease | 33 37 met refused
   worker 2 | 17 28 run runs
   record   | 2 17 held PROCESSING, token 1 | 17 28 held token 2 | 28 40 done COMPLETED
"""

WIDTH, LEFT, UNIT, LANE = 440, 58, 9.4, 32
STYLE = """
text { font: 11px system-ui, sans-serif; fill: #1f2328 } .title { font-size: 14px; font-weight: 600 }
.paper { fill: #fff } .run { fill: #2f6fdd } .replay { fill: #1a7f37 } .met { fill: #9a6700 }
.held { fill: #ddebff } .done { fill: #d6f2dd } .free { fill: #fbe7c2 } .frozen { fill: #d0d7de }
.crash { stroke: #cf222e; stroke-width: 3 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .paper { fill: #0d1117 } .met { fill: #d29922 } .replay { fill: #3fb950 }
.held { fill: #16325c } .done { fill: #12401f } .free { fill: #553b0b } .frozen { fill: #3d444d }
}
"""
#: The kinds of the record's lane, whose bars have the words in them.
RECORD = {"held", "done", "free"}


def part(words: str, top: float) -> str:
    """Return one part of a lane: a bar, or a cross, with its words in it or below it."""
    start, end, kind, label = words.split(maxsplit=3)
    left, width = LEFT + float(start) * UNIT, (float(end) - float(start)) * UNIT
    text = f'<text x="{left + (4 if kind in RECORD else 0):g}" y="{top + (11 if kind in RECORD else 23):g}">'
    text += f"{escape(label)}</text>"
    if kind == "crash":
        strokes = f"M{left - 5:g} {top}l10 12m0 -12l-10 12"
        return f'<path class="crash" d="{strokes}"/>' + text
    height = 15 if kind in RECORD else 12
    return f'<rect class="{kind}" x="{left:g}" y="{top:g}" width="{width:g}" height="{height}" rx="3"/>{text}'


def draw() -> str:
    """Return the picture as SVG, for light and dark pages, readable from 360 pixels on."""
    found, top = [], 4.0
    for line in CASES.strip().splitlines():
        if not line.startswith(" "):
            top += 24
            found.append(f'<text class="title" x="8" y="{top:g}">{escape(line)}</text>')
            top += 12
            continue
        name, *parts = line.split("|")
        found.append(f'<text x="8" y="{top + 11:g}">{name.strip()}</text>')
        found += [part(each, top) for each in parts]
        top += LANE if "worker" in name else 20
    top += 6
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:g}" width="{WIDTH}" role="img">'
    title = "<title>Four timelines of two deliveries of one operation, and its record</title>"
    paper = f'<rect class="paper" width="{WIDTH}" height="{top:g}" rx="8"/>'
    return "\n".join([head, title, f"<style>{STYLE}</style>", paper, *found, "</svg>\n"])


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
