"""The mutants fit the code that is there: an anchor that is gone, or is there twice, shows nothing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import celery_idempotent
from tests.mutants.catalogue import Mutant, mutants
from tests.support.paths import ROOT

PACKAGE = Path(celery_idempotent.__path__[0])
MUTANTS = mutants()


def test_there_are_enough_of_them_and_each_has_an_id_of_its_own():
    assert len(MUTANTS) >= 150
    assert [name for name, count in Counter(each.id for each in MUTANTS).items() if count > 1] == []
    assert {each.group for each in MUTANTS} == {"core", "http", "operators", "redis", "sql"}


def test_no_two_are_the_same_bug():
    assert len({(each.file, each.old, each.new) for each in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("file", sorted({each.file for each in MUTANTS}))
def test_every_anchor_is_there_once(file):
    assert (PACKAGE / file).exists(), "it was moved: so are its mutants"
    text = (PACKAGE / file).read_text()
    of_file = [each for each in MUTANTS if each.file == file]
    assert [each.id for each in of_file if text.count(each.old) != 1] == []
    assert [each.id for each in of_file if each.old == each.new] == []
    if file.endswith(".py"):
        for each in of_file:
            ast.parse(text.replace(each.old, each.new), each.id)


def test_the_quick_one_is_one_of_its_file():
    quick = [sys.executable, "-m", "tests.mutants", "--quick", "celery_idempotent/celery/checks.py"]
    (line,) = subprocess.check_output([*quick, "--list"], cwd=ROOT, text=True).splitlines()
    assert [each.file for each in MUTANTS if each.id == line.split()[1]] == ["celery/checks.py"]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_its_killers_are_there(mutant: Mutant):
    assert mutant.bug
    assert mutant.killers
    for killer in mutant.killers:
        path, *names = killer.split()[0].split("::")
        text = (ROOT / path).read_text()
        for name in names:
            assert re.search(rf"^\s*(class|def) {name.partition('[')[0]}\b", text, re.MULTILINE), (
                killer
            )
