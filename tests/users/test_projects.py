"""Projects of users, built from the pages alone: their files, their commands, real workers, brokers and requests.

Each is done in the environment of the tests, and once more (``wide``) in a clean one, which has what the page says.
"""

from __future__ import annotations

import http.client
import json
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.stores.servers import free_port
from tests.support.newcomer import HERE, Newcomer, clean_venv
from tests.support.programs import build_wheel
from tests.support.servers import EmbeddedRedis, RabbitMQ, need
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.worker, pytest.mark.redis]

REDIS = "redis://localhost:6379/0"
Begin = Callable[..., Newcomer]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built anew."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(params=["here", pytest.param("clean", marks=pytest.mark.wide)])
def begin(
    request: pytest.FixtureRequest, private_redis: EmbeddedRedis, tmp_path: Path
) -> Iterator[Begin]:
    """A function that gives a newcomer some pages, of which the first says what to install."""
    started: list[Newcomer] = []

    def begin(*pages: str, **changes: str) -> Newcomer:
        programs = HERE
        if request.param == "clean":
            wheel: Path = request.getfixturevalue("wheel")
            programs = clean_venv(tmp_path / "venv", wheel, pages[0])
        project = tmp_path / "project"
        project.mkdir()
        found = {REDIS: private_redis.url(), **changes}
        started.append(Newcomer(*pages, directory=project, programs=programs, changes=found))
        return started[-1]

    yield begin
    for each in started:
        each.close()
        each.show_logs()


def abridged(answer: str) -> str:
    """Leave of an answer what the pages show: the first line, and the body."""
    head, _, body = answer.replace("\r\n", "\n").partition("\n\n")
    return f"{head.splitlines()[0].strip()}\n{body}\n"


def test_the_quickstart_charges_once(begin: Begin) -> None:
    newcomer = begin("quickstart")
    assert newcomer.write() == ["shop.py", "customer.py"]
    newcomer.start("celery -A shop worker")
    for command in ("python customer.py", "cat charges.txt"):
        assert newcomer.run(command) == newcomer.told(command)
    show = "celery -A shop idempotency show"
    assert {*newcomer.told(show).splitlines()} <= {*newcomer.run(show).splitlines()}


#: Two deliveries of one charge, and their answers.
TWICE = """
from shop import charge
both = [charge.delay("order-18", 500) for _ in range(2)]
print("published")
for each in both:
    print(each.get(timeout=60))
"""


@pytest.mark.rabbitmq
def test_on_rabbitmq_what_a_lost_worker_had_is_charged_once(
    begin: Begin, rabbitmq: RabbitMQ, private_redis: EmbeddedRedis
) -> None:
    newcomer = begin(
        "quickstart",
        "running",
        **{
            "amqp://user:password@rabbit.internal//": rabbitmq.url,
            "redis://redis.internal:6379/1": private_redis.url(1),
        },
    )
    assert newcomer.write(after={"rabbitmq": "app = Celery("}) == ["shop.py", "customer.py"]
    worker = newcomer.start("celery -A shop worker")
    assert newcomer.run("python customer.py") == newcomer.told("python customer.py")

    worker.freeze()
    customer = newcomer.start_program(TWICE)
    customer.says("published")
    worker.kill()
    newcomer.start("celery -A shop worker")
    assert customer.end().splitlines() == ["published", *2 * ["receipt for order-18"]]
    charged = newcomer.run("cat charges.txt")
    assert charged == newcomer.told("cat charges.txt") + "order-18 500\n"


