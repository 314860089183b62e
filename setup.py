"""What setup.cfg cannot say: the long description, and a source distribution that is the same on every machine.

The description, for the package index, is the README, with links and pictures that lead to the repository.
"""

from __future__ import annotations

import gzip
import os
import re
import tarfile
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist

_HERE = Path(__file__).parent


def _long_description() -> str:
    about = ConfigParser()
    about.read(_HERE / "setup.cfg", encoding="utf-8")
    place, version = about["metadata"]["url"], about["metadata"]["version"]
    files, pictures = f"{place}/blob/v{version}", f"{place}/raw/v{version}"
    text = (_HERE / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^]]*\])\((?![a-z]+:)", rf"\1({pictures}/", text)
    return re.sub(r"\]\((?![a-z]+:|#)", f"]({files}/", text)


class _Sdist(sdist):
    """Gives all files the time in SOURCE_DATE_EPOCH, if it is set, and no owner, as wheels have it."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, owner=None, group=None):  # noqa: A002
        """Return the path of the archive."""
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        if epoch is None or format != "gztar":
            return super().make_archive(base_name, format, root_dir, base_dir, owner, group)

        def neutral(member):
            member.mtime, member.uid, member.gid, member.uname, member.gname = (
                int(epoch),
                0,
                0,
                "",
                "",
            )
            member.mode = 0o755 if member.mode & 0o100 else 0o644
            return member

        path = f"{base_name}.tar.gz"
        with (
            Path(path).open("wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=int(epoch)) as packed,
            tarfile.open(mode="w", fileobj=packed) as archive,
        ):
            archive.add(base_dir, filter=neutral)  # in the order of names
        return path


setup(long_description=_long_description(), cmdclass={"sdist": _Sdist})
