"""What pages have from the code, between ``<!-- generated: checks -->`` and ``<!-- end -->``.

The site is built with what the code says now. The pages have it, too, for who reads them in the repository:
``python -m docs.generated`` (`make format`) writes it there, and a test compares.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from configparser import ConfigParser
from pathlib import Path

import click

ROOT = Path(__file__).parent.parent
CHECKS = ROOT / "celery_idempotent" / "celery" / "checks.py"
KEYSPACE = ROOT / "celery_idempotent" / "stores" / "redis" / "keyspace.py"
METRICS = ROOT / "celery_idempotent" / "metrics.py"
MODELS = [
    ROOT / "celery_idempotent" / "django" / place for place in ("models.py", "outbox/models.py")
]

#: What becomes of a field in a database; {} is its length.
_COLUMNS = {
    "BigAutoField": "bigint",
    "BigIntegerField": "bigint",
    "BinaryField": "bytes",
    "BooleanField": "boolean",
    "CharField": "varchar({})",
    "IntegerField": "integer",
    "PositiveIntegerField": "integer",
    "ShortBinaryField": "{} bytes",
    "SmallIntegerField": "smallint",
    "TextField": "text",
}

#: An option in a sentence.
_OPTION = re.compile(r"(?<![\w`-])(--[\w-]+)")

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


def findings() -> dict[str, list[tuple[str, str]]]:
    """Return the problem and the hint of every place that makes a finding, by its id."""
    found = defaultdict(list)
    for node in ast.walk(ast.parse(CHECKS.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding":
            given = {each.arg: each.value for each in node.keywords}
            text = (_said(given.get("problem")), _said(given.get("hint")))
            found[_said(given.get("id"))].append(text)
    return dict(sorted(found.items(), key=lambda item: item[0][1:]))


def _checks() -> str:
    lines = []
    for name, places in findings().items():
        lines += [f"### `{name}`", ""]
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
            "| option | meaning |",
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


def metrics() -> Iterator[tuple[str, str, list[str], str]]:
    """Yield each metric: name, kind, labels, meaning."""
    code = ast.parse(METRICS.read_text(encoding="utf-8"))
    constants = {
        node.target.id: node.value
        for node in code.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    timed = constants["_TIMED"]
    assert isinstance(timed, ast.Tuple)
    kinds = {"Counter": "counter", "Histogram": "histogram", "GaugeMetricFamily": "gauge"}
    for node in sorted(ast.walk(code), key=lambda each: getattr(each, "lineno", 0)):
        kind = kinds.get(getattr(node.func, "id", "")) if isinstance(node, ast.Call) else None
        if kind is None or not isinstance(node, ast.Call):
            continue
        name, text, *more = node.args
        more += [each.value for each in node.keywords if each.arg == "labels"]
        labels: list[str] = ast.literal_eval(more[0]) if more else []
        if isinstance(name, ast.JoinedStr):  # one for each of a table
            for each in timed.elts:
                assert isinstance(each, ast.Tuple)
                yield (
                    _said(name).replace("…", _said(each.elts[0])),
                    kind,
                    [*labels],
                    _said(each.elts[1]),
                )
        else:
            yield _said(name), kind, [*labels], _said(text)


def _metrics() -> str:
    lines = ["| metric | kind and labels | meaning |", "|---|---|---|"]
    for name, kind, labels, text in metrics():
        by = f" by {', '.join(f'`{each}`' for each in labels)}" if labels else ""
        lines.append(f"| `{name}` | {kind}{by} | {text} |")
    return "\n".join(lines)


def tables() -> Iterator[tuple[str, str, list[tuple[str, str, str]], list[str]]]:
    """Yield each table: its name, what it is, its columns (name, type, meaning), and what is indexed."""
    for path in MODELS:
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and "models.Model" in map(ast.unparse, node.bases):
                meta = next((each for each in node.body if isinstance(each, ast.ClassDef)), None)
                said = {
                    ast.unparse(each.targets[0]): each.value
                    for each in (meta.body if meta else ())
                    if isinstance(each, ast.Assign)
                }
                if "managed" in said:  # it has no table
                    continue
                name = _said(said.get("db_table")) or f"celery_idempotent_{node.name.lower()}"
                indexed = [
                    ast.unparse(fields.value).strip("[](),").replace("'", "`")
                    for kind in ("indexes", "constraints")
                    for each in ast.walk(said.get(kind, ast.Tuple([])))
                    if isinstance(each, ast.Call)
                    for fields in each.keywords
                    if fields.arg == "fields"
                ]
                about = " ".join((ast.get_docstring(node) or "").split())
                yield name, _markdown(about), [*_columns(node, text.splitlines())], indexed


def _columns(model: ast.ClassDef, lines: list[str]) -> Iterator[tuple[str, str, str]]:
    for node in model.body:
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
            continue
        given = {each.arg: each.value for each in node.value.keywords}
        kind = _COLUMNS[ast.unparse(node.value.func).rpartition(".")[2]]
        length = given.get("max_length")
        kind = kind.format(500 if isinstance(length, ast.Name) else getattr(length, "value", ""))
        kind += " or null" if "null" in given else ""
        for flag, word in (
            ("primary_key", "primary key"),
            ("unique", "unique"),
            ("db_index", "indexed"),
        ):
            kind += f", {word}" if flag in given else ""
        above, comment = node.lineno - 2, list[str]()
        while lines[above].lstrip().startswith("#: "):
            comment.insert(0, lines[above].strip()[3:])
            above -= 1
        name = _said(given.get("db_column")) or ast.unparse(node.targets[0])
        states = re.findall(r"'(\w)', '(\w+)'", ast.unparse(given.get("choices", ast.Tuple([]))))
        letters = ", ".join(f"`{letter}` {state}" for letter, state in states)
        yield name, kind, _markdown(" ".join(comment)) + (f" {letters}." if letters else "")


def _markdown(text: str) -> str:
    return text.replace("``", "`")


def _tables() -> str:
    lines = []
    for name, about, columns, indexed in tables():
        lines += [f"## `{name}`", "", about, "", "| column | type | meaning |", "|---|---|---|"]
        lines += [f"| `{column}` | {kind} | {text} |" for column, kind, text in columns]
        lines += ["", *(f"- Indexed together: {fields}" for fields in indexed), ""]
    return "\n".join(lines)


def options() -> Iterator[tuple[str, str, str]]:
    """Yield each option of the reference: its name, its default, and what its section begins with."""
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    for name, default, text in re.findall(
        r"^### `(\w+)`\n\n\*[^*]*?Default:? ([^*]+)\.\*\s((?:.+\n)+)", page, re.MULTILINE
    ):
        first = re.split(r"[.:;](?:\s|$)", " ".join(text.split()), maxsplit=1)[0]
        yield name, " ".join(default.split()), first


def _options() -> str:
    lines = ["| option | default | meaning |", "|---|---|---|"]
    lines += [f"| [`{name}`](#{name}) | {default} | {text} |" for name, default, text in options()]
    return "\n".join(lines)


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
            found.append((f"`{match[1]}`", f"{match[2]} or newer, older than {match[3]}"))
    return found


def _supported() -> str:
    lines = ["| what | versions |", "|---|---|"]
    return "\n".join(lines + [f"| {name} | {versions} |" for name, versions in supported()])


GENERATED: dict[str, Callable[[], str]] = {
    "checks": _checks,
    "commands": _commands,
    "keys": _keys,
    "metrics": _metrics,
    "options": _options,
    "supported": _supported,
    "tables": _tables,
}


if __name__ == "__main__":
    for each in pages():
        each.write_text(fill(each.read_text(encoding="utf-8")), encoding="utf-8")
