"""What README and docs say is run, or compared with the code."""

from __future__ import annotations

import builtins
import logging
import re
import textwrap
from collections.abc import Callable
from datetime import timedelta
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import Mock

import pytest
from celery import Celery

import celery_idempotent
from celery_idempotent import ALL_ARGUMENTS, IdempotentTask, errors, signals
from celery_idempotent.http.answers import CONDITIONS
from celery_idempotent.http.guard import HttpOptions
from celery_idempotent.protocol.options import KEY_OPTIONS, SETTINGS, Policy, fields_by_option
from celery_idempotent.records import State
from celery_idempotent.stores import get_store
from docs import generated, timelines
from tests.support.pages import block, files
from tests.support.paths import ROOT
from tests.support.programs import python, run
from tests.support.servers import EmbeddedRedis
from tests.support.telling import documented

README = (ROOT / "README.md").read_text()
OPTIONS = (ROOT / "docs" / "options.md").read_text()
INTERNALS = (ROOT / "docs" / "internals.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text: str) -> list[str]:
    """Return the Python examples of a page."""
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def test_the_example_of_the_readme_runs_once_and_answers_twice(
    private_redis: EmbeddedRedis, start_worker: Callable[..., Any], tmp_path: Path
) -> None:
    definition, use = blocks(README)
    url = "redis://localhost:6379/0"
    assert definition.count(url) == 2
    definition = definition.replace(url, private_redis.url())
    body = "    return f"
    assert body in definition
    counted = definition.replace(body, '    open("runs", "a").write(order_id + "\\n")\n' + body)
    (tmp_path / "shop.py").write_text(counted)
    (tmp_path / "customer.py").write_text("from shop import charge\n\n" + use)

    worker = start_worker("shop", concurrency=2)
    python(tmp_path, "customer.py")
    assert (tmp_path / "runs").read_text().splitlines() == ["order-17"], worker.tail()


def test_the_contract_example_passes_as_a_test(tmp_path: Path) -> None:
    (example,) = (each for each in blocks(INTERNALS) if "StoreContract" in each)
    (tmp_path / "test_my_store.py").write_text(example)
    suite = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "claimed", ".")
    run(*suite, cwd=tmp_path, env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, timeout=120)


def test_the_example_of_the_recipe_keeps_tenants_apart() -> None:
    pages = blocks((ROOT / "docs" / "recipes.md").read_text())
    (example,) = (each for each in pages if "invoiced" in each)
    exec(compile(example, "recipes.md", "exec"), {"__name__": "recipes_page"})


def test_the_examples_of_the_http_page_work_together(tmp_path: Path) -> None:
    shop = files("http")
    del shop["shop/api.py"], shop["shop/ninja.py"]  # below
    assert {"shop/views.py", "shop/tasks.py", "shop/urls.py", "try.py"} == set(shop)
    # Who calls is for the project's middleware to say; this one believes a header.
    settings = (
        "from django.conf import settings\n"
        "settings.configure(SECRET_KEY='x', ROOT_URLCONF='shop.urls', ALLOWED_HOSTS=['*'],"
        " INSTALLED_APPS=['celery_idempotent.django'],"
        " IDEMPOTENCY_HTTP={'scope': lambda request: request.headers.get('X-User')})\n"
        "import django\ndjango.setup()\n"
    )
    code = settings + shop.pop("try.py") + REFUSED
    run_in_shop(tmp_path, code, {path.removeprefix("shop/"): text for path, text in shop.items()})


