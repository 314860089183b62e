"""Decides from what was noted: nothing lost, nothing doubled, no run beside another, but what a named fault explains.

::

    claim 1 ─ effect ─ ✗ a fault before its settle ─ claim 2 ─ effect      doubled, and explained
    claim 1 ─ effect ─ settle ─ claim 2                                    wrong, unless the store lost its data
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

from tests.proof.chaos.tasks import CANVASES, EACH_RUNS, LEASE

#: The verbs that end a claim.
ENDS = ("settled", "released", "lease_lost", "settle_failed")
#: After these a message is on its way again, or still.
SENT_AGAIN = ("released", "conflicted", "store_failed", "requeued", "reserved")
#: The kinds whose record keeps the message.
KEPT = ("once", "ordered")
#: How much later than the fact a note may come, on a machine that is busy.
LATE = 2.0
#: So much is left of a lease at least when its store goes away: it is renewed after a third.
LEFT = LEASE * 2 / 3

Note = dict[str, Any]


def missing(notes: Iterable[Note]) -> set[str]:
    """Return the units that were promised, and took no effect."""
    promised, done = set(), set()
    for note in notes:
        if note["what"] == "call":
            promised.update(note["units"])
        elif note["what"] == "effect":
            done.add(note["unit"])
    return promised - done


def _ends_worker(fault: Note, ended: Note) -> bool:
    """Does a worker end by this fault: by a signal that it got, or as it does without its broker?"""
    is_near = fault["t"] < ended["t"] < fault["end"] + 15
    return ended["pids"][0] in fault["hit"] or (fault["explains"] == "broker" and is_near)


class Checker:
    """What was found: ``doubled`` and ``lost`` with their reasons, ``wrong`` without."""

    def __init__(self, notes: Sequence[Note], *, store: str, broker: str, library: str) -> None:
        self._broker, self._is_ours = broker, library == "ours"
        self._notes = sorted(notes, key=lambda note: note["t"])
        self._start = next(note["t"] for note in self._notes if note["t"])
        self.wrong: list[str] = []
        self.missed: list[str] = []
        self.doubled: list[str] = []
        self.lost: list[str] = []
        self.verbs: Counter[str] = Counter()
        self.calls = self.effects = 0
        self._faults = self._read_faults(may_lose=store == "sentinel")
        self.faults = Counter(each["fault"] for each in self._faults if "n" in each)
        self._claims: dict[str, list[Note]] = defaultdict(list)
        self._ends: dict[tuple[str, int], Note] = {}
        self._last: dict[str, Note] = {}
        for note in self._notes:
            if note["what"] == "verb":
                self._read_verb(note)
        if self._is_ours:
            for claims in self._claims.values():
                self._check_claims(claims)
            self._check_values()
        self._check_effects()
        self._check_calls()

    # -- reading -------------------------------------------------------------------------------------------------------

    def _read_faults(self, *, may_lose: bool) -> list[Note]:
        """Return the faults, each with its ``end`` and the ``pids`` or ``key`` it struck; and workers that ended."""
        faults: dict[int, Note] = {}
        ended = []
        for note in self._notes:
            if note["what"] == "strike":
                faults[note["n"]] = {**note, "end": self._notes[-1]["t"]}
                faults[note["n"]]["hit"] = ()
                if may_lose and note["explains"] == "away":
                    faults[note["n"]]["explains"] = "away, lost"  # a replica becomes the master
            elif note["what"] == "struck":
                faults[note["n"]]["hit"] = note["hit"]
            elif note["what"] == "healed" and note["n"] in faults:
                faults[note["n"]]["end"] = note["t"]
            elif note["what"] == "missed":
                fault = faults[note["n"]]
                self.missed.append(f"{fault['fault']}: {note['why']}")
                if fault["hit"] == ():  # it struck nobody, and explains nothing
                    del faults[note["n"]]
            elif note["what"] == "split":
                ended.append({**note, "fault": "two masters", "explains": "lost", "hit": ()})
            elif note["what"] == "ended":
                causes = [each for each in faults.values() if _ends_worker(each, note)]
                if not causes:
                    self.wrong.append(f"{note['name']} ended by itself, with {note['code']}")
                name = f"a worker's end after {causes[-1]['fault'] if causes else 'nothing'}"
                # Until it ends, a process that a signal struck may claim and run.
                struck = [each for each in causes if note["pids"][0] in each["hit"]]
                hit = {*note["pids"], *(pid for each in struck for pid in each["hit"])}
                about = {"fault": name, "explains": "died", "hit": hit}
                ended.append({"t": note["t"] - 5, "end": note["t"], **about})
        return [*faults.values(), *ended]

    def _read_verb(self, note: Note) -> None:
        self.verbs[note["verb"]] += 1
        self._last[note["task_id"]] = note
        if note["verb"] == "claimed":
            self._claims[note["id"]].append(note)
        elif note["verb"] in ENDS:
            self._ends.setdefault((note["id"], note["token"]), note)

    # -- what explains -------------------------------------------------------------------------------------------------

    def _at(self, t: float) -> str:
        return f"{t - self._start:.1f} s"

    def _explain(self, claim: Note, until: float) -> str:
        """Name the fault by which a claim was over before its own end."""
        away: list[tuple[float, float]] = []
        for fault in self._faults:
            begin, end = max(fault["t"], claim["t"]), min(fault["end"], until)
            explains, was_hit = fault["explains"], claim["pid"] in fault["hit"]
            told = f"{fault['fault']} at {self._at(fault['t'])}"
            if explains == "limit" and claim["id"].split()[-1] in fault["hit"]:
                return told
            if begin > end + 1:
                continue
            if explains == "stepped" or (explains == "died" and was_hit):
                return told
            if explains == "frozen" and was_hit and end - begin > LEFT:
                return told
            if "away" in explains:
                away.append((begin, min(end + 2, until)))  # a client asks again after a pause
        total = reached = 0.0
        for begin, end in sorted(away):
            total += max(0.0, end - max(begin, reached))
            reached = max(reached, end)
        return f"the store was away for {total:.1f} s" if total > LEFT else ""

    def _data_lost(self, settled: float, until: float) -> str:
        for fault in self._faults:
            if "lost" in fault["explains"] and settled < fault["end"] + 1 and fault["t"] < until:
                return f"{fault['fault']} at {self._at(fault['t'])}"
        return ""

    def _stepped(self, first: Note, second: Note) -> bool:
        steps = [each["t"] for each in self._faults if each["explains"] == "stepped"]
        return any(first["t"] - LATE < t < second["t"] for t in steps)

    def _rolled_back(self, claim: Note, until: float) -> bool:
        """Did an atomic run lose its session, and with it what it had done? Its key is given back as soon as it can."""
        return claim["id"].startswith("atomic") and any(
            ("away" in each["explains"] or each["fault"] == "sessions killed")
            and claim["t"] - 1 < each["end"]
            and each["t"] < until
            for each in self._faults
        )

    # -- what is decided -----------------------------------------------------------------------------------------------

    def _check_claims(self, claims: list[Note]) -> None:
        """No claim beside another, none after an end that answers it, and tokens that grow."""
        for first, second in pairwise(claims):
            told = f"{first['id']}: claims {first['token']} and {second['token']}, the second at "
            told += self._at(second["t"])
            end = self._ends.get((first["id"], first["token"]))
            if end and (end["t"] > second["t"] + LATE or end["verb"] == "settle_failed"):
                end = None
            ended = end["t"] if end else first["t"]
            is_lost = self._data_lost(min(ended, second["t"]), max(ended, second["t"]))
            explained = is_lost or self._explain(first, second["t"])
            if second["token"] <= first["token"] and not explained:
                self.wrong.append(f"{told}: tokens do not grow")
            if end is None:
                if not explained and not self._rolled_back(first, second["t"]):
                    self.wrong.append(f"{told}: beside one another, without a fault")
            elif end["verb"] == "settled" and not is_lost:
                kind = first["id"].split()[0]
                # Without retention the mark of a task lives for one more lease.
                may = kind in EACH_RUNS and first["task_id"] != second["task_id"]
                is_over = second["t"] > end["t"] + LEASE - LATE or self._stepped(end, second)
                if not may and not (kind == "brief" and is_over):
                    self.wrong.append(f"{told}: settled at {self._at(end['t'])}, and claimed again")

    def _check_values(self) -> None:
        """The first result stays: every duplicate gets the same."""
        told: dict[tuple[str, int], set[str]] = defaultdict(set)
        for note in self._notes:
            if note.get("verb") == "replayed" and "value" in note:
                told[note["id"], note["token"]].add(note["value"])
        self.wrong += [
            f"{of}: replayed with two values" for of, some in told.items() if len(some) > 1
        ]

    def _check_effects(self) -> None:
        units: dict[str, list[Note]] = defaultdict(list)
        for note in self._notes:
            if note["what"] == "effect":
                units[note["unit"]].append(note)
        self.effects = sum(map(len, units.values()))
        unsure = {note["key"] for note in self._notes if note["what"] == "unsure"}
        for unit, effects in units.items():
            # A mark without retention lives for one lease: a redelivery after that runs again.
            if not unit.startswith("brief") and unit.split()[1].partition("/")[0] not in unsure:
                for first, second in pairwise(effects):
                    why = self._of_double(first, second) if self._is_ours else "-"
                    told = f"{unit} at {self._at(first['t'])} and {self._at(second['t'])}"
                    self._decide(self.doubled, f"doubled: {told}", why)

    def _of_double(self, first: Note, second: Note) -> str:
        if first["token"] == second["token"] or "id" not in first or first["id"] != second["id"]:
            return ""  # by one claim, in a transaction, or under two keys
        # The effect of a process that was frozen comes after that of the next claim.
        first, second = sorted((first, second), key=itemgetter("token"))
        end = self._ends.get((first["id"], first["token"]))
        if end is not None and end["verb"] == "settled" and end["t"] < second["t"]:
            return self._data_lost(end["t"], second["t"]) or self._mark_lost(first, second)
        claims = [each for each in self._claims[first["id"]] if each["token"] == first["token"]]
        lost = self._data_lost(first["t"], second["t"])
        return lost or self._explain((*claims, first)[0], second["t"])

    def _mark_lost(self, first: Note, second: Note) -> str:
        """Name the fault after which a message came back where each call runs: another call's mark stood there."""
        others = [x["t"] for x in self._claims[first["id"]] if x["task_id"] != first["task_id"]]
        if any(first["t"] < t < second["t"] for t in others):
            for fault in self._faults:
                if (
                    fault["explains"] in ("died", "broker")
                    and first["t"] - 1 < fault["end"] < second["t"]
                ):
                    return f"{fault['fault']} at {self._at(fault['t'])}, and another call's run"
        return ""

    def _check_calls(self) -> None:
        gone = missing(self._notes)
        for call in self._notes:
            if call["what"] == "call":
                self.calls += 1
                for unit in sorted(gone.intersection(call["units"])):
                    gone.remove(unit)
                    why = self._of_loss(call, unit) if self._is_ours else "-"
                    self._decide(self.lost, f"lost: {unit}, called at {self._at(call['t'])}", why)

    def _of_loss(self, call: Note, unit: str) -> str:
        """Name the fault by which a message may be gone that nobody has claimed since it was sent.

        Of Redis, or acknowledged early; a retry that the broker did not take; and the body of a chord, which Celery
        gives up then. What keeps its message is sent again by the sweep: it is never lost.
        """
        begun, faults = (
            call["first"],
            [f for f in self._faults if f["explains"] in ("died", "broker")],
        )
        last = self._last.get(call["result"] or "")
        if last and call["kind"] not in CANVASES:
            begun = last["t"]
        if call["kind"] == "chord" and unit.endswith("/3"):
            parts = [x["t"] for x in self._notes if x.get("unit", "").startswith(unit[:-1])]
            faults = [f for f in faults if any(f["t"] - 3 < t < f["end"] + 1 for t in parts)]
        elif call["kind"] == "retrying" and self._broker != "redis":
            faults = [f for f in faults if f["t"] - LATE < begun < f["end"] + 1 and last]
        else:
            may_be_gone = self._broker == "redis" or call["kind"] == "early"
            # The fault that ended a claim, and one that met the message when it was given out again.
            met = [fault for fault in faults if fault["end"] > begun - 1]
            is_again = (
                last is not None and last["verb"] in ("claimed", "interrupted") and len(met) > 1
            )
            is_away = last is None or is_again or last["verb"] in SENT_AGAIN
            is_away = is_away or call["kind"] in CANVASES
            if not (may_be_gone and is_away) or call["kind"] in KEPT:
                return ""
        found = next((fault for fault in faults if fault["end"] > begun - 1), None)
        return f"{found['fault']} at {self._at(found['t'])}" if found else ""

    def _decide(self, explained: list[str], told: str, why: str) -> None:
        explained.append(f"{told}: {why}") if why else self.wrong.append(f"{told}, without a fault")
