"""Builds the pages of every release and of what is checked out, each in a folder of its own, with a menu of them all.

``python docs/all_versions.py OUTPUT`` makes ``OUTPUT/main``, ``OUTPUT/0.2.0`` and so on, from tags ``v0.2.0``, and
``OUTPUT/index.html``, which leads to the newest release. It is all static: upload it anywhere.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

#: What is checked out.
MAIN: Final = "main"


def releases(repository: Path) -> list[str]:
    """Return the versions that were tagged and have a site, newest first."""
    tags = _git(repository, "tag", "--list", "v[0-9]*", "--sort=-version:refname").split()
    return [
        tag.removeprefix("v")
        for tag in tags
        if "docs/conf.py" in _git(repository, "ls-tree", "--name-only", tag, "docs/").split()
    ]


def build(repository: Path, output: Path) -> list[str]:
    """Build them all; return their names."""
    versions = [MAIN, *releases(repository)]
    for version in versions:
        with tempfile.TemporaryDirectory() as directory:
            source = repository
            if version != MAIN:
                source = Path(directory)
                packed = source / "source.tar"
                _git(repository, "archive", "--output", str(packed), f"v{version}")
                subprocess.run(["tar", "-xf", packed, "-C", source], check=True)
            menu = ("-A", f"versions={','.join(versions)}", "-A", f"this_version={version}")
            command = (
                sys.executable,
                "-m",
                "sphinx",
                "--quiet",
                "-b",
                "html",
                "-d",
                f"{directory}/trees",
            )
            subprocess.run([*command, *menu, source / "docs", output / version], check=True)
    newest = versions[1] if len(versions) > 1 else MAIN
    (output / "index.html").write_text(
        f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={newest}/index.html">'
        f'<a href="{newest}/index.html">{newest}</a>\n',
        encoding="utf-8",
    )
    return versions


def _git(repository: Path, *words: str) -> str:
    command = ["git", "-C", str(repository), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    build(Path(__file__).parent.parent, Path(sys.argv[1]))
