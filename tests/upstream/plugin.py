"""A pytest plugin for the runs of Celery's suite: puts every task on our class, and writes down how each test ended.

``idempotency_store`` gets a default, because the apps of these tests have no Redis. It is put where Celery keeps its
own, so no test finds a setting that it did not make.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import celery
import celery.app.defaults
import pytest

if TYPE_CHECKING:
    from pathlib import Path

#: Which class the tasks get: Celery's or ours.
CLASS_VARIABLE = "UPSTREAM_TASK_CLASS"
#: Tests, one a line, that are known to wait with our class until they are stopped.
WAITS_VARIABLE = "UPSTREAM_WAITS"
#: The file that gets one line of JSON for each report.
REPORT_VARIABLE = "UPSTREAM_REPORT"

_counts: Counter[str] = Counter()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Reporter(os.environ[REPORT_VARIABLE]))
    if os.environ[CLASS_VARIABLE] == "celery":
        return
    celery.Celery.task_cls = "celery_idempotent:IdempotentTask"
    defaults: dict[str, Any] = celery.app.defaults.DEFAULTS
    defaults["idempotency_store"] = "memory://"
    _count()


def _count() -> None:
    """Count what our class does, as proof that it is there. In forked workers nobody counts."""
    from celery_idempotent import signals

    def count(name: str) -> None:
        def receive(**_: Any) -> None:
            _counts[name] += 1

        getattr(signals, name).connect(receive, weak=False)

    for name in ("claimed", "settled", "released", "replayed", "conflicted"):
        count(name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let no test run for five times five minutes before it fails, as the marks of the integration tests have it."""
    waiting = os.environ.get(WAITS_VARIABLE, "").splitlines()
    for item in items:
        if item.nodeid.partition("[")[0] in waiting:
            item.add_marker(pytest.mark.timeout(5))
        if any(item.iter_markers("flaky")):
            item.own_markers[:] = [
                m for m in item.own_markers if m.name not in ("flaky", "timeout")
            ]
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=1))


class Reporter:
    """Writes each report as it comes, so that also a run that does not end has said something."""

    def __init__(self, path: str | Path) -> None:
        self._file = open(path, "w", encoding="utf-8")  # noqa: PTH123, SIM115  lives as long as the session
        self._before: Counter[str] = Counter()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed or (report.skipped and report.nodeid.endswith(".py")):
            self._write(
                id=report.nodeid, when="collect", outcome=report.outcome, said=_said(report)
            )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        subtest = getattr(report, "context", None) is not None
        if subtest and report.passed:
            return
        outcome: str = report.outcome
        if hasattr(report, "wasxfail"):
            outcome = "xpassed" if report.passed else "xfailed"
        extra: dict[str, Any] = {}
        if report.when == "teardown" and _counts != self._before:
            extra["counts"] = dict(_counts - self._before)
            self._before = _counts.copy()
        self._write(
            id=report.nodeid, when=report.when, outcome=outcome, said=_said(report), **extra
        )

    def pytest_sessionfinish(self) -> None:
        self._file.close()

    def _write(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def _said(report: pytest.CollectReport | pytest.TestReport) -> str:
    if not report.failed and report.outcome != "rerun":  # type: ignore[comparison-overlap]
        return ""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return " ".join(text.split())[:300]
