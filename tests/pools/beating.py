"""A program: patch threads as ``python beating.py gevent early`` says, hold claims, see whether others get a turn."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

_LEASE_MS = 3000


def _patch() -> None:
    if sys.argv[1] == "gevent":
        from gevent import monkey

        monkey.patch_all()
    else:
        import eventlet

        eventlet.monkey_patch()


def main() -> None:
    if sys.argv[2] == "early":
        _patch()
    from celery_idempotent.protocol.claim import Claim, Phase
    from celery_idempotent.protocol.lease import heartbeat
    from celery_idempotent.protocol.options import Policy
    from celery_idempotent.records import Identity, Renewal
    from celery_idempotent.stores.memory import MemoryStore
    from tests.support.records import claim_key

    if sys.argv[2] == "late":
        _patch()

    renewals = 0

    class Store(MemoryStore):
        def renew(self, leases: Sequence[Renewal]) -> list[bool]:
            nonlocal renewals
            time.sleep(0.01)  # as a store on the network would, it lets others have their turn
            renewals += 1
            return super().renew(leases)

    store = Store()
    claims = []
    for key in "abc":
        identity = Identity(namespace="beating", key=key)
        record = claim_key(
            store, identity, lease_ms=_LEASE_MS, keep_ms=_LEASE_MS, task_id=key, worker="w"
        )
        claim = Claim()
        claim.phase, claim.store, claim.record = Phase.RUNNING, store, record
        claim.identity, claim.renewed_at = identity, time.monotonic()
        claim.policy = Policy(lease_ms=_LEASE_MS, retention_ms=_LEASE_MS)
        claims.append(claim)
        heartbeat.add(claims[-1])
    longest = 0.0
    give_up = time.monotonic() + 30
    while not renewals and time.monotonic() < give_up:
        before = time.monotonic()
        time.sleep(0.01)
        longest = max(longest, time.monotonic() - before)
    for claim in claims:
        heartbeat.remove(claim)
    sys.stdout.write(
        json.dumps(
            {
                "renewals": renewals,
                "longest": longest,
                "lost": [c.lost for c in claims],
            }
        )
    )


if __name__ == "__main__":
    main()