#: What the example of the page leaves out: requests that are refused, and a task that fails.
REFUSED = """
assert client.post("/pay/", {"amount": "100"}, headers={"X-User": "ann"}).status_code == 400
invalid = {"Idempotency-Key": '"order-16"', "X-User": "ann"}
assert client.post("/pay/", {"amount": "much"}, headers=invalid).status_code == 400
assert client.post("/pay/", {"amount": "10"}, headers=invalid).status_code == 201
assert status.json()["state"] == "COMPLETED"

key = {"Idempotency-Key": '"order-19"', "X-User": "ann"}
client.post("/pay-later/", {"amount": "0"}, headers=key)
failed = client.post("/pay-later/", {"amount": "0"}, headers=key)
assert (failed.status_code, failed.json()["retryable"]) == (402, False)
assert failed.json()["detail"] == "Nothing to pay."
"""
#: What the example for Django REST framework leaves to the reader, and who loses an order.
ORDERS = {
    "models.py": """
from django.conf import settings
from django.db import models

class Order(models.Model):
    amount = models.IntegerField(default=5)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE)
    refunded = models.IntegerField(default=0)

    def refund(self):
        self.refunded += 1
        self.save()
""",
    "urls.py": """
from django.urls import path
from shop import api

urlpatterns = [path("<int:pk>/", api.Refund.as_view())]
""",
}
LOSING = """
from celery import Celery
from django.conf import settings
settings.configure(
    SECRET_KEY="x", ROOT_URLCONF="shop.urls", ALLOWED_HOSTS=["*"], USE_TZ=True,
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "rest_framework", "shop"],
)
import django
django.setup()
app = Celery("shop", broker="memory://")
app.conf.idempotency_store = "memory://"
app.set_default()
from django.contrib.auth.models import User
from django.core.management import call_command
from rest_framework.test import APIClient
from shop.models import Order
call_command("migrate", run_syncdb=True, verbosity=0)
ann, bob = (User.objects.create(username=name) for name in ("ann", "bob"))
order = Order.objects.create(owner=ann)
client = APIClient(HTTP_IDEMPOTENCY_KEY="k")
client.force_authenticate(ann)
first, again = (client.post(f"/{order.pk}/") for _ in range(2))
assert (first.status_code, again.status_code) == (201, 201), (first, again)
assert again["Idempotent-Replayed"] == "true"
order.refresh_from_db()
assert order.refunded == 1
Order.objects.update(owner=bob)
lost = client.post(f"/{order.pk}/")
assert (lost.status_code, "refunded" in lost.content.decode()) == (403, False), lost.content
order.delete()
assert client.post(f"/{order.pk}/").status_code == 404
"""


#: What the example for Django Ninja leaves to the reader, and a client that sends everything twice.
TOKENS = {
    "tokens.py": "owner_of = {'ann-1': 'ann', 'bob-1': 'bob'}.get",
    "urls.py": """
from django.urls import path
from shop.ninja import api

urlpatterns = [path("", api.urls)]
""",
}
PAYING_TWICE = """
from django.conf import settings
settings.configure(
    SECRET_KEY="x", ROOT_URLCONF="shop.urls", ALLOWED_HOSTS=["*"],
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "celery_idempotent.django"],
)
import django
django.setup()
from django.test import Client
import shop.ninja

def post(path, token, amount, key):
    headers = {"HTTP_IDEMPOTENCY_KEY": key, "HTTP_AUTHORIZATION": f"Bearer {token}"}
    answer = Client().post(path, {"amount": amount}, content_type="application/json", **headers)
    return answer.status_code, answer.get("Idempotent-Replayed", ""), answer.json()

assert post("/payments", "ann-1", "much", "k")[0] == 422
assert post("/payments", "ann-1", 5, "k") == (201, "", {"amount": 5})
assert post("/payments", "ann-1", 5, "k") == (201, "true", {"amount": 5})
assert post("/payments", "none", 5, "k")[0] == 403
assert post("/payments", "bob-1", 5, "k") == (201, "", {"amount": 5})
assert shop.ninja.paid == [5, 5]
assert post("/payments-later", "ann-1", "much", "l")[0] == 422
assert post("/payments-later", "none", 7, "l")[0] == 401
status, _, begun = post("/payments-later", "ann-1", 7, "l")
assert (status, begun["state"]) == (202, "QUEUED")
status, replayed, ended = post("/payments-later", "ann-1", 7, "l")
assert (status, replayed, ended["result"]) == (200, "true", {"charged": 7})
"""


def run_in_shop(directory: Path, code: str, files: dict[str, str]) -> None:
    """Run code beside the files of an example."""
    (directory / "shop").mkdir()
    for name, text in {"__init__.py": "", **files}.items():
        (directory / "shop" / name).write_text(text)
    ninjas = "ignore:Returning tuple:DeprecationWarning"  # its own documentation does so
    python(directory, "-W", ninjas, "-c", code)


def test_in_the_example_for_the_rest_framework_who_lost_an_order_does_not_get_its_answer(
    tmp_path: Path,
) -> None:
    run_in_shop(tmp_path, LOSING, {"api.py": block("http", "shop/api.py"), **ORDERS})


def test_in_the_example_for_ninja_each_key_takes_effect_once(tmp_path: Path) -> None:
    if find_spec("ninja") is None:
        pytest.skip("Django Ninja is not installed")
    shop = {f"{name}.py": block("http", f"shop/{name}.py") for name in ("ninja", "tasks")}
    run_in_shop(tmp_path, PAYING_TWICE, {**shop, **TOKENS})


