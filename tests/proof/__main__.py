"""Prove what can be proven: ``python -m tests.proof [parts] [--full] [--seed N] [--list]``.

Ends with one table, and with 1 if a promise was broken or a planted bug was not found.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time

from tests.support.paths import find_installed_first

find_installed_first()

from tests.proof import PARTS, Options, Row, say, show  # noqa: E402

_HEADS = ("proof", "what", "how many", "found", "seconds", "command")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.proof", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"these alone: {', '.join(PARTS)}")
    parser.add_argument("--full", action="store_true", help="an hour instead of a quarter of one")
    parser.add_argument("--seed", type=int, default=1, help="of what is chosen by chance (1)")
    parser.add_argument("--list", action="store_true", help="say what there is, and end")
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"no part of this name: {', '.join(sorted(unknown))}")
    table: list[tuple[str, ...]] = [_HEADS]
    held = True
    for part in given.parts or PARTS:
        module = importlib.import_module(f"tests.proof.{part}")
        if given.list:
            sys.stdout.write(f"{part:10} {(module.__doc__ or '').splitlines()[0]}\n")
            continue
        say(f"{part} …")
        began = time.monotonic()
        rows: list[Row] = module.run(Options(full=given.full, seed=given.seed))
        took = f"{time.monotonic() - began:.0f}"  # of the part, in its first row
        for row, seconds in zip(rows, [took, *[""] * len(rows)], strict=False):
            table.append((row.name, row.what, row.how_many, row.found, seconds, row.command))
            held &= row.held
    if not given.list:
        show(table)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
