"""Plain words: short sentences."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LONGEST, MEAN = 35, 20


def parts(text: str) -> Iterator[str]:
    """Yield paragraphs, items of lists and cells of tables; no code, no headings."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^( *)(```|~~~).*?^ *\2", "\n", text, flags=re.MULTILINE | re.DOTALL)
    found: list[str] = []
    for line in [*text.splitlines(), ""]:
        bare = line.strip()
        if found and (not bare or re.match(r"[-*|#>] ?|\d+\. ", bare)):
            yield " ".join(found)
            found = []
        if bare.startswith("|"):
            yield from (cell.strip() for cell in re.split(r"(?<!\\)\|", bare.strip("|")))
        elif bare and not bare.startswith("#") and (found or not re.match(" {4}", line)):
            found.append(re.sub(r"^([-*>]|\d+\.) ", "", bare))


def sentences(page: Path) -> Iterator[str]:
    """Yield the sentences of a page: code counts as one word, a link as its text."""
    for part in parts(page.read_text()):
        plain = re.sub(r"`[^`]*`", "code", part)
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", plain).replace("*", "")
        for each in re.split(r"(?<=[.!?])[\")]*\s+", plain):
            if len(words(each)) > 3:
                yield each


def words(sentence: str) -> list[str]:
    return re.findall(r"[\w'’-]+", sentence)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_sentence_is_long(page: Path) -> None:
    lengths = {each: len(words(each)) for each in sentences(page)}
    long = {each: count for each, count in lengths.items() if count > LONGEST}
    assert not long, "\n".join(f"{count} words: {each}" for each, count in long.items())
    assert sum(lengths.values()) / len(lengths) < MEAN


def messages(path: Path) -> Iterator[str]:
    """Yield the texts of a module that people may read: its strings, but for docstrings and SQL."""
    tree = ast.parse(path.read_text())
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (getattr(each, "value", "X") for each in node.values)
            yield "".join(each if isinstance(each, str) else "X" for each in parts)
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
        ):
            yield node.value


SQL = re.compile(r"\b(SELECT|INSERT|UPDATE|DELETE|CREATE)\b")


def test_what_the_code_says_is_as_short() -> None:
    found = []
    for path in sorted((ROOT / "celery_idempotent").rglob("*.py")):
        for text in messages(path):
            if " " not in text or SQL.search(text):
                continue
            found += [
                (path.name, each)
                for each in re.split(r"(?<=[.!?])\s+", text)
                if len(words(each)) > LONGEST
            ]
    assert not found
