"""The site of all versions: a folder for each release and for what is checked out, and a menu in each of them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from docs.all_versions import build
from tests.support.paths import ROOT

CONF = """
from pathlib import Path
extensions = ["myst_parser"]
html_theme = "furo"
templates_path = ["_templates"]
html_sidebars = {sidebars!r}
"""


def git(directory: Path, *words: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    subprocess.run(["git", *who, *words], cwd=directory, check=True, capture_output=True)


@pytest.mark.wide
def test_every_release_has_its_pages_and_the_menu_of_all(tmp_path: Path) -> None:
    from docs.conf import html_sidebars

    repository, output = tmp_path / "repository", tmp_path / "output"
    docs = repository / "docs"
    shutil.copytree(ROOT / "docs" / "_templates", docs / "_templates")
    git(repository, "init", "--quiet")
    (docs / "index.md").write_text("# Before there were pages\n")
    git(repository, "add", ".")
    git(repository, "commit", "-m", "0.1.0")
    git(repository, "tag", "v0.1.0")
    (docs / "conf.py").write_text(CONF.format(sidebars=html_sidebars))
    for version in ("0.9.0", "0.10.0"):
        (docs / "index.md").write_text(f"# Pages of {version}\n")
        git(repository, "add", ".")
        git(repository, "commit", "-m", version)
        git(repository, "tag", f"v{version}")
    (docs / "index.md").write_text("# Pages of tomorrow\n")

    assert build(repository, output) == ["main", "0.10.0", "0.9.0"]
    for name, title in [("main", "tomorrow"), ("0.10.0", "0.10.0"), ("0.9.0", "0.9.0")]:
        page = (output / name / "index.html").read_text()
        assert f"Pages of {title}" in page
        for other in ("main", "0.10.0", "0.9.0"):
            assert (
                f'href="./../{other}/index.html"' in page or f'href="../{other}/index.html"' in page
            )
    assert "url=0.10.0/index.html" in (output / "index.html").read_text()
