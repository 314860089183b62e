"""Options: what a task's attributes and its app's settings become, and what is refused."""

from __future__ import annotations

import reprlib
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import ALL_ARGUMENTS, IdempotentTask
from celery_idempotent.celery.delivery import identify_delivery
from celery_idempotent.errors import InvalidOption
from celery_idempotent.protocol.options import Policy
from celery_idempotent.settings import is_explicit, own_settings

DAY = 86_400_000


def make_app(**settings: Any) -> Celery:
    app = Celery("policies", broker="memory://", set_as_current=False)
    app.conf.update({"idempotency_store": "memory://", **settings})
    return app


def define(app: Celery | None = None, **options: Any) -> IdempotentTask:
    """Define a task, as a module would, and use it for the first time."""
    app = app or make_app()

    def charge(order_id: str = "", amount: int = 0) -> None: ...

    task = app.task(name="shop.charge", base=IdempotentTask, shared=False, **options)(charge)
    assert task.idempotency_policy is not None
    return task  # type: ignore[no-any-return]


def policy(app: Celery | None = None, **options: Any) -> Policy:
    return define(app, **options).idempotency_policy


class TestDefaults:
    def test_without_retention_a_mark_is_kept_for_one_lease(self):
        found = policy(idempotency_retention=0, idempotency_lease=7)
        assert (found.settled_keep_ms, found.keep_ms) == (7000, 7000)

    @pytest.mark.parametrize(
        ("options", "each_runs"),
        [({}, False), ({"retention": 0}, True), ({"publish_once": "until_start"}, True)],
    )
    def test_an_end_answers_other_calls_unless_each_call_runs(self, options, each_runs):
        given = {f"idempotency_{name}": value for name, value in options.items()}
        assert policy(**given).each_runs is each_runs

    @pytest.mark.parametrize(("retention", "kept"), [(10, 30_000), (90, 90_000)])
    def test_an_unfinished_record_is_kept_for_the_retention_or_its_lease(self, retention, kept):
        assert policy(idempotency_retention=retention, idempotency_lease=30).keep_ms == kept


def of_order_id_alone(order_id: str) -> str:
    return order_id


def of_a_misspelt_name(oid: str, **_: object) -> str:
    return oid


GOOD = [
    ("lease", 0.1, "lease_ms", 100),
    ("lease", 1.0001, "lease_ms", 1001),
    ("lease", timedelta(minutes=2), "lease_ms", 120_000),
    ("retention", 0, "retention_ms", 0),
    ("retention", timedelta(days=7), "retention_ms", 7 * DAY),
    ("on_conflict", "raise", "on_conflict", "raise"),
    ("permanent_errors", [ValueError, KeyError], "permanent_errors", (ValueError, KeyError)),
    ("permanent_errors", ValueError, "permanent_errors", (ValueError,)),
    ("max_crashes", 0, "max_crashes", 0),
    ("store_result", False, "store_result", False),
    ("serializer", None, "serializer", None),
    ("publish_once", "until_start", "publish_once", "until_start"),
]

REST = "Correct it, or leave it out"
TIME, WITHIN, COUNT = (
    "seconds or a timedelta",
    "between 0 and ten years",
    "0 or a positive whole number",
)
TYPES, FLAG, KOMBU = "exception types", "True or False", "name of kombu's registry"
CONFLICT, STORED = "'retry', 'wait', 'ignore', 'raise'", "'closed', 'open'"
ARGUMENTS = "The arguments of the task are: order_id, amount"
RULE = "a tuple of names, a function of the arguments, ALL_ARGUMENTS or None"