def test_the_http_page_lists_every_option_and_every_problem() -> None:
    page = (ROOT / "docs" / "http.md").read_text()
    table = page[page.index("## Options") : page.index("## What it costs")]
    listed = re.findall(r"^- `(\w+)` \(", table, re.MULTILINE)
    assert set(listed) == {*fields_by_option(HttpOptions)}
    for code in CONDITIONS:
        assert f"`{code}`" in page


NAMES = sorted({*fields_by_option(Policy), *KEY_OPTIONS, *SETTINGS})


def test_the_page_of_options_lists_every_option_and_nothing_else() -> None:
    sections = set(re.findall(r"^### `idempotency_(\w+)`", OPTIONS, flags=re.MULTILINE))
    listed = {name.removeprefix("idempotency_") for name, _ in generated.options()}
    assert listed == sections == {*NAMES}


SECTION = OPTIONS.partition("\n## Keys\n")[0]


def paragraph(option: str) -> str:
    return SECTION.partition(f"### `idempotency_{option}`\n")[2].partition("\n##")[0]


@pytest.mark.parametrize("option", NAMES)
def test_a_paragraph_says_where_the_option_goes_and_what_it_is_without(option: str):
    first = paragraph(option).strip().partition("*")[2].partition(".*")[0]
    kind = "Setting" if option in SETTINGS else "Attribute"
    assert first.startswith(f"{kind}, `CELERY_IDEMPOTENCY_{option.upper()}`")
    assert "Default" in first
    if "second" in first or option in {"lease", "wait"}:
        assert re.search(r"Seconds or `timedelta`", first)


EXAMPLES = re.findall(r"`idempotency_(\w+)=([^`]+)`", SECTION)


@pytest.mark.parametrize(("option", "value"), EXAMPLES, ids=[" = ".join(e) for e in EXAMPLES])
def test_every_value_of_the_page_is_taken(option: str, value: str):
    given = eval(value, {"ALL_ARGUMENTS": ALL_ARGUMENTS, "timedelta": timedelta})
    app = Celery("options", broker="memory://", backend="redis://", set_as_current=False)
    app.conf.update(idempotency_store="redis://127.0.0.1:1/0")
    attributes: dict[str, Any] = {}
    if option in SETTINGS:
        app.conf.update({f"idempotency_{option}": given})
    else:
        attributes[f"idempotency_{option}"] = given

    @app.task(name="charge", base=IdempotentTask, shared=False, **attributes)
    def charge(order_id: str, kind: str, event: Any, tenant: str, amount: int) -> None: ...

    task: Any = app.tasks["charge"]
    assert task.idempotency_policy
    get_store(app).close()
    app.close()


def test_the_page_of_options_tells_the_defaults_that_the_code_has() -> None:
    policy = Policy()
    told = {name.removeprefix("idempotency_"): default for name, default in generated.options()}
    assert told["lease"] == f"{policy.lease_ms // 1000} s"
    assert told["retention"] == f"{policy.retention_ms // 3_600_000} h"
    assert told["max_crashes"] == str(policy.max_crashes)
    assert told["on_conflict"] == f'`"{policy.on_conflict}"`'
    assert told["max_result_bytes"] == f"{policy.max_result_bytes // 2**20} MiB"
    assert told["store_result"] == f"`{policy.store_result}`"
    assert told["permanent_errors"] == f"`{policy.permanent_errors}`"


ERRORS = {name for name, each in vars(errors).items() if isinstance(each, type)}


def test_the_page_of_options_names_every_error_and_every_signal() -> None:
    for name in ERRORS - {"IdempotencyError"}:
        assert f"`{name}`" in OPTIONS
    for name in signals.OUTCOMES:
        assert f"`{name}`" in OPTIONS


def test_the_page_of_versions_has_all_that_the_package_asks_for() -> None:
    wanted = metadata.requires("celery-idempotent") or []
    names = {re.match(r"[\w-]+", each)[0] for each in wanted} - {"celery-idempotent"}  # type: ignore[index]
    listed = {name.strip("`") for name, _ in generated.supported()}
    assert listed == names | {"Python"}


def test_every_public_name_is_on_the_page_that_is_generated() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    shown = {*re.findall(r"\.\. (?:auto)?\w+:: (\w+)", page), *ERRORS}
    assert {*celery_idempotent.__all__} <= shown


