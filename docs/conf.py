"""How the pages become a site: Sphinx, MyST and Furo. `make docs` builds it into docs/_build/html."""

from __future__ import annotations

import re
import sys
from configparser import ConfigParser
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).parent
ROOT = DOCS.parent
# autodoc reads the source tree, not the wheel.
sys.path.insert(0, str(ROOT))

from docs import generated  # noqa: E402

_about = ConfigParser()
_about.read(ROOT / "setup.cfg", encoding="utf-8")

project = "celery-idempotent"
author = project_copyright = "celery-idempotent contributors"
release = version = _about["metadata"]["version"]
repository = _about["metadata"]["url"]
files = f"{repository}/blob/main"

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_*"]
nitpicky = True
# Links of the pages are checked. Types in signatures lead nowhere where they are not on the page, such as Celery's.
nitpick_ignore_regex = [("py:.*", ".*")]
autodoc_typehints_format = "short"
# Blocks that are indented, not fenced, are settings, shell lines and drawings.
highlight_language = "none"
# Headings are linked as on GitHub: page.md#the-heading.
myst_heading_anchors = 4

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = f"{project} {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
templates_path = ["_templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "versions.html",
        "sidebar/scroll-end.html",
    ]
}
html_copy_source = False
html_theme_options: dict[str, object] = {"top_of_page_buttons": []}
linkcheck_timeout = 10
linkcheck_retries = 2
# GitHub makes its anchors in the browser.
linkcheck_anchors_ignore_for_url = [r"https://github\.com/.*"]

_OUTSIDE = re.compile(
    r"\]\((?:\.\./)+(CHANGELOG\.md|CONTRIBUTING\.md|testproject[\w/]*)(#[^)]*)?\)"
)
_TEST = re.compile(r"(?<!\[)`(tests/[\w/]+\.py)(?:::(\w+)(?:::(\w+))?)?`")


def _place(path: str, name: str | None) -> str:
    """Return the address of a test in the repository, with its line."""
    text = (ROOT / path).read_text(encoding="utf-8")
    found = name and re.search(rf"^ *(?:async )?(?:def|class) {name}\b", text, re.MULTILINE)
    return f"{files}/{path}" + (f"#L{text[: found.start()].count(chr(10)) + 1}" if found else "")


def link_out(text: str) -> str:
    """Let a page lead to what is not on the site: files of the repository, and the tests that it names."""

    def test(match: re.Match[str]) -> str:
        path, *names = match.groups()
        last = next((each for each in reversed(names) if each), None)
        return f"[{match[0]}]({_place(path, last)})"

    text = _OUTSIDE.sub(lambda match: f"]({files}/{match[1]}{match[2] or ''})", text)
    text = "\n## ".join(_letters(section) for section in text.split("\n## "))
    return _TEST.sub(test, text)


def _letters(section: str) -> str:
    """Link each cell ``… (a) |`` of a table to the test that the list below it names: ``- (a): `tests/…` ``."""
    shown = {
        letter: _place(path, name)
        for letters, path, name in re.findall(
            r"^- ((?:\([a-z]\) ?)+):[^`]*(?:`test_\w+`[^`]*)*`(tests/[\w/]+\.py)(?:::(\w+))?`",
            section,
            re.MULTILINE,
        )
        for letter in re.findall(r"[a-z]", letters)
    }
    return re.sub(
        r"\(([a-z])\)(?= \|)",
        lambda match: f"([{match[1]}]({shown[match[1]]}))" if match[1] in shown else match[0],
        section,
    )


def _read(_app: Sphinx, _page: str, source: list[str]) -> None:
    source[0] = link_out(generated.fill(source[0]))


def _raises(
    _app: Sphinx, _what: str, _name: str, _object: object, _options: object, lines: list[str]
) -> None:
    """Make a list of the section ``Raises:`` of a docstring."""
    if "Raises:" not in lines:
        return
    start = lines.index("Raises:")
    found: list[str] = []
    for line in lines[start + 1 :]:
        error = re.match(r"    (\w[\w., ]*): (.*)", line)
        found.append(f"- ``{error[1]}``: {error[2]}" if error else f"  {line.strip()}".rstrip())
    lines[start:] = ["**Raises**", "", *found]


