"""Asks two PostgreSQL databases in turn, one with many records; prints one JSON object a round, and what rows cost."""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.postgresql import execute, open_databases, rows

#: As the verbs write them: the digest is that of columns.py, of namespace and scope after their lengths.
_FILL = (
    "INSERT INTO celery_idempotent_record (token, created_ms, updated_ms, expires_ms, prune_ms, version, crashes,"
    " attempts, state, reserved, replaced, delivered, digest, fingerprint, namespace, scope, key, task_id, value)"
    " SELECT 1, now_ms, now_ms, now_ms + 86400000, now_ms + 86400000 + n / 100, 1, 0, 1, 'C', false, false, false,"
    " substring(sha256(%s || convert_to('order-' || lpad(n::text, 34, '0'), 'UTF8')) for 16),"
    " decode('000102030405060708090a0b0c0d0e0f', 'hex'), 'shop.tasks.charge', '', 'order-' || lpad(n::text, 34, '0'),"
    " gen_random_uuid()::text, decode('01', 'hex') || convert_to('\"' || repeat('r', 98) || '\"', 'UTF8')"
    " FROM generate_series(0, %s) AS n, (SELECT (extract(epoch from now()) * 1000)::bigint AS now_ms) AS t"
)
_PAIRS = 2_000


def main(few: int, many: int, rounds: int, seed: int) -> None:
    """Fill both, and ask them in another order each round; the first round warms up."""
    with open_databases("few", "many"):
        from benchmarks.operations import claim, settle
        from benchmarks.scaling import NAMESPACE, Calls
        from celery_idempotent.django.store import DjangoStore
        from celery_idempotent.records import Identity
        from celery_idempotent.stores.values import pack_text

        order = random.Random(seed)
        stores = {}
        for alias, count in (("few", few), ("many", many)):
            execute(_FILL, (pack_text(NAMESPACE) + pack_text(""), count - 1), alias=alias)
            execute("VACUUM ANALYZE celery_idempotent_record", alias=alias)
            stores[alias] = Calls(DjangoStore(alias), count, order)
        _print("bytes per row, indexes included", "B", _size() / many)
        for number in range(-1, rounds):
            times = {alias: stores[alias].time() for alias in order.sample(sorted(stores), 2)}
            if number >= 0:
                print(json.dumps(times), flush=True)
        execute("CHECKPOINT", alias="many")
        store = DjangoStore("many")
        with _explained("many") as wrote:
            for number in range(_PAIRS):
                identity = Identity(namespace=NAMESPACE, key=f"wal-{number}")
                settle(store, claim(store, identity))
        everything = sum(written for written, _ in wrote) / _PAIRS
        _print("WAL per claim and settle", "B", everything)
        # Of each verb's statements those that were not the first to touch a page since the checkpoint.
        bare = [[written for written, images in wrote[n::2] if not images] for n in range(2)]
        if all(bare):
            _print(
                "the same without images of pages", "B", sum(statistics.mean(each) for each in bare)
            )


@contextlib.contextmanager
def _explained(alias: str) -> Iterator[list[tuple[int, int]]]:
    """Note how much WAL each statement of a verb writes, by itself: others write to the same server."""
    from django.db import connections

    connection = connections[alias]
    wrote: list[tuple[int, int]] = []

    def explain(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith("WITH"):
            with context["connection"].cursor() as cursor:
                cursor.execute("BEGIN")
                cursor.execute(f"EXPLAIN (ANALYZE, WAL, FORMAT JSON) {sql}", params)
                ((plan,),) = cursor.fetchall()
                cursor.execute("ROLLBACK")
            wrote.append(_wal_of((plan if isinstance(plan, list) else json.loads(plan))[0]["Plan"]))
        return execute(sql, params, many, context)

    # Statements as they are, not by names that EXPLAIN would not see.
    connection.settings_dict["DISABLE_SERVER_SIDE_CURSORS"] = True
    with connection.execute_wrapper(explain):
        yield wrote


def _wal_of(node: dict[str, Any]) -> tuple[int, int]:
    """Sum up the bytes, and the images of pages, that the parts of a plan that write have written."""
    parts = [_wal_of(each) for each in node.get("Plans", ())]
    if node["Node Type"] == "ModifyTable":
        parts.append((int(node["WAL Bytes"]), int(node["WAL FPI"])))
    return sum(written for written, _ in parts), sum(images for _, images in parts)


def _size() -> float:
    query = "SELECT pg_total_relation_size('celery_idempotent_record')"
    ((size,),) = rows(query, alias="many")
    return float(size)


def _print(what: str, unit: str, amount: float) -> None:
    print(json.dumps({"what": what, "unit": unit, "amount": amount}), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
