"""How much a test run tries: the smoke of the store contract, and how many examples."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

#: `make test-all` asks for more examples of everything that is tried with any.
THOROUGH = "CELERY_IDEMPOTENT_THOROUGH" in os.environ


def examples(few: int, many: int) -> int:
    """Return how many examples to try: few, or many in `make test-all`."""
    return many if THOROUGH else few


# Of what says nothing else. To draw one takes long on a machine with other things to do: that is no failure.
settings.register_profile(
    "tests",
    max_examples=examples(20, 100),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")


#: One test of the contract for each verb and each index. With those of concurrency they show that a server executes
#: the same scripts, or a wrapper passes on the same calls; what the scripts decide is the whole contract's on Redis.
SMOKE = frozenset(
    {
        "test_a_sweep_and_a_prune_of_one_full_bucket_go_to_the_end_of_their_limit",
        "test_a_verb_does_what_the_table_says",
        "test_any_printable_key_is_kept_as_it_is",
        "test_counters_add_up",
        "test_counts",
        "test_each_state_lists_its_own",
        "test_prunes_end",
        "test_the_end_of_the_last_sweep_is_known",
        "test_tokens_grow_with_every_claim",
    }
)


def is_brief(name: str) -> bool:
    """Whether a test of the contract runs in every tier, on every store: concurrency, and the smoke."""
    return "at_once" in name or name in SMOKE