def test_a_django_shop_takes_an_order_once(begin: Begin) -> None:
    need(shutil.which("curl"), "curl")
    port = str(free_port())
    newcomer = begin(
        "django",
        **{
            "localhost:8000": f"localhost:{port}",
            "manage.py runserver": f"manage.py runserver --noreload {port}",
        },
    )
    newcomer.run("django-admin startproject")
    newcomer.run("python manage.py startapp")
    assert {"shop/settings.py", "orders/views.py"} < {*newcomer.write()}
    newcomer.run("python manage.py makemigrations")
    newcomer.run("python manage.py migrate")
    worker = newcomer.start("celery -A shop worker")
    newcomer.start("python manage.py runserver").says("Quit the server")

    assert abridged(newcomer.run("curl")) == newcomer.told("curl")
    assert re.search(r"201 Created(?s:.*)Idempotent-Replayed: true", newcomer.run("curl"))
    assert "422 Unprocessable" in newcomer.run("curl", **{"cents=1999": "cents=5"})
    worker.says("SIGKILL")
    count = "python manage.py shell"
    wait_for(lambda: entries(newcomer.directory), 60, "the entry")
    assert newcomer.run(count) == newcomer.told(count)
    newcomer.run("python manage.py check")


def entries(project: Path) -> int:
    """Return how many entries there are; each look by a command would take a second."""
    with sqlite3.connect(project / "db.sqlite3", timeout=20) as db:
        return int(db.execute("SELECT count(*) FROM orders_entry").fetchone()[0])


def test_an_api_charges_once(begin: Begin) -> None:
    need(shutil.which("curl"), "curl")
    port, other = free_port(), free_port()
    newcomer = begin(
        "fastapi-flask",
        **{
            "localhost:8000": f"localhost:{port}",
            "fastapi_api:api": f"fastapi_api:api --port {port}",
            "--port 8000": f"--port {other}",
        },
    )
    newcomer.write()
    worker = newcomer.start("celery -A shop worker")
    newcomer.start("uvicorn").says("Uvicorn running")
    first = newcomer.run("curl -i").splitlines()
    assert {*newcomer.told("curl -i").splitlines()} <= {*first}
    parts = newcomer.told("curl -s").strip().split(" …, ")

    def done() -> bool:
        found = newcomer.run("curl -s")
        return all(part in found for part in parts)

    wait_for(done, 60, "the charge")
    worker.kill()
    assert "200 OK" in newcomer.run("curl -i")

    newcomer.start("flask").says("Running on")
    assert ask(other, "click-2", order_id="order-18") == 202
    for server in (port, other):
        assert ask(server, "click-1") == 200
        assert ask(server, "click-2", order_id="order-18") == 202
        assert ask(server, "click-1", cents=5) == 422
        assert ask(server, "x" * 300) == 400
        assert ask(server, "click-1", caller="bob") == 401
        assert ask(server, "click-3", "GET") == 404
    newcomer.start("celery -A shop worker")
    look = partial(ask, port, "click-2", order_id="order-18")
    wait_for(lambda: look() == 200, 60, "the second charge")
    assert newcomer.run("cat") == newcomer.told("cat") + "order-18 1999\n"

    third = free_port()
    serve = f"import uvicorn; uvicorn.run('refunds:api', port={third})"
    newcomer.start_program(serve).says("Uvicorn running")
    once, again = (send(third, "POST", "/refunds?order_id=order-17", "click-4") for _ in range(2))
    assert (once.status, again.status) == (200, 200)
    assert again.headers["Idempotent-Replayed"] == "true"
    assert again.read() == once.read()


def ask(
    port: int,
    key: str,
    method: str = "POST",
    *,
    caller: str = "ann",
    order_id: str = "order-17",
    cents: int = 1999,
) -> int:
    """Ask an API of the page for a charge; return the status of its answer."""
    path = "/charges" if method == "POST" else f"/charges/status?key={key}"
    order = {"order_id": order_id, "cents": cents}
    return send(port, method, path, key, order, caller=caller).status


def send(
    port: int, method: str, path: str, key: str, body: object = None, *, caller: str = "ann"
) -> http.client.HTTPResponse:
    """Send a request to an API of the page."""
    connection = http.client.HTTPConnection("localhost", port, timeout=30)
    headers = {
        "Authorization": f"Bearer secret-of-{caller}",
        "Content-Type": "application/json",
        "Idempotency-Key": key,
    }
    connection.request(method, path, json.dumps(body), {**headers, "Connection": "close"})
    return connection.getresponse()
