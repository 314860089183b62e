"""From a route of FastAPI to its task: one key guards requests, messages and redeliveries, on real processes."""

from __future__ import annotations

import http.client
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.http.sites import Answer, Web, at_once, new_key
from tests.support.preloaded import spawn
from tests.support.servers import EmbeddedRedis
from tests.support.workers import Worker, child_environment

pytestmark = [pytest.mark.worker, pytest.mark.redis]

SHOP = [sys.executable, "-m", "tests.http.shop"]


class Shop:
    """A web server or two, a worker, and one directory."""

    def __init__(self, directory: Path, redis: EmbeddedRedis) -> None:
        self.directory, self.env = directory, {"REDIS_URL": redis.url()}
        self.webs: list[Web] = []
        self.worker = Worker("tests.http.shop", directory=directory, concurrency=2, env=self.env)

    def serve(self, name: str, **env: str) -> Web:
        web = Web(SHOP, self.directory, child_environment({**self.env, **env}), name)
        self.webs.append(web)
        return web.start()

    def sweep(self) -> str:
        """Sweep at a time when reservations of now count as lost; return how many messages it sent."""
        log = self.directory / "sweep.log"
        env = child_environment({**self.env, "LATER": "1"})
        with log.open("wb") as output:
            code = spawn([*SHOP, "sweep"], cwd=self.directory, env=env, log=output).wait(60)
        assert code == 0, log.read_text()
        return log.read_text().split()[-1]

    def lose(self, web: Web, key: str) -> None:
        """Send a request that takes its web server down before it publishes."""
        doom = self.directory / "doom"
        doom.touch()
        with pytest.raises((http.client.HTTPException, OSError)):
            charge(web, key)
        doom.unlink()

    def charges(self) -> list[str]:
        return (self.directory / "charges.txt").read_text().split()


@pytest.fixture
def shop(tmp_path: Path, private_redis: EmbeddedRedis) -> Iterator[Shop]:
    found = Shop(tmp_path, private_redis)
    yield found
    for web in found.webs:
        web.kill()
    found.worker.kill()


def charge(web: Web, key: str) -> Answer:
    return web.ask("POST", "/charges", {"order_id": f"order-of-{key}"}, key=key)


def finished(web: Web, key: str) -> Any:
    """Repeat the request until it is done; return what it tells."""
    answer = web.until(lambda: charge(web, key), other_than=202)
    assert (answer.status, answer.replayed) == (200, True)
    assert web.ask("GET", answer.headers["Content-Location"]).json["state"] == "COMPLETED"
    return answer.json["result"]


def test_fifty_requests_and_two_messages_of_one_key_are_one_effect(shop: Shop) -> None:
    web, key = shop.serve("web"), new_key()
    answers = at_once(lambda: charge(web, key), 50)
    assert {answer.status for answer in answers} == {202}
    assert [answer.replayed for answer in answers].count(False) == 1
    assert shop.sweep() == "1", "a second copy of the message, while the first waits for a worker"
    shop.worker.start()
    assert finished(web, key) == {"receipt": f"order-of-{key}"}
    assert shop.charges() == [f"order-of-{key}"]


@pytest.mark.parametrize("who", ["a sweep", "a repetition"])
def test_what_a_lost_server_reserved_is_sent_once(shop: Shop, who: str) -> None:
    key = new_key()
    shop.lose(shop.serve("doomed"), key)
    web = shop.serve("web", **({"LATER": "1"} if who == "a repetition" else {}))
    assert charge(web, key).status == 202
    if who == "a sweep":
        assert charge(web, key).replayed, "it has the reservation, and sends nothing"
        assert shop.sweep() == "1"
    shop.worker.start()
    assert finished(web, key) == {"receipt": f"order-of-{key}"}
    assert shop.charges() == [f"order-of-{key}"]
