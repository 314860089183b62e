"""Asks two PostgreSQL databases in turn, one with many records; prints one JSON object a round, and what rows cost."""

from __future__ import annotations

import json
import random
import sys

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
        for alias, what in (
            ("many", "most pages touched for the first time since a checkpoint"),
            ("few", "pages touched before"),
        ):
            store = DjangoStore(alias)
            execute("CHECKPOINT", alias=alias)
            # The first thousands after the checkpoint touch each page of the few.
            for turn in range(2 if alias == "few" else 1):
                ((before,),) = rows("SELECT pg_current_wal_insert_lsn()", alias=alias)
                for number in range(_PAIRS):
                    identity = Identity(namespace=NAMESPACE, key=f"wal-{turn}-{number}")
                    settle(store, claim(store, identity))
            query = "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), %s)"
            ((wrote,),) = rows(query, (before,), alias=alias)
            _print(f"WAL per claim and settle, {what}", "B", float(wrote) / _PAIRS)


def _size() -> float:
    query = "SELECT pg_total_relation_size('celery_idempotent_record')"
    ((size,),) = rows(query, alias="many")
    return float(size)


def _print(what: str, unit: str, amount: float) -> None:
    print(json.dumps({"what": what, "unit": unit, "amount": amount}), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
