"""The long description, for the package index: the README, with links and pictures that lead to the repository."""

from __future__ import annotations

import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

_HERE = Path(__file__).parent


def _long_description() -> str:
    about = ConfigParser()
    about.read(_HERE / "setup.cfg", encoding="utf-8")
    place, version = about["metadata"]["url"], about["metadata"]["version"]
    files, pictures = f"{place}/blob/v{version}", f"{place}/raw/v{version}"
    text = (_HERE / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^]]*\])\((?![a-z]+:)", rf"\1({pictures}/", text)
    return re.sub(r"\]\((?![a-z]+:|#)", f"]({files}/", text)


setup(long_description=_long_description())
