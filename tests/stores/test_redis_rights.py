"""A user of Redis who lacks a right leaves every record whole, and `check` names the right."""

from __future__ import annotations

import contextlib

import pytest

from celery_idempotent.celery.checks import check_store
from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import Identity, State
from celery_idempotent.stores.redis.store import RedisStore
from tests.stores.verbs import LIVES, claim
from tests.support.admin import make_app

pytestmark = pytest.mark.redis

#: As docs/running.md gives them to a worker.
RIGHTS = (
    *("evalsha", "eval", "get", "getrange", "set", "setrange", "del", "pexpire", "pttl", "time"),
    *("zadd", "zrem", "zrangebyscore", "zrandmember", "hincrby", "expire"),
)


def only(*rights: str) -> tuple[str, ...]:
    """Return the rules of a user who has these commands, for keys of the usual prefix."""
    return "~idem:*", *(f"+{right}" for right in rights)


@pytest.mark.parametrize("missing", ["none", *RIGHTS])
def test_without_a_right_a_record_is_whole_or_absent(store_with, server, missing):
    admin = RedisStore(server.url)
    rights = [right for right in RIGHTS if right != missing]
    if missing == "evalsha":  # the first of the two is enough to be refused
        rights.remove("eval")
    store, refused = store_with(*only(*rights)), 0
    for life, live in LIVES.items():
        key = Identity(namespace="charge", key=life)
        try:
            live(store, key)
        except StoreMisconfigured:
            refused += 1
            assert life not in ("claimed", "reserved") or admin.get(key) is None
        name, leases, failures, interrupted = admin._keys.of_record(key)
        record = admin.get(key)
        indexed = {
            index
            for index in (leases, failures, interrupted)
            if server.client.zscore(index, name) is not None
        }
        wanted = {State.FAILED: failures, State.INTERRUPTED: interrupted, State.COMPLETED: None}
        if record is not None:
            index = wanted.get(record.state, leases)
            assert index is None or index in indexed, (life, record.state)
    admin.close()
    assert bool(refused) is (missing not in ("none", "eval", "hincrby", "expire"))


@pytest.mark.parametrize("missing", [right for right in RIGHTS if right not in ("evalsha", "eval")])
def test_a_check_names_the_missing_right(store_with, server, missing):
    with contextlib.closing(RedisStore(server.url)) as admin:
        claim(admin, Identity(namespace="charge", key="order-17"))
    store = store_with(*only(*(right for right in RIGHTS if right != missing)))
    (finding,) = (each for each in check_store(make_app(store)) if each.id == "E006")
    assert f"refuses its user {missing.upper()}" in finding.problem


def test_a_check_names_keys_that_the_user_may_not_write(store_with, server):
    store_with(*only(*RIGHTS))
    other = RedisStore(f"redis://u:pw@127.0.0.1:{server.port}/0?prefix=other")
    (finding,) = (each for each in check_store(make_app(other)) if each.id == "E006")
    assert "u:pw" not in finding.problem
    other.close()


def test_a_user_with_all_rights_has_no_finding(store_with):
    assert not [
        each
        for each in check_store(make_app(store_with(*only(*RIGHTS, "info"))))
        if each.id == "E006"
    ]
