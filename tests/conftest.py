"""Fixtures for every test: servers, names of one's own, workers and their ledger."""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis.utils

# redis-py reads the files of installed packages for its own version at each connection.
redis.utils.get_lib_version = functools.cache(redis.utils.get_lib_version)

# The package under test comes from the wheel in site-packages. `tests` and `testproject` are found in the root, which
# therefore goes to the end of the path, also when pytest was started with `python -m`.
ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT] + [str(ROOT)]

from celery_idempotent.signals import counters  # noqa: E402
from tests.support.ledger import LEDGER_VARIABLE, Ledger  # noqa: E402
from tests.support.proxy import Proxy  # noqa: E402
from tests.support.servers import (  # noqa: E402
    EmbeddedRedis,
    RabbitMQ,
    embedded_redis,
    open_rabbitmq,
    own_prefix,
    shared_redis_url,
)
from tests.support.tiers import is_brief  # noqa: E402

if TYPE_CHECKING:
    from tests.support.sites import Gate
    from tests.support.workers import Worker

_WORKERS = pytest.StashKey["list[Worker]"]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as ``wide`` what a contract class with ``brief = True`` leaves to ``make test-all``."""
    for item in items:
        brief = getattr(getattr(item, "cls", None), "brief", False)
        if brief and not is_brief(getattr(item, "originalname", item.name)):
            item.add_marker(pytest.mark.wide)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a test process more files of the folders whose fixtures it has."""
    from tests.support.scheduling import ByFolder

    return ByFolder(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Any:
    """Leave what is collected, which lives to the end, out of every later garbage collection.

    Ten thousand tests are a million objects. To look at them all again takes half a second, each time. What tests leave
    is collected more rarely than usual, which takes a seventh of the time otherwise.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)
        gc.enable()


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A Redis that others may use too: keep to keys that start with ``prefix``, flush nothing."""
    with shared_redis_url() as url:
        yield url


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[redis.Redis]:
    """A client of ``redis_url``."""
    client = redis.Redis.from_url(redis_url)
    yield client
    client.close()


@pytest.fixture
def prefix(redis_client: redis.Redis) -> Iterator[str]:
    """A prefix for Redis keys that nobody else uses; its keys are deleted after the test."""
    with own_prefix(redis_client) as name:
        yield name
        counters.counts.clear()  # or it is written after this


@pytest.fixture
def namespace() -> str:
    """A namespace, queue or app name that nobody else uses."""
    return f"test.{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def _session_redis() -> Iterator[EmbeddedRedis]:
    with embedded_redis() as server:
        yield server
        _make_whole(server)  # for what is collected before it stops


@pytest.fixture
def private_redis(_session_redis: EmbeddedRedis) -> EmbeddedRedis:
    """A Redis of our own, one for the session: running, thawed and empty at the start of each test.

    Stop it, freeze it, kill it, bring it back: the next test finds it whole.
    """
    _make_whole(_session_redis)
    return _session_redis


def _make_whole(server: EmbeddedRedis) -> None:
    try:
        server.thaw()
        client = redis.Redis.from_url(server.url(), socket_timeout=5)
        client.flushall()
        client.close()
    except (redis.RedisError, OSError, RuntimeError):
        server.stop()
        server.start()


@pytest.fixture(scope="session")
def databases() -> Iterator[Iterator[str]]:
    """Addresses of Redis databases that nobody used before, on a server that no test breaks."""
    with embedded_redis(options={"databases": "400"}) as server:
        yield (server.url(number) for number in itertools.count())


@pytest.fixture
def persistent_redis() -> Iterator[EmbeddedRedis]:
    """A Redis of the test's own that writes every change to disk: its data survives ``kill()`` and ``start()``."""
    with embedded_redis(persistent=True) as server:
        yield server


@pytest.fixture
def redis_proxy(private_redis: EmbeddedRedis) -> Iterator[Proxy]:
    """A breakable connection to ``private_redis``."""
    with Proxy("127.0.0.1", private_redis.port) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitMQ]:
    """A RabbitMQ, with a virtual host of our own where that is possible; ``queue()`` gives queues of one's own."""
    with open_rabbitmq() as broker:
        yield broker


@pytest.fixture(scope="session")
def rabbitmq_url(rabbitmq: RabbitMQ) -> str:
    """The address of ``rabbitmq``."""
    return rabbitmq.url


@pytest.fixture
def rabbitmq_queue(rabbitmq: RabbitMQ) -> Iterator[str]:
    """A queue name for this test; the queue is deleted after it."""
    name = rabbitmq.queue()
    yield name
    rabbitmq.delete(name)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """The file in which this test's workers note what they did; ``start_worker`` hands it to them."""
    return Ledger(tmp_path / "ledger.jsonl")


@pytest.fixture
def start_worker(
    request: pytest.FixtureRequest, tmp_path: Path, ledger: Ledger
) -> Iterator[Callable[..., Worker]]:
    """Start workers that end with the test: ``start_worker("tests.delivery.app", concurrency=2, env={...})``.

    Takes what :class:`tests.support.workers.Worker` takes. The ledger's path is put in the environment.
    """
    # Imported late: it imports the package under test, and tests of nothing but support shall run without it.
    from tests.support.workers import Worker

    workers = request.node.stash.setdefault(_WORKERS, [])

    def start(app: str, *, name: str | None = None, **options: Any) -> Worker:
        env = {LEDGER_VARIABLE: ledger.path, **(options.pop("env", None) or {})}
        timing = {word: options.pop(word) for word in ("timeout", "ready") if word in options}
        name = name or f"worker{len(workers) + 1}"
        worker = Worker(app, directory=tmp_path, name=name, env=env, **options)
        workers.append(worker)
        return worker.start(**timing)

    yield start
    for worker in workers:
        worker.kill()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """A closed gate; it opens at the end of the test, so that nothing waits on."""
    from tests.support.sites import Gate

    gate = Gate(str(tmp_path / "gate"))
    yield gate
    gate.open()


@pytest.fixture
def key() -> str:
    """A key that nobody else uses."""
    return f"key.{uuid.uuid4().hex}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Show the end of each worker's log with the failure."""
    report: pytest.TestReport = yield
    if report.failed:
        workers = [*item.stash.get(_WORKERS, []), *_shared_workers(item)]
        report.sections += [(f"log of {worker.name}", worker.tail(100)) for worker in workers]
    return report


def _shared_workers(item: pytest.Item) -> list[Worker]:
    if not {"shared", "on_redis", "on_rabbitmq"} & set(getattr(item, "fixturenames", ())):
        return []
    from tests.support.sites import SHARED_WORKERS

    return SHARED_WORKERS
