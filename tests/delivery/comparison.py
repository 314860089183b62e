"""What a scenario left behind on the two sides, without what differs each time, and what else differs."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from tests.delivery.sides import Side, Stage

_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")

#: Told by a clock, a process or a broker: of no meaning beside another side's.
_VOLATILE = {
    "clock",
    "consumer_tag",
    "date_done",
    "delivery_tag",
    "expiration",
    "local_received",
    "pid",
    "reply_to",
    "runtime",
    "timestamp",
    "utcoffset",
}

_PATTERNS = [
    (re.compile(r"0x[0-9a-f]{6,}"), "<address>"),
    (re.compile(r"\bgen\d+@"), "gen<pid>@"),
    (re.compile(r"(?<=succeeded in )[\d.e-]+s"), "<time>"),
    (re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d([.,]\d+)?(\+\d\d:\d\d|Z)?"), "<moment>"),
    (re.compile(r"Job: \d+"), "Job: <number>"),
    (re.compile(r"gate-SIDE-\d+"), "gate"),
    (re.compile(r"datetime\.datetime\([^)]*\)"), "<moment>"),
    (re.compile(r"ForkPoolWorker-\d+"), "ForkPoolWorker"),
]


class _Plain:
    """Takes out of values what is different each time."""

    def __init__(self, side: Side, names: dict[str, str]) -> None:
        self._side = side
        self._names = names

    def text(self, text: str) -> str:
        text = _UUID.sub(lambda found: f"<{self._names.get(found[0], 'id')}>", text)
        text = text.replace(self._side.name, "SIDE")
        for pattern, instead in _PATTERNS:
            text = pattern.sub(instead, text)
        return text

    def value(self, value: Any, key: str = "") -> Any:
        if key in _VOLATILE:
            return value if value is None else "<volatile>"
        if key in {"callbacks", "errbacks"}:
            value = _without_ids(value)
        if key in {"eta", "expires"}:
            return value if value is None or str(value).startswith("in ") else "<moment>"
        if key in {"traceback", "einfo"}:
            return value and self.text(_traceback(str(value)))
        if isinstance(value, dict):
            value = _without_headers(value)
            return {str(k): self.value(v, str(k)) for k, v in sorted(value.items(), key=str)}
        if isinstance(value, (list, tuple)):
            return [self.value(each) for each in value]
        if isinstance(value, str):
            return self.text(value)
        return value


def _without_ids(value: Any) -> Any:
    """Take out the task ids of callbacks (announced: ids-of-callbacks)."""
    if isinstance(value, list):
        return [_without_ids(each) for each in value]
    if not isinstance(value, dict):
        return value
    own = {"task_id"} if "subtask_type" not in value else set()
    return {k: _without_ids(v) for k, v in value.items() if k not in own}


def _without_headers(value: dict[str, Any]) -> dict[str, Any]:
    """Take out the headers of ours, wherever headers are, and the type of a message (announced: own-headers)."""
    value = {k: v for k, v in value.items() if not k.startswith("idempotency")}
    properties = value.get("properties")
    if isinstance(properties, dict):
        value["properties"] = {k: v for k, v in properties.items() if k != "content_type"}
    headers = value.get("headers")
    if isinstance(headers, dict) and headers:
        headers = {k: v for k, v in headers.items() if not k.startswith("idempotency")}
        value["headers"] = headers or None
    if value.get("headers", 0) is None:
        del value["headers"]
    return value


def _traceback(text: str) -> str:
    """Return the end of a traceback, and the frames of the scenarios' own code."""
    lines = text.strip().splitlines()
    own = [
        line.strip().split(", line")[0].rpartition("/")[2]
        for line in lines
        if "/tests/delivery/" in line
    ]
    return " > ".join([*own, lines[-1]])


