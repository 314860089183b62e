"""329 real webhooks, each delivered twice, in any order: 324 rows in the ledger."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections import Counter
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.worker, pytest.mark.redis]

DATA = ROOT.parent / "shared/data/github-webhooks.jsonl.gz"


@pytest.fixture(scope="module")
def events() -> list[dict[str, Any]]:
    if not DATA.exists():
        pytest.skip(f"{DATA} is missing: it does not come with the project")
    with gzip.open(DATA, "rt") as lines:
        return [json.loads(line) for line in lines]


def test_real_webhooks_delivered_twice_make_one_row_each(shared, events):
    assert len(events) == 329
    deliveries = events * 2
    random.Random(2).shuffle(deliveries)
    published = [
        (each, shared.publish("webhook", each["event"], each["delivery"], each["payload"]))
        for each in deliveries
    ]
    metas = [result.backend.get_key_for_task(result.id) for _, result in published]

    def answers() -> list[dict[str, Any]]:
        stored = [json.loads(meta) for meta in shared.redis.mget(metas) if meta is not None]
        return [each for each in stored if each["status"] in ("SUCCESS", "FAILURE")]

    wait_for(
        lambda: len(answers()) == len(published),
        150,
        lambda: f"{len(published)} answers; {Counter(each['status'] for each in answers())}",
        interval=0.2,
    )
    rows = Counter(
        entry.key
        for entry in shared.ledger.entries()
        if entry.phase in {each["event"] for each in events}
    )
    assert len(rows) == 324
    assert set(rows.values()) == {1}
    assert set(rows) == {each["delivery"] for each in events}

    of_delivery: dict[str, dict[str, Any]] = {}
    for event, result in published:
        answer = result.get(timeout=30)
        payload = json.dumps(event["payload"], sort_keys=True).encode()
        assert answer["sha256"] == hashlib.sha256(payload).hexdigest()
        assert of_delivery.setdefault(event["delivery"], answer) == answer
