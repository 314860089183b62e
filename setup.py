"""The long description, for the package index: the README, whose links within the repository lead there."""

from __future__ import annotations

import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

_HERE = Path(__file__).parent


def _long_description() -> str:
    about = ConfigParser()
    about.read(_HERE / "setup.cfg", encoding="utf-8")
    files = f"{about['metadata']['url']}/blob/v{about['metadata']['version']}"
    text = (_HERE / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\((?![a-z]+:|#)", f"]({files}/", text)


setup(long_description=_long_description())