def _history(stage: Stage) -> dict[str, Counter[str]]:
    """Return what the caller saw of a scenario, and what happened to its tasks: by name and kind, how often."""
    side, ids = stage.side, stage.side.ids(stage.scenario)
    names = {
        task_id: line["headers"]["task"]
        for task_id in ids
        for line in side.lines[task_id]
        if line["kind"] == "publish"
    }
    plain = _Plain(side, names)
    seen = [plain.text(f"{n}. {what}: {value}") for n, (what, value) in enumerate(stage.notes)]
    found = {"seen by the caller": Counter(seen)}
    for task_id in ids:
        for kind, trace in _traces(side, task_id).items():
            if trace:
                shown = plain.value(trace)
                if kind == "log":  # in order for each process, but not among them
                    shown.sort()
                text = json.dumps(shown, sort_keys=True, default=repr)
                of_kind = found.setdefault(f"{names.get(task_id, 'unnamed')}, {kind}", Counter())
                of_kind[text] += 1
    return found


def _traces(side: Side, task_id: str) -> dict[str, Any]:
    lines = [{k: v for k, v in line.items() if k != "scenario"} for line in side.lines[task_id]]
    events = sorted(side.events[task_id], key=lambda event: event.get("clock", 0))
    if [event["type"] for event in events].count("task-received") > 1:
        # The next run may start before the last one is over.
        events.sort(key=lambda event: (event["type"], event.get("retries", 0)))
    main = ("received", "revoked", "lost")
    meta = side.app.backend.get_task_meta(task_id, cache=False)
    # Without what ours says of itself (announced: own-log-lines).
    log = [x.partition(": ")[2] for x in side.log[task_id] if "] idempotency: " not in x]
    return {
        "published": [line for line in lines if line["kind"] == "publish"],
        "main process": sorted(x["kind"] for x in lines if x["kind"] in main),
        "runs": _runs([line for line in lines if line["kind"] not in {"publish", *main}]),
        "sent events": sorted(
            [event for event in events if event["type"] == "task-sent"],
            # Each from another process perhaps: which came first is chance.
            key=lambda event: (event["name"], event["retries"], repr(event.get("args"))),
        ),
        "events": [event for event in events if event["type"] != "task-sent"],
        "log": log,
        "backend": {k: repr(v) if isinstance(v, Exception) else v for k, v in meta.items()},
    }


def _runs(lines: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the traces of each run of a task: one process works on one at a time."""
    runs: list[list[dict[str, Any]]] = []
    of_process: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        pid = line["pid"]
        if line["kind"] == "prerun" or pid not in of_process:
            of_process[pid] = []
            runs.append(of_process[pid])
        of_process[pid].append(line)
    return runs


def differences(plain: Stage, ours: Stage) -> list[str]:
    """Return where two stages of one scenario differ, one line each."""
    first, second = _history(plain), _history(ours)
    found = []
    for what in sorted({*first, *second}):
        found += _compare(what, first.get(what, Counter()), second.get(what, Counter()))
    return found


def _compare(what: str, one: Counter[str], other: Counter[str]) -> list[str]:
    if one == other:
        return []
    only, instead = list((one - other).elements()), list((other - one).elements())
    if len(only) == len(instead):
        pairs = zip(sorted(only), sorted(instead), strict=True)
        return [f"{what}: {line}" for pair in pairs for line in _diff(*pair)]
    return [f"{what}: only with Celery: {each}" for each in only] + [
        f"{what}: only with ours: {each}" for each in instead
    ]


def _diff(one: str, other: str) -> list[str]:
    """Return the paths at which two traces differ."""
    try:
        first, second = json.loads(one), json.loads(other)
    except ValueError:
        return [f"{one} <> {other}"]
    return list(_paths("", first, second))


def _paths(path: str, one: Any, other: Any) -> Any:
    if one == other:
        return
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}):
            yield from _paths(f"{path}.{key}", one.get(key, "-"), other.get(key, "-"))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (each, mate) in enumerate(zip(one, other, strict=True)):
            yield from _paths(f"{path}[{number}]", each, mate)
    else:
        yield f"{path}: {one} <> {other}"