def _outdated(_app: Sphinx, *_pages: object) -> list[str]:
    """Have the pages read that come from the code: Sphinx does not know when that has changed."""
    return ["api", "deploying", "operating", "options"]


def _sections() -> list[tuple[str, list[str]]]:
    """Return the parts of the table of contents, each with its pages in order."""
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    found = re.findall(r"^:caption: (.+)\n(?::.*\n)*\n((?:[\w/-]+\n)+)", index, re.MULTILINE)
    inner = (DOCS / "internals.md").read_text(encoding="utf-8")
    more = re.findall(r"^:hidden:\n\n((?:[\w/-]+\n)+)", inner, re.MULTILINE)
    return [(caption, pages.split()) for caption, pages in [*found, ("Internals", *more)]]


def _summary(page: str) -> tuple[str, str]:
    """Return the title of a page and its first sentence."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    title = re.search(r"^# (.+)$", text, re.MULTILINE)
    prose = re.search(r"^[A-Z*`][^\n]+(?:\n[^\n#|]+)*", text, re.MULTILINE)
    first = re.split(r"(?<=\.)\s", " ".join(prose[0].split()), maxsplit=1)[0] if prose else ""
    return (title[1] if title else page), re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", first)


def _llms(output: Path) -> None:
    """Write llms.txt, an index for language models, and the pages in one text."""
    lines, whole = [f"# {project} {version}", "", f"> {_about['metadata']['description']}"], []
    for caption, pages in _sections():
        lines += ["", f"## {caption}", ""]
        for page in pages:
            title, first = _summary(page)
            lines.append(f"- [{title}]({page}.html): {first}")
            text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
            whole.append(link_out(generated.fill(text)))
    (output / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (output / "llms-full.txt").write_text("\n\n".join(whole), encoding="utf-8")


#: What the theme leaves out, for readers without a mouse and for screen readers.
ACCESSIBLE = {
    '<p class="caption" role="heading">': '<p class="caption" role="heading" aria-level="2">',
    '<aside class="sidebar-drawer">': '<aside class="sidebar-drawer" aria-label="Pages">',
    '<aside class="toc-drawer': '<aside aria-label="On this page" class="toc-drawer',
    '<div class="table-wrapper': '<div tabindex="0" class="table-wrapper',
    "<pre>": '<pre tabindex="0">',
    '<th class="head"><p></p></th>': "<td></td>",
}


def _accessible(output: Path) -> None:
    """Complete the pages by what :data:`ACCESSIBLE` says."""
    for page in output.glob("*.html"):
        text = page.read_text(encoding="utf-8")
        for found, better in ACCESSIBLE.items():
            text = text.replace(found, better)
        page.write_text(text, encoding="utf-8")


#: Where the content of former pages is.
MOVED = {
    "admin": "operating.html#the-admin",
    "atomic": "exactly-once.html",
    "benchmarks": "comparison.html",
    "checks": "operating.html#checks",
    "choosing": "choosing-a-key.html",
    "command-line": "operating.html#the-command-line",
    "hybrid": "exactly-once.html#a-cache-before-the-database",
    "incidents": "operating.html",
    "life-of-a-record": "internals.html",
    "monitoring": "operating.html#monitoring",
    "reference": "options.html",
    "sql": "exactly-once.html#how-the-store-works",
}


def _redirects(output: Path) -> None:
    """Write a page for each former address that leads to the new one."""
    for name, target in MOVED.items():
        html = f'<!doctype html><title>Moved</title><meta http-equiv="refresh" content="0; url={target}">'
        (output / f"{name}.html").write_text(html, encoding="utf-8")


def _finish(app: Sphinx, error: Exception | None) -> None:
    """Complete a site that was built without an error."""
    if error is None and app.builder.name == "html":
        for part in (_llms, _accessible, _redirects):
            part(Path(app.outdir))


def setup(app: Sphinx) -> None:
    """Register what is done to each page, and after the last."""
    app.connect("env-get-outdated", _outdated)
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", _raises)
    app.connect("build-finished", _finish)
