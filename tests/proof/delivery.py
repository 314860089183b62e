"""Every history of a delivery, on real workers: with Redis, with RabbitMQ, and through the outbox of PostgreSQL."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests import conftest  # noqa: F401  the wheel is found before the source tree
from tests.delivery.histories import History, Played, histories, play
from tests.delivery.stand import open_stand
from tests.proof import Options, Row
from tests.support.servers import open_rabbitmq

#: The processes of a worker, each of which is one history's.
_AT_ONCE = 10


def run(options: Options) -> list[Row]:
    """Play all histories; one row for each broker."""
    every = list(histories())
    staged = [each for each in every if each.way == "outbox"]
    called = [each for each in every if each.way != "outbox"]
    with ThreadPoolExecutor(2) as pool:
        on_rabbitmq = pool.submit(_on, "rabbitmq", called)
        on_redis = _on("redis", called)
        rows = [_row("redis", on_redis), _row("rabbitmq", on_rabbitmq.result())]
    return [*rows, _row("redis, outbox", _on("redis", staged, outbox=True))]


def _on(broker: str, wanted: Iterable[History], *, outbox: bool = False) -> list[Played]:
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rabbitmq = stack.enter_context(open_rabbitmq()) if broker == "rabbitmq" else None
        stand = stack.enter_context(
            open_stand(broker, directory, rabbitmq, concurrency=_AT_ONCE, outbox=outbox)
        )
        return play(stand, wanted, at_once=_AT_ONCE)


def _row(where: str, played: list[Played]) -> Row:
    wrong = [each for each in played if each.error is not None]
    for each in wrong:
        sys.stderr.write(f"{where}: {each.history}: {each.error}\n")
    return Row(
        name="delivery",
        what=f"histories from a body to its ack, {where}",
        how_many=f"{len(played)}",
        found=f"{len(wrong)} that ended otherwise" if wrong else "none that ended otherwise",
        command="python -m tests.proof delivery",
        held=not wrong,
    )
