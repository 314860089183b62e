"""What pages have from the code: it takes the place of ``<!-- generated: checks -->`` and its like at build time."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import click

ROOT = Path(__file__).parent.parent
CHECKS = ROOT / "celery_idempotent" / "celery" / "checks"
KEYSPACE = ROOT / "celery_idempotent" / "stores" / "redis" / "keyspace.py"

#: An option in a sentence.
_OPTION = re.compile(r"(?<![\w`-])(--[\w-]+)")

_MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


def fill(text: str) -> str:
    """Put in what the code says."""
    return _MARK.sub(lambda match: GENERATED[match[1]](), text)


def _said(node: ast.expr | None) -> str:
    """Return a text of the code, with … for what is known only when it runs."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_said(each) or "…" for each in values)
    return ""


def findings() -> dict[str, list[tuple[str, str]]]:
    """Return the problem and the hint of every place that makes a finding, by its id."""
    found = defaultdict(list)
    for path in sorted(CHECKS.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding":
                given = {each.arg: each.value for each in node.keywords}
                text = (_said(given.get("problem")), _said(given.get("hint")))
                found[_said(given.get("id"))].append(text)
    return dict(sorted(found.items(), key=lambda item: item[0][1:]))


def _checks() -> str:
    lines = []
    for name, places in findings().items():
        lines += [f"## `{name}`", ""]
        for problem, hint in places:
            lines += [problem or "Its text is that of the error, which says what to set.", ""]
            lines += [f"**What to do:** {hint}", ""] if hint else []
    return "\n".join(lines)


def commands() -> Iterator[tuple[str, click.Command]]:
    """Yield the commands of ``celery idempotency``, by name."""
    from celery_idempotent.cli import idempotency

    context = click.Context(idempotency)
    for name in idempotency.list_commands(context):
        command = idempotency.get_command(context, name)
        if command is not None and not command.hidden:
            yield name, command


def _commands() -> str:
    lines = []
    for name, command in commands():
        context = click.Context(command, info_name=f"celery -A proj idempotency {name}")
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
        lines += [f"## `{name}`", "", "```console", f"$ {usage}", "```", ""]
        lines += [
            _OPTION.sub(r"`\1`", re.sub(r"\s+", " ", command.help or "")),
            "",
            "| option | |",
            "|---|---|",
        ]
        for option in command.params:
            record = option.get_help_record(context)
            if record is not None and record[1]:
                name, help_text = (each.replace("|", r" \| ") for each in record)
                help_text = _OPTION.sub(r"`\1`", help_text)
                lines.append(f"| `{name}` | {help_text} |")
        lines.append("")
    return "\n".join(lines)


def _keys() -> str:
    about = ast.get_docstring(ast.parse(KEYSPACE.read_text(encoding="utf-8"))) or ""
    _, _, rest = about.partition("::\n\n")
    drawn, _, prose = rest.partition("\n\nThe bucket")
    drawn = re.sub(r"^ {4}", "", drawn, flags=re.MULTILINE)
    return f"```text\n{drawn}\n```\n\nThe bucket{prose}"


GENERATED: dict[str, Callable[[], str]] = {
    "checks": _checks,
    "commands": _commands,
    "keys": _keys,
}