#: An option, a value that is a mistake, what is allowed, and what to do.
MISTAKES: list[tuple[str, Any, str, str]] = [
    ("lease", 0.09, "at least 0.1 seconds", REST),
    ("lease", -1, WITHIN, REST),
    ("lease", float("nan"), WITHIN, REST),
    ("lease", "60", TIME, REST),
    ("lease", True, TIME, REST),
    ("retention", -0.001, WITHIN, REST),
    ("retention", None, TIME, REST),
    ("on_conflict", "wat", CONFLICT, REST),
    ("permanent_errors", ("ValueError",), TYPES, REST),
    ("permanent_errors", BaseException, TYPES, REST),
    ("permanent_errors", None, TYPES, REST),
    ("max_crashes", -1, COUNT, REST),
    ("store_result", 0, FLAG, REST),
    ("max_result_bytes", None, COUNT, REST),
    ("serializer", 1, KOMBU, REST),
    ("serializer", "nonsense", "is not installed", "Install its package, or choose another"),
    ("serializer", "pickle", "accepts json", "add it to result_accept_content"),
    ("wait", "2", TIME, REST),
    ("publish_once", "yes", "one of False, True, 'until_start'", REST),
    ("on_duplicate", "replace", "idempotency_publish_once='until_start'", "Set both"),
    ("on_duplicate", "drop", "'return', 'raise', 'replace'", REST),
    ("keep_message", 1, FLAG, REST),
    ("on_stale", "retry", "'interrupt', 'fail', 'requeue'", REST),
    ("on_store_error", "fail", STORED, REST),
    ("mode", "watch", "'enforce', 'observe', 'off'", REST),
    ("atomic", 1, FLAG, REST),
    ("namespace", "", "1 to 255 printable characters", "the name of the task"),
    ("namespace", "x" * 256, "1 to 255 printable characters", "the name of the task"),
    ("scope", ALL_ARGUMENTS, "a function of them, or None", REST),
    *(
        (option, value, allowed, remedy)
        for option in ("key", "scope", "fingerprint")
        for value, allowed, remedy in (
            ("orderid", "no argument 'orderid'", ARGUMENTS),
            (("order_id", "kind"), "no argument 'kind'", ARGUMENTS),
            ("order_id..x", "no argument 'order_id..x'", ARGUMENTS),
            ((), RULE, REST),
            ((1,), RULE, REST),
            (SimpleNamespace(), RULE, REST),
            (of_order_id_alone, "of the task by keyword (order_id, amount)", "Add **_"),
            (of_a_misspelt_name, "of the task by keyword (order_id, amount)", "Add **_"),
        )
    ),
]


def set_by(where: str, name: str, value: Any) -> IdempotentTask:
    """Define a task with an option as its attribute, or as a setting of its app."""
    if where == "attribute":
        return define(**{name: value})
    return define(make_app(**{name: value}))


class TestValues:
    @pytest.mark.parametrize(("option", "value", "field", "expected"), GOOD)
    @pytest.mark.parametrize("where", ["attribute", "setting"])
    def test_good_ones(self, option, value, field, expected, where):
        name = f"idempotency_{option}"
        found = set_by(where, name, value).idempotency_policy
        assert getattr(found, field) == expected
        assert type(getattr(found, field)) is type(expected)

    @pytest.mark.parametrize(("option", "value", "allowed", "remedy"), MISTAKES)
    @pytest.mark.parametrize("where", ["attribute", "setting"])
    def test_a_mistake_fails_at_definition_with_task_value_what_is_allowed_and_a_remedy(
        self, option, value, allowed, remedy, where
    ):
        name = f"idempotency_{option}"
        with pytest.raises(InvalidOption) as caught:
            set_by(where, name, value)
        said, parts = str(caught.value), (name, "task shop.charge", reprlib.repr(value))
        places = [said.find(part) for part in (*parts, allowed, remedy)]
        assert -1 not in places, said
        assert places == sorted(places), said

    def test_an_atomic_task_cannot_run_without_its_store(self):
        said = r"atomic of task shop\.charge is True, and needs .*='closed'.* Leave out"
        with pytest.raises(InvalidOption, match=said):
            define(idempotency_atomic=True, idempotency_on_store_error="open")


