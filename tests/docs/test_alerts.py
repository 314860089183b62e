"""The alert rules, evaluated by Prometheus itself: each fires when it should, and is quiet otherwise."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.debian import program
from tests.support.paths import ROOT
from tests.support.servers import need

CASES = Path(__file__).with_name("alerts_test.yml")
RULES = ROOT / "docs" / "monitoring" / "alerts.yml"


def for_promtool(case: dict[str, Any], rules: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a case for promtool: what is expected of every rule at every time."""
    expected = []
    for time, alerts in case["at"].items():
        fires = {name: tasks for name, *tasks in map(str.split, alerts)}
        for rule in rules:
            name = rule["alert"].removeprefix("Idempotency")
            found = [{"task": task} for task in fires.get(name, ())] or [{}] * (name in fires)
            alert = {"eval_time": time, "alertname": rule["alert"]}
            alert["exp_alerts"] = [{"exp_labels": rule["labels"] | each} for each in found]
            expected.append(alert)
    series = [
        {"series": f"celery_idempotency_{name}", "values": values}
        for name, values in case["series"].items()
    ]
    about = {"name": case["name"], "interval": case.get("interval", "1m")}
    return about | {"input_series": series, "alert_rule_test": expected}


@pytest.mark.wide
def test_each_alert_fires_when_it_should_and_is_silent_otherwise(tmp_path: Path) -> None:
    promtool = program("promtool", package="prometheus")
    need(promtool, "promtool")
    groups, cases = yaml.safe_load(RULES.read_text()), yaml.safe_load(CASES.read_text())
    rules = groups["groups"][0]["rules"]
    for rule in rules:
        del rule["annotations"]  # which promtool compares word by word
    fired = {each.split()[0] for case in cases for alerts in case["at"].values() for each in alerts}
    assert {f"Idempotency{each}" for each in fired} == {rule["alert"] for rule in rules}
    bare, tests = tmp_path / "rules.yml", tmp_path / "tests.yml"
    bare.write_text(yaml.safe_dump(groups))
    made = {"rule_files": [str(bare)], "evaluation_interval": "1m"}
    tests.write_text(
        yaml.safe_dump(made | {"tests": [for_promtool(case, rules) for case in cases]})
    )
    for words in (("check", "rules", str(RULES)), ("test", "rules", str(tests))):
        ran = subprocess.run((str(promtool), *words), capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
