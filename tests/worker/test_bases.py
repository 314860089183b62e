"""A base that runs its tasks in a transaction: the record says COMPLETED only if that was committed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent import State
from tests.support.apps import close_app
from tests.support.ledger import Ledger
from tests.support.servers import EmbeddedRedis
from tests.worker.bases_app import effects, make_app

pytestmark = [pytest.mark.worker, pytest.mark.redis]


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "effects.sqlite"


@pytest.fixture
def app(
    private_redis: EmbeddedRedis, database: Path, start_worker: Callable[..., Any]
) -> Iterator[Any]:
    url = private_redis.url()
    env = {"BASES_REDIS_URL": url, "BASES_DATABASE": str(database)}
    start_worker("tests.worker.bases_app", concurrency=2, env=env)
    app = make_app(url)
    yield app
    close_app(app)


def test_no_operation_is_completed_whose_transaction_was_not_committed(
    app: Any, database: Path, ledger: Ledger
) -> None:
    sent = {
        (order, fate): app.tasks[order].delay(f"{order} {fate}", fate)
        for order in ("before", "after")
        for fate in ("dies", "rolls back")
    }
    for (order, fate), result in sent.items():
        task, key = app.tasks[order], f"{order} {fate}"
        if fate == "rolls back":
            with pytest.raises(RuntimeError, match="could not serialize"):
                result.get(timeout=30)
            assert (effects(database, key), task.idempotency_record(key)) == (0, None)
            result = task.delay(key, fate)
        assert result.get(timeout=30) == f"{key} as {result.id}"
        assert effects(database, key) == 1
        assert task.idempotency_record(key).state is State.COMPLETED
        assert task.delay(key, fate).get(timeout=30) == f"{key} as {result.id}"
        assert ledger.count("wrapped", key) == 2  # a duplicate has no transaction
