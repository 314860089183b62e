"""Chaos with a seed: real workers under faults of every kind, on stores and brokers of their own."""

from __future__ import annotations

from tests.proof import Options, Row


def run(options: Options) -> list[Row]:
    """Play a minute on one store and broker, which the seed chooses; all with ``--full``."""
    from tests.proof.chaos.__main__ import rows

    return rows(options)
