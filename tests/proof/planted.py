"""Bugs planted in a copy of the package, which the model, the traces or the races have to find.

A checker that cannot fail proves nothing. The bugs are mutants of tests/mutants; each names what has to find it here.
"""

from __future__ import annotations

from multiprocessing.pool import ThreadPool

from tests.mutants.catalogue import Mutant, mutants
from tests.mutants.running import Verdict, measure, try_out
from tests.proof import Options, Row, say

_TESTS = "tests/proof/test_proof.py"
#: What finds them, a test of the small proof, and their ids.
PLANTED = {
    f"{_TESTS} -k first_worlds": (
        "table-take-back-crash", "table-take-back-kept", "table-claim-crash", "table-claim-lease",
        "table-settle-token", "table-settle-twice", "table-mark-answers", "cas-token",
    ),
    f"{_TESTS}::test_a_store_answers_as_the_table_does[redis]": ("settle-token", "renew-deadline"),
    f"{_TESTS}::test_a_store_answers_as_the_table_does[sqlite]": ("sqlsettle-token",),
    f"{_TESTS}::test_two_clients_and_a_lost_answer_come_out_as_one_after_the_other[redis]": ("swap-head",),
}  # fmt: skip


def run(options: Options) -> list[Row]:
    known = {each.id: each for each in mutants()}
    planted = [(known[name], test) for test, ids in PLANTED.items() for name in ids]
    if options.full:
        test = f"{_TESTS} -k 'first_worlds or table_does and memory'"
        planted += [(each, test) for each in known.values() if each.file == "stores/table.py"]

    def find(what: tuple[Mutant, str]) -> Verdict:
        mutant, test = what
        verdict = try_out(mutant, [baselines[test]])
        say(f"{verdict.word:8} {mutant.id:24} {verdict.by or mutant.bug}")
        return verdict

    with ThreadPool(2) as threads:
        tests = sorted({test for _, test in planted})
        baselines = dict(zip(tests, threads.map(measure, tests, 1), strict=True))
        found = threads.map(find, planted, 1)
    missed = [
        mutant.id for (mutant, _), each in zip(planted, found, strict=True) if each.word != "killed"
    ]
    return [
        Row(
            name="planted bugs",
            what="bugs of the table and of stores, each in a copy of the package",
            how_many=f"{len(planted)}",
            found=f"missed: {', '.join(missed)}" if missed else "each was found",
            command="python -m tests.proof planted",
            held=not missed,
        )
    ]