class TestNames:
    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            ("leese", r"did you mean idempotency_lease\?"),
            ("xyzzy", r"known are .*idempotency_lease.*"),
        ],
    )
    @pytest.mark.parametrize("where", ["attribute", "setting", "namespaced"])
    def test_an_unknown_one_fails_with_the_one_that_was_meant_or_all(self, wrong, said, where):
        name = f"idempotency_{wrong}"
        app = make_app(**{name: 1} if where == "setting" else {})
        if where == "namespaced":
            app.config_from_object(SimpleNamespace(**{f"X_{name.upper()}": 1}), namespace="X")
        place = "task shop.charge" if where == "attribute" else "the app"
        with pytest.raises(InvalidOption, match=f"{name} of {place} is not an option: {said}"):
            define(app, **{name: 1} if where == "attribute" else {})

    def test_a_setting_of_the_app_is_no_attribute_of_a_task(self):
        with pytest.raises(InvalidOption, match=r"idempotency_store of task .* is not an option"):
            define(idempotency_store="memory://")


class TestPrecedence:
    def test_a_task_wins_over_its_base_class_and_that_over_a_setting(self):
        class Base(IdempotentTask):
            abstract = True
            idempotency_lease = 40

        app = make_app(idempotency_lease=10)
        for options, lease_ms in (({}, 40_000), ({"idempotency_lease": 50}, 50_000)):

            @app.task(name=f"t{lease_ms}", base=Base, shared=False, **options)
            def task() -> None: ...

            assert task.idempotency_policy.lease_ms == lease_ms


@pytest.mark.parametrize("static", [True, False])
def test_a_function_as_an_option_is_not_bound_to_a_class_based_task(static):
    def key_of(order_id: str) -> str:
        return f"<{order_id}>"

    class Charge(IdempotentTask):
        name = "shop.charge"
        idempotency_key = staticmethod(key_of) if static else key_of

        def run(self, order_id: str) -> None: ...

    task = make_app().register_task(Charge())
    identified = identify_delivery(task._definition, {}, ["o"], {}, task_id="id")
    assert identified.identity.key == "<o>"


class TestWhatTheUserSet:
    """Reading Celery's settings in every form that Celery takes."""

    @pytest.mark.parametrize("old", [False, True])
    def test_a_config_object(self, old):
        app = Celery("d", set_as_current=False)
        name = "CELERY_ACKS_LATE" if old else "task_acks_late"
        app.config_from_object(SimpleNamespace(**{name: False}))
        assert is_explicit(app, "task_acks_late")
        assert not is_explicit(app, "task_reject_on_worker_lost")

    def test_a_setting_made_after_the_config_object(self):
        app = Celery("g", set_as_current=False)
        settings = {"CELERY_IDEMPOTENCY_LEASE": 3, "IDEMPOTENCY_UNRELATED": 1}
        app.config_from_object(SimpleNamespace(**settings), namespace="CELERY")
        app.conf.update(idempotency_retention=4, idempotency_store="memory://")
        assert sorted(own_settings(app)) == ["lease", "retention", "store"]
        found = policy(app)
        assert (found.lease_ms, found.retention_ms) == (3000, 4000)


@pytest.mark.parametrize(
    ("settings", "attributes", "late", "comes_back"),
    [
        ({}, {}, True, True),
        ({}, {"acks_late": False, "reject_on_worker_lost": False}, False, False),
        ({"task_acks_late": False, "task_reject_on_worker_lost": False}, {}, False, False),
        ({"CELERY_TASK_ACKS_LATE": False}, {}, False, True),  # also Celery's default
        ({"task_annotations": {"*": {"acks_late": False}}}, {}, False, True),
    ],
)
def test_acks_are_late_and_lost_messages_come_back(settings, attributes, late, comes_back):
    app = Celery("acks", broker="memory://", set_as_current=False)
    namespace = "CELERY" if any(name.isupper() for name in settings) else None
    app.config_from_object(SimpleNamespace(**settings), namespace=namespace)
    app.conf.idempotency_store = "memory://"
    task = define(app, **attributes)
    assert (task.acks_late, task.reject_on_worker_lost) == (late, comes_back)
