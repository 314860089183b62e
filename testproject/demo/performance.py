"""One performance, from the first process to the exit code."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from testproject.demo.events import Event
from testproject.demo.processes import DemoError
from testproject.demo.stage import Stage, open_stage

__all__ = ["perform"]


def perform(
    events: Sequence[Event],
    *,
    seed: int,
    processes: int,
    store: str,
    database: str | None,
    timeout_s: float,
    as_json: bool,
    keep: bool,
) -> int:
    """Perform the demo, print the report, return the exit code."""
    console = Console(stderr=as_json)
    begin = time.monotonic()
    with open_stage(processes=processes, store=store, database=database) as stage:
        stage.keep = keep
        try:
            stage.prepare_database()
            # Only now, with Django set up, its models can be imported.
            from testproject.demo.play import Play

            play = Play(stage, events, seed=seed, processes=processes)
            at_rest = play.run(console, deadline=begin + timeout_s)
            report = play.report(at_rest=at_rest, seconds=time.monotonic() - begin)
        except DemoError as trouble:
            _show_logs(stage)
            raise DemoError(f"{trouble}\n{_where(stage)}") from trouble
        if not report.ok:
            _show_logs(stage)
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        report.print(console)
    if stage.keep:
        print(_where(stage), file=sys.stderr)
    return 0 if report.ok else 1


def _where(stage: Stage) -> str:
    what = "logs and the database" if stage.scene.database == "sqlite" else "logs"
    return f"The {what} are in {stage.directory}"


def _show_logs(stage: Stage) -> None:
    stage.keep = True
    print(stage.tails(), file=sys.stderr)
