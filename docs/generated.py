"""What pages have from the code, between ``<!-- generated: checks -->`` and ``<!-- end -->``.

The site is built with what the code says now. The pages have it, too, for who reads them in the repository:
``python -m docs.generated`` (`make format`) writes it there, and a test compares.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from configparser import ConfigParser
from pathlib import Path

from docs import timelines

ROOT = Path(__file__).parent.parent
CHECKS = ROOT / "celery_idempotent" / "celery" / "checks.py"
METRICS = ROOT / "celery_idempotent" / "metrics.py"

_MARK = re.compile(r"^(<!-- generated: (\w+) -->\n).*?(^<!-- end -->$)", re.MULTILINE | re.DOTALL)


def fill(text: str) -> str:
    """Put in what the code says."""
    return _MARK.sub(
        lambda match: f"{match[1]}\n{GENERATED[match[2]]().strip()}\n\n{match[3]}", text
    )


def pages() -> list[Path]:
    """Return the pages with a part from the code."""
    return [
        page
        for page in sorted((ROOT / "docs").glob("*.md"))
        if _MARK.search(page.read_text(encoding="utf-8"))
    ]


def _said(node: ast.expr | None) -> str:
    """Return a text of the code, with … for what is known only when it runs."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_said(each) or "…" for each in values)
    return ""


def findings() -> dict[str, tuple[str, str]]:
    """Return the problem and the hint of every finding, by its id."""
    table = re.search(r'_TEXTS: Final = """(.*?)"""', CHECKS.read_text(encoding="utf-8"), re.DOTALL)
    assert table is not None
    lines: list[tuple[str, str, str]] = re.findall(r"(\w+) (.+)\n +(.+)\n", table[1])
    return {name: (problem, hint) for name, problem, hint in lines}


#: What a finding names, where it is listed.
_NAMES = {
    "{server.kind} {server.version}": "Redis",
    "{server.kind}": "Redis",
    "{store!r}": "the store",
    "{missing}": "timeout",
}


def _checks() -> str:
    lines = []
    for name, (problem, _) in findings().items():
        # Without figures in brackets, and a list or an error at the end.
        text = re.sub(r" \([^)]*{[^)]*\)|: {(?:tasks|error)}(?=\.?$)", "", problem).rstrip(".")
        for place, word in _NAMES.items():
            text = text.replace(place, word)
        lines.append(f"- `{name}`: {text}.")
    return "\n".join(lines)


def metrics() -> Iterator[tuple[str, str, list[str], str]]:
    """Yield each metric: name, kind, labels, meaning."""
    code = ast.parse(METRICS.read_text(encoding="utf-8"))
    kinds = {"Counter": "counter", "Histogram": "histogram"}
    tables = {
        node.target.id: ast.literal_eval(node.value)
        for node in code.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(node.value, ast.Dict)
    }
    for node in sorted(ast.walk(code), key=lambda each: getattr(each, "lineno", 0)):
        kind = kinds.get(getattr(node.func, "id", "")) if isinstance(node, ast.Call) else None
        if kind is None or not isinstance(node, ast.Call):
            continue
        name, text, *more = node.args
        more += [each.value for each in node.keywords if each.arg == "labels"]
        labels: list[str] = ast.literal_eval(more[0]) if more else []
        yield _said(name), kind, labels, _said(text)
    for gauge, meaning in tables["GAUGES"].items():
        by = tables["LABELS"].get(gauge)
        yield f"celery_idempotency_{gauge}", "gauge", [by] if by else [], meaning


def _metrics() -> str:
    lines = []
    for name, kind, labels, text in metrics():
        by = f" by {', '.join(f'`{each}`' for each in labels)}" if labels else ""
        lines.append(f"- `{name}` ({kind}{by}): {text}")
    return "\n".join(lines)


def options() -> Iterator[tuple[str, str]]:
    """Yield each option of the page of options: its name and its default."""
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    for name, default in re.findall(
        r"^### `(\w+)`\n\n\*[^*]*?Default:? ([^*]+)\.\*\s", page, re.MULTILINE
    ):
        yield name, " ".join(default.split())


def _options() -> str:
    rows = [f"| [`{name}`](#{name}): {default} |" for name, default in options()]
    return "\n".join(["| option: default |", "|---|", *rows])


def supported() -> list[tuple[str, str]]:
    """Return what a version of the library works with, and in which versions."""
    about = ConfigParser()
    about.read(ROOT / "setup.cfg", encoding="utf-8")
    wanted = [about["options"]["install_requires"], *about["options.extras_require"].values()]
    pythons = re.findall(r"Python :: (3\.\d+)$", about["metadata"]["classifiers"], re.MULTILINE)
    found = [("Python", f"{pythons[0]} to {pythons[-1]}")]
    for line in "\n".join(wanted).splitlines():
        # `celery[redis]>=5.4,<5.8`; what is not to be taken is between.
        match = re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+),(?:.*,)?<([\d.]+)$", line)
        if match:
            found.append((f"`{match[1]}`", f"`>={match[2]},<{match[3]}`"))
    return found


def _supported() -> str:
    return "\n".join(f"- {name}: {versions}" for name, versions in supported())


GENERATED: dict[str, Callable[[], str]] = {
    "checks": _checks,
    "metrics": _metrics,
    "options": _options,
    "supported": _supported,
}

if __name__ == "__main__":
    timelines.PICTURE.write_text(timelines.draw(), encoding="utf-8")
    for each in pages():
        each.write_text(fill(each.read_text(encoding="utf-8")), encoding="utf-8")
