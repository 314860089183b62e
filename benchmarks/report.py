"""The figures as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from benchmarks.figures import Figure

if TYPE_CHECKING:
    from rich.console import Console

_MET = {True: "[green]met[/]", False: "[red]missed[/]", None: ""}


def show(console: Console, title: str, figures: Sequence[Figure]) -> None:
    """Print the figures of one benchmark, and in further columns its other measurements."""
    table = Table(title=title, title_justify="left", title_style="bold")
    extras = list(dict.fromkeys(name for figure in figures for name in figure.extra))
    table.add_column("")
    for heading in ("figure", "quartiles", "goal"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in extras:
        table.add_column(name.replace("_", " "), justify="right", style="dim", max_width=10)
    for figure in figures:
        value = figure.value
        against = f" [dim]/ {escape(figure.against)}[/]" if figure.against else ""
        spread = f"{_number(value.low)}–{_number(value.high)}" if value.samples > 1 else ""
        table.add_row(
            f"{escape(figure.what)}{against}",
            f"[bold]{_number(value.median)} {figure.unit}[/]",
            f"[dim]{spread}[/]",
            "" if figure.goal is None else f"≤ {figure.goal:g} {_MET[figure.met]}",
            *(_number(figure.extra[name]) if name in figure.extra else "" for name in extras),
        )
    console.print()
    console.print(table)


def _number(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