def test_the_glossary_knows_every_state() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    for state in State:
        assert f"`{state.value}`" in glossary


def anchors(page: Path) -> set[str]:
    """Return what the headings of a page are linked by."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere_and_every_test_that_is_named_exists(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        if "://" not in target:
            where = page.parent / target if target else page
            assert where.exists(), target
            assert not anchor or anchor in anchors(where), f"{target}#{anchor}"
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", page.read_text()):
        assert re.search(rf"^ *def {name}\(", (ROOT / path).read_text(), re.MULTILINE), name


def test_the_changelog_has_an_entry_for_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in changelog or f"## [{celery_idempotent.__version__}]" in changelog


#: A comment that says which test runs the examples below it, or why the next one is not run; an example.
MARKED = re.compile(
    r"^ *<!-- (run by|not run:) ([^\n]+) -->$|^ *```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL
)


def marked(page: Path) -> list[tuple[str, str, str]]:
    """Return the mark of each example of a page and its code; ``run by`` holds until the next mark."""
    found, how, what = [], "", ""
    for each in MARKED.finditer(page.read_text()):
        if each[1]:
            how, what = each[1], each[2]
            continue
        found.append((how, what, each[3]))
        how = how if how == "run by" else ""
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_example_is_run_or_says_why_not(page: Path) -> None:
    for how, what, code in marked(page):
        path, _, name = what.partition("::")
        assert how, f"no mark above {code}"
        if how == "run by":
            test = (ROOT / path).read_text()
            assert re.search(rf"^ *(def|class) {name}\b", test, re.MULTILINE), what


HERE = "tests/docs/test_docs.py::test_an_example_is_taken"
TAKEN = [
    pytest.param(code, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, (_, what, code) in enumerate(marked(page))
    if what == HERE
]


class Shop(dict[str, Any]):
    """The names that an example leaves to the reader."""

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        return Mock(name=name)


@pytest.mark.parametrize("code", TAKEN)
def test_an_example_is_taken(code: str) -> None:
    """Its tasks are defined, with options that are checked when they are bound to an app that has a store."""
    app = Celery("taken", broker="memory://", set_as_current=False)
    given = {"app": app, "IdempotentTask": IdempotentTask, "celery_idempotent": celery_idempotent}
    app.conf.idempotency_store = "memory://"
    with mock.patch("celery.app.base.connect_on_app_finalize"):
        exec(textwrap.dedent(code), {}, Shop(given))
    app.conf.idempotency_store = "memory://"
    app.finalize()
    for task in app.tasks.values():
        if isinstance(task, IdempotentTask):
            assert task.idempotency_policy.lease_ms
    app.close()


@pytest.mark.parametrize(
    ("title", "count"),
    [("Callbacks are sent", 8), ("Store by failure: what happens", 9)],
)
def test_every_cell_of_a_table_of_guarantees_has_its_test(title: str, count: int) -> None:
    text = (ROOT / "docs" / "guarantees.md").read_text()
    section = text.split(f"## {title}")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    cells = [cell.strip() for row in rows for cell in row.strip("|").split("|")[1:]]
    named = re.findall(r"^- ((?:\([a-z]\) ?)+):.*(?:\n  .*)*?`tests/", section, re.MULTILINE)
    shown = set(re.findall(r"[a-z]", "".join(named)))
    assert len(rows) == count
    for cell in cells:
        proof = re.search(r"\(([a-z])\)$", cell)
        assert cell == "–" or (proof and proof[1] in shown), cell


def test_the_page_of_options_has_every_outcome_with_its_counter_and_the_usual_level_of_its_line() -> (
    None
):
    table = documented()
    assert list(table) == list(signals.OUTCOMES)
    for name, outcome in signals.OUTCOMES.items():
        assert outcome is getattr(signals, name)
        assert table[name].levels[0] == logging.getLevelName(outcome.line.level), name


@pytest.mark.parametrize("page", generated.pages(), ids=lambda page: page.name)
def test_a_page_has_what_the_code_says(page: Path) -> None:
    text = page.read_text()
    assert generated.fill(text) == text, "`make format` writes it anew"


def test_every_generated_part_has_its_page() -> None:
    text = "".join(page.read_text() for page in generated.pages())
    for name in generated.GENERATED:
        assert text.count(f"<!-- generated: {name} -->") == 1


def test_the_picture_of_timelines_is_drawn_from_its_text() -> None:
    assert timelines.PICTURE.read_text() == timelines.draw(), "`make format` draws it anew"
