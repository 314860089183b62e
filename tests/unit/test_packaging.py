"""The built wheel is what is tested, and it holds what it should."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import pytest

import celery_idempotent
from tests.support.paths import ROOT
from tests.support.programs import build_wheel, run

SOURCE = ROOT / "celery_idempotent"
PACKAGE = Path(celery_idempotent.__path__[0])
DISTRIBUTION = "celery-idempotent"

#: Imports the package with each optional thing made impossible to import. Looking at sys.modules afterwards would prove
#: nothing: kombu imports Django whenever it is installed.
BLOCKED_IMPORT = """
import sys
for name in ("django", "prometheus_client", "redis", "rich", "hiredis"):
    sys.modules[name] = None
import celery_idempotent
from celery_idempotent import *
"""


def need_wheel():
    """Skip when pytest runs on the bare source tree; CI, `make test` and tox run it on the wheel."""
    try:
        metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        if os.environ.get("CI"):
            pytest.fail(f"{DISTRIBUTION} is not installed, and CI is set")
        pytest.skip(f"{DISTRIBUTION} is not installed: `make test` installs the wheel")


def test_the_wheel_is_tested_and_not_the_source_tree():
    need_wheel()
    assert PACKAGE.resolve() != SOURCE
    assert "site-packages" in PACKAGE.parts


def test_a_worker_process_imports_the_same_package(tmp_path):
    program = "import celery_idempotent, tests; print(*celery_idempotent.__path__)"
    done = run("-c", program, cwd=tmp_path)
    assert Path(done.stdout.strip()) == PACKAGE


def test_no_module_is_left_out_of_the_wheel():
    need_wheel()
    wanted = {
        path.relative_to(SOURCE)
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    there = {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*") if path.is_file()}
    assert wanted - there == set()


def test_the_version_is_told_once():
    need_wheel()
    (static,) = re.findall(r"^version = (\S+)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    assert metadata.version(DISTRIBUTION) == static
    assert getattr(celery_idempotent, "__version__", static) == static


def test_the_page_on_the_package_index_leads_to_files_that_are_there():
    need_wheel()
    about = metadata.metadata(DISTRIBUTION)
    urls = dict(each.split(", ", 1) for each in about.get_all("Project-URL"))
    assert {"Documentation", "Source", "Issues", "Changelog"} <= set(urls)
    files = f"{urls['Source']}/blob/v{about['Version']}/"
    pictures = files.replace("/blob/", "/raw/")
    page = about["Description"] or about.get_payload()
    links = re.findall(r"\]\(([^)\s]+)\)", page)
    assert len(links) > 12
    shown = re.findall(r"!\[[^]]+\]\(([^)\s]+)\)", page)
    assert shown == [f"{pictures}docs/_static/{name}.svg" for name in ("timelines", "demo")]
    links = [each.replace(pictures, files) for each in links]
    dead = [
        link
        for link in links
        if "://" not in link
        or (
            link.startswith(urls["Source"])
            and not (link.startswith(files) and (ROOT / link[len(files) :].split("#")[0]).is_file())
        )
    ]
    assert dead == []
    # As it is in the README, word by word.
    assert (
        page.replace(files, "").replace(pictures, "").split()
        == (ROOT / "README.md").read_text().split()
    )


@pytest.mark.wide
def test_the_source_distribution_has_all_that_its_tests_read_and_is_the_same_every_time(tmp_path):
    pytest.importorskip("setuptools")
    names = ["celery_idempotent", "docs", "tests", "testproject", "benchmarks"]
    for name in names:
        ignore = shutil.ignore_patterns("__pycache__", ".*")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore)
    files = [path for path in ROOT.iterdir() if path.is_file() and not path.name.startswith(".")]
    for path in files:
        shutil.copy(path, tmp_path)
    (tmp_path / "build.py").write_text(
        "from setuptools import build_meta; print(build_meta.build_sdist('out'))"
    )

    def build():
        at = {"SOURCE_DATE_EPOCH": 1_700_000_000}
        done = run("-W", "ignore", "build.py", cwd=tmp_path, env=at)
        return tmp_path / "out" / done.stdout.splitlines()[-1]

    first = build().read_bytes()
    for path in tmp_path.rglob("*.py"):
        os.utime(path, (1, 1))
    archive = build()
    assert archive.read_bytes() == first
    (tmp_path / "build.py").unlink()
    with tarfile.open(archive) as found:
        there = {name.partition("/")[2] for name in found.getnames()}
    made = {"out", "celery_idempotent.egg-info", "build"}
    wanted = {
        str(path.relative_to(tmp_path))
        for path in tmp_path.rglob("*")
        if path.is_file() and path.relative_to(tmp_path).parts[0] not in made
    }
    assert wanted - there == set()


def test_importing_the_package_imports_no_optional_dependency(tmp_path):
    # What is ignored says kombu before 5.4, on Python 3.12 and later.
    strict = ("-W", "error", "-W", "ignore:datetime.datetime.utc")
    assert run(*strict, "-c", BLOCKED_IMPORT, cwd=tmp_path).stderr == ""


#: What users may install beside the library, each with what only it makes possible.
DJANGO = """
import django
from django.conf import settings
apps = ["django.contrib.contenttypes", "celery_idempotent.django"]
settings.configure(INSTALLED_APPS=apps, SECRET_KEY="k", USE_TZ=True)
django.setup()
from celery_idempotent.django import http, store
"""
EXTRAS = {
    "": "from celery_idempotent import *; import celery_idempotent.cli.commands",
    "django": DJANGO,
    "rest": f"{DJANGO}import celery_idempotent.django.http.urls, rest_framework",
    "hiredis": "from redis.utils import HIREDIS_AVAILABLE; assert HIREDIS_AVAILABLE",
    "prometheus": "import celery_idempotent.metrics",
    "opentelemetry": "import celery_idempotent.tracing",
}


def test_extras_are_those_for_users():
    need_wheel()
    extras = metadata.metadata(DISTRIBUTION).get_all("Provides-Extra")
    assert {*extras} == {*EXTRAS} - {""}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel anew: what is installed is no file any more."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.mark.wide
@pytest.mark.parametrize("extra", EXTRAS)
def test_each_extra_is_enough_for_what_it_is_for(wheel, tmp_path, extra):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=120)
    python = tmp_path / "venv" / "bin" / "python"
    wanted = f"{wheel}[{extra}]" if extra else str(wheel)
    install = (python, "-m", "pip", "install", "--quiet", wanted)
    subprocess.run(install, check=True, timeout=200)
    subprocess.run([python, "-c", EXTRAS[extra]], cwd=tmp_path, check=True, timeout=60)
    if extra != "":
        return
    for other, program in EXTRAS.items():
        done = subprocess.run([python, "-c", program], cwd=tmp_path, check=False, timeout=60)
        assert bool(done.returncode) is bool(other), f"{other} is no extra"
