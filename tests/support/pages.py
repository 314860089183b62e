"""What the documentation says, as code: the Python examples of a page, and each as a module of its own."""

from __future__ import annotations

import linecache
import re
import textwrap
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any
from unittest import mock

from celery import Celery

from tests.support.paths import ROOT


def block(page: str, title: str, language: str = "python") -> str:
    """Return the one example of ``docs/<page>.md`` whose first line is the comment ``# title``."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    found: list[str] = re.findall(
        rf"^ *```{language}\n( *# {re.escape(title)}\n.*?)^ *```",
        text,
        flags=re.MULTILINE | re.DOTALL,
    )
    assert len(found) == 1, f"{page}: {len(found)} examples are called {title}"
    return found[0]


def files(page: str) -> dict[str, str]:
    """Return the examples of ``docs/<page>.md`` that are files, by the names in their first lines."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    found = re.findall(r"^```python\n(# (\S+\.py)\n.*?)^```", text, re.MULTILINE | re.DOTALL)
    return {name: code for code, name in found}


def load(app: Celery, page: str, title: str, given: Mapping[str, Any]) -> ModuleType:
    """Run an example as a module, whose tasks belong to ``app``; ``given`` stands in for the rest of a shop.

    The tasks are called after the page and the title: ``celery_once_before.report``.
    """
    name = re.sub(r"\W", "_", f"{page.rpartition('/')[2]}_{title}")
    module = ModuleType(name)
    vars(module).update(given, app=app)
    text, file = textwrap.dedent(block(page, title)), f"<{page}.md: {title}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    code = compile(text, file, "exec")
    # The decorator of a page makes tasks for every app of this process, those of other tests as well.
    alone = mock.patch("celery.app.base.connect_on_app_finalize")
    with alone, warnings.catch_warnings():
        # The escapes in the docstrings of other libraries.
        warnings.simplefilter("ignore")
        exec(code, vars(module))
    return module
