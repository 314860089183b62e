"""Times views from request to response, in blocks; prints the milliseconds a request of each kind, a round a line."""

from __future__ import annotations

import itertools
import json
import random
import secrets
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.http import BARE_TRIP, BARE_VIEW

_BLOCK = 20
_BODY = {"amount": 17, "currency": "EUR"}


def main(url: str, directory: str, rounds: int, seed: int) -> None:
    """Measure."""
    import django
    from django.conf import settings

    settings.configure(
        ALLOWED_HOSTS=["*"],
        DATABASES={
            "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": f"{directory}/http.sqlite3"}
        },
        INSTALLED_APPS=["celery_idempotent.django"],
        LOGGING_CONFIG=None,
        ROOT_URLCONF=__name__,
        SECRET_KEY=secrets.token_hex(),
        USE_TZ=True,
    )
    django.setup()

    import celery
    from redis import Redis

    app = celery.Celery("bench", broker="memory://", set_as_current=True)
    app.conf.idempotency_store = url
    app.set_default()
    kinds, client = _kinds(url), Redis.from_url(url)
    order = random.Random(seed)
    for number in range(-1, rounds):  # the first one warms up
        took = {}
        for kind in order.sample(sorted(kinds), len(kinds)):
            calls = [kinds[kind]() for _ in range(_BLOCK)]
            before, cpu_before = time.perf_counter(), time.process_time()
            for call in calls:
                call()
            cpu_after, after = time.process_time(), time.perf_counter()
            took[kind] = (after - before) / _BLOCK * 1000
            took[f"{kind}, CPU"] = (cpu_after - cpu_before) / _BLOCK * 1000
            call = kinds[kind]()
            before = _trips(client)
            call()
            took[f"{kind}, trips"] = _trips(client) - before
        if number >= 0:
            print(json.dumps(took), flush=True)


def _trips(client: Any) -> int:
    """Return how many scripts the server was asked to run so far."""
    calls: int = client.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0)
    return calls


def _kinds(url: str) -> dict[str, Callable[[], Callable[[], object]]]:
    """Return what prepares one request of each kind, to be called within the measurement."""
    from django.core.handlers.wsgi import WSGIHandler
    from django.http import HttpRequest, JsonResponse
    from django.test import RequestFactory
    from django.urls import path
    from redis import Redis

    from celery_idempotent.django.http import idempotent_view

    def view(request: HttpRequest) -> JsonResponse:
        return JsonResponse({"paid": len(request.body)}, status=201)

    guarded = idempotent_view(scope=lambda _: "acct_1")(view)
    globals()["urlpatterns"] = [path("bare", view), path("guarded", guarded)]
    handler, factory, keys = WSGIHandler(), RequestFactory(), itertools.count()

    def request(where: str, key: str) -> Callable[[], object]:
        made = factory.post(
            where, _BODY, content_type="application/json", headers={"Idempotency-Key": key}
        )

        def call() -> object:
            response: Any = handler.get_response(made)
            assert response.status_code == 201, response.content
            return response

        return call

    trip = Redis.from_url(url).register_script("return 1")
    request("/guarded", "repeated")()
    return {
        BARE_VIEW: lambda: request("/bare", f"key-{next(keys)}"),
        "first request": lambda: request("/guarded", f"key-{next(keys)}"),
        "repetition": lambda: request("/guarded", "repeated"),
        BARE_TRIP: lambda: trip,
    }


if __name__ == "__main__":
    where, place, *numbers = sys.argv[1:]
    main(where, place, *map(int, numbers))
