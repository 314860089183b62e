"""The page on the life of a record prints the table that the stores go by."""

from __future__ import annotations

from celery_idempotent.records import State
from celery_idempotent.stores.table import TABLE, WHOLE, Rule
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "life-of-a-record.md").read_text()
HEAD = "| verb | finds | if | answer | then | carried over |\n|---|---|---|---|---|---|\n"


def line(rule: Rule) -> str:
    """Return a row of the printed table."""
    found = ", ".join("none" if state is None else state.name for state in rule.found)
    if rule.found == (*State,):
        found = "any"
    then = rule.then.name if isinstance(rule.then, State) else rule.then or "unchanged"
    return f"| `{rule.verb}` | {found} | {rule.when} | {rule.answer} | {then} | {carried(rule)} |\n"


def carried(rule: Rule) -> str:
    """Return what the record has from the one before, with what is added to it."""
    more = [name for name in ("crashes", "attempts") if getattr(rule, name)]
    missing = [name for name in WHOLE if name not in rule.carried]
    if len(missing) > 3:
        fields = [name for name in rule.carried if name not in more]
    else:
        fields = ["all but " + ", ".join(missing)] if missing else ["all"]
    return ", ".join(fields + [f"{name} + 1" for name in more])


def test_the_table_of_the_page_is_the_one_of_the_stores() -> None:
    wanted = HEAD + "".join(map(line, TABLE))
    start = PAGE.find(HEAD)
    printed = PAGE[start:].partition("\n\n")[0] + "\n"
    assert printed == wanted, f"docs/life-of-a-record.md should have:\n{wanted}"
