"""The alert rules, evaluated by Prometheus itself: each fires when it should, and is quiet when all is well."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.debian import program
from tests.support.paths import ROOT
from tests.support.servers import need

CASES = Path(__file__).with_name("alerts_test.yml")


@pytest.mark.wide
def test_each_alert_fires_when_it_should(tmp_path: Path) -> None:
    promtool = program("promtool", package="prometheus")
    need(promtool, "promtool")
    rules = ROOT / "docs" / "monitoring" / "alerts.yml"
    cases = tmp_path / "cases.yml"
    cases.write_text(CASES.read_text().replace("RULES", str(rules)))
    for words in (("check", "rules", str(rules)), ("test", "rules", str(cases))):
        ran = subprocess.run((str(promtool), *words), capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
