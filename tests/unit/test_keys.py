"""Keys: one operation always has one identity, and two operations never share it."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import decimal
import enum
import inspect
import json
import math
import time
import uuid
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery
from hypothesis import assume, example, given
from hypothesis import strategies as st
from kombu import serialization

from celery_idempotent.celery.task import IdempotentTask
from celery_idempotent.errors import InvalidKey, KeyMissing
from celery_idempotent.keys import fingerprints
from celery_idempotent.keys.arguments import ALL_ARGUMENTS, Parameters
from celery_idempotent.keys.rules import Identifier, canonical, task_id_key
from celery_idempotent.keys.stamp import STAMP_HEADER, Identified, read_stamp
from celery_idempotent.records import Identity
from celery_idempotent.testing.delivery import message_of
from tests.support.pydantic_tasks import make_pydantic_task

SECRET = "4111-1111-1111-1111"
TASK = "shop.charge"
AN_ID = uuid.UUID("c0ffee00-1234-4678-9abc-def012345678")

# A parameter may be called anything that Python allows.
ignored = st.characters(codec="utf-8", exclude_categories=["C", "Z"])
printable = st.text(ignored | st.sampled_from(' "\\[]*@,-0123456789'), max_size=40)
part = printable | st.integers() | st.uuids()
raw_key = st.recursive(part, lambda inner: st.lists(inner, min_size=1, max_size=4), max_leaves=6)
in_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.datetimes(timezones=st.none() | st.timezones(), allow_imaginary=False)
    | st.dates()
    | st.times()
    | st.decimals(allow_nan=False)
    | st.uuids(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(
            st.text() | st.integers() | st.floats() | st.booleans() | st.none(), inner
        )
    ),
    max_leaves=8,
)


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Kind(str, enum.Enum):
    CARD = "card"


class Level(enum.IntEnum):
    HIGH = 3


class Shout(str):
    """A str that says something else when asked, as translations and safe strings might."""

    def __str__(self) -> str:
        return self.upper()


Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Money:
    amount: int
    currency: str = "EUR"


class Reducible:
    def __init__(self, value: object) -> None:
        self.value = value

    def __json__(self) -> object:
        return {"value": self.value}


class Opaque:
    """Has no canonical form, and a repr that must not show up anywhere."""

    def __repr__(self) -> str:
        return SECRET


def charge(order_id, amount, currency="EUR", *, note=None):
    """The task of most tests."""


def handle(event): ...


def through(serializer: str, value: Any) -> Any:
    """Send a value through the broker."""
    content_type, encoding, body = serialization.dumps(value, serializer=serializer)
    return serialization.loads(body, content_type, encoding, accept=[content_type])


def identifier(function: Callable[..., Any] = charge, **options: Any) -> Identifier:
    return Identifier(TASK, inspect.signature(function), **options)


def identify(
    function: Callable[..., Any], /, args: Any = (), kwargs: Any = None, **options: Any
) -> Identified:
    given_with_the_call = {
        name: options.pop(f"call_{name}") for name in ("key", "scope") if f"call_{name}" in options
    }
    return identifier(function, **options).identify(
        args, kwargs, task_id="id-1", **given_with_the_call
    )


def key_of(function: Callable[..., Any], /, args: Any = (), kwargs: Any = None, **options: Any):
    return identify(function, args, kwargs, **options).identity.key


def fingerprint(*args: Any, task__: Callable[..., Any] = charge, **kwargs: Any) -> bytes:
    answer = identify(task__, args, kwargs, call_key="k").fingerprint
    assert isinstance(answer, bytes)
    return answer


def form(value: Any) -> bytes:
    """The fingerprint of a call with one argument."""
    return fingerprint(value, task__=handle)


def looped() -> list[Any]:
    loop: list[Any] = ["a"]
    loop.append(loop)
    return loop


def text_or_none(raw: Any) -> str | None:
    try:
        return canonical(raw, task=TASK)
    except InvalidKey:  # over-long
        return None


# -- canonical keys --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("order-17", "order-17"),
        ("Größe 🚀", "Größe 🚀"),
        (17, "17"),
        (-1, "-1"),
        ("17", '"17"'),
        ("-0", '"-0"'),
        ("17\N{FULLWIDTH DIGIT ONE}", "17\N{FULLWIDTH DIGIT ONE}"),
        ('"17"', '"\\"17\\""'),
        ("*0123", '"*0123"'),
        ("@id", '"@id"'),
        (AN_ID, str(AN_ID)),
        (("a", 17, AN_ID, ("ü",)), f'["a",17,"{AN_ID}",["ü"]]'),
        (("order", ""), '["order",""]'),
        (Kind.CARD, "card"),
        (Shout("quiet"), "quiet"),
        (Point(1, "2"), '[1,"2"]'),
        ("x" * 255, "x" * 255),
    ],
)
def test_a_key_has_one_text(raw: object, text: str):
    assert canonical(raw, task=TASK) == text


@given(raw_key, raw_key)
def test_keys_that_differ_never_share_their_text(one: Any, other: Any):
    assume(one not in ("", []) and other not in ("", []))
    same = json.dumps(one, default=str) == json.dumps(other, default=str)
    texts = text_or_none(one), text_or_none(other)
    assume(None not in texts)
    assert (texts[0] == texts[1]) is same


@given(raw_key.filter(lambda raw: raw not in ("", [])))
@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_a_key_is_the_same_on_both_sides_of_the_broker(serializer: str, raw: Any):
    assert text_or_none(through(serializer, raw)) == text_or_none(raw)


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (True, "not bool"),
        (None, "not NoneType"),
        (1.5, "not float"),
        ({"a": 1}, "not dict"),
        (Colour.RED, "not .*Colour"),
        (Opaque(), "not .*Opaque"),
        (("a", None), "not NoneType"),
        ("", "is empty"),
        ([], "is empty"),
        ("a\nb", "are not printable"),
        ("\ud800", "are not printable"),
        ("\N{ZERO WIDTH SPACE}", "are not printable"),
        (("a", "b\t"), "are not printable"),
        ("x" * 256, "256 characters, and 255"),
        (("x" * 252,), "256 characters as JSON, and 255"),
        (10**255, "256 characters, and 255"),
        pytest.param(10**5000, "Exceeds the limit .* digits", id="endless"),
        (looped(), "contains itself"),
    ],
)
def test_what_cannot_be_a_key_is_refused_with_the_task_named(raw: object, problem: str):
    with pytest.raises(InvalidKey, match=rf"key of task {TASK} .*{problem}") as caught:
        canonical(raw, task=TASK)
    assert len(str(caught.value)) < 200
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("task_id", "nesting", "text"),
    [
        ("c0ffee", 0, "@c0ffee"),
        ("c0ffee", 2, "@c0ffee+2"),
        ("c0ffee+2", 0, "@c0ffee+2+0"),
        ("c0ffee+", 0, "@c0ffee+"),
    ],
)
def test_a_task_id_key_shows_the_id_and_its_nesting(task_id: str, nesting: int, text: str):
    assert task_id_key(task_id, nesting) == text


@given(st.tuples(printable, st.integers(0, 9)), st.tuples(printable, st.integers(0, 9)))
@example(("a", 1), ("a+1", 0))
@example(("x" * 300, 0), ("x" * 300, 1))
@example(("a\nb", 0), ("\ud800", 0))
@example(("a+1", 0), ("a+1+0", 0))
def test_task_ids_never_share_a_key(one: tuple[str, int], other: tuple[str, int]):
    assert (task_id_key(*one) == task_id_key(*other)) is (one == other)
    assert len(task_id_key(*one)) <= 66


# -- binding ---------------------------------------------------------------------------------------


def only(a, /, b=2, *, c=3, **more): ...


def many(a, *rest, b, c=3): ...


@pytest.mark.parametrize("function", [charge, only, many], ids=lambda each: each.__name__)
@given(st.lists(st.just(1), max_size=4), st.sets(st.sampled_from(["a", "b", "c", "note", "z"])))
def test_arguments_are_bound_as_in_a_call(function: Any, args: list[int], names: set[str]):
    signature, kwargs = inspect.signature(function), dict.fromkeys(names, 2)
    try:
        expected = signature.bind(*args, **kwargs).arguments
    except TypeError:
        expected = None  # type: ignore[assignment]
    assert Parameters(signature).bind(args, kwargs) == expected


# -- rules -----------------------------------------------------------------------------------------


class Event:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def collect(*refs: Any, **kwargs: Any) -> None: ...


def spell(**given: Any) -> str:
    return str(given)


E1 = {"id": "e-1", "data": {}}
#: A task with its arguments, a rule, and the key that this makes: names in the order of the option, paths through
#: mappings and attributes, extra arguments (which a function gets by keyword), and whatever a function may answer.
MADE = [
    (charge, ("o-1", 5), {}, ("currency", "order_id"), '["EUR","o-1"]'),
    (charge, ("o-1", 5), {}, ["order_id"], '["o-1"]'),
    (charge, ("o-1", 5), {}, lambda **_: "k", "k"),
    (charge, ("o-1", 5), {}, lambda **_: 5, "5"),
    (charge, ("o-1", 5), {}, lambda **_: ("k", 1), '["k",1]'),
    (charge, ("o-1", 5), {}, lambda **_: None, "@id-1"),
    (handle, (E1,), {}, "event.id", "e-1"),
    (handle, (Event(id="e-1"),), {}, "event.id", "e-1"),
    (handle, (OrderedDict(id="e-1"),), {}, "event.id", "e-1"),
    (handle, ({"a": Event(b=E1)},), {}, "event.a.b.id", "e-1"),
    (collect, (), {"b": 2}, spell, "{'refs': (), 'b': 2}"),
    (collect, ("a", 1), {}, "refs", '["a",1]'),
    (collect, (), {"order_id": 7}, "order_id", "7"),
    (collect, (), {"event": {"id": 7}}, "event.id", "7"),
    (collect, (), {"event": {"id": 7}}, "kwargs.event.id", "7"),
]


@pytest.mark.parametrize(("task", "args", "kwargs", "rule", "key"), MADE)
def test_a_rule_makes_a_key(task: Any, args: Any, kwargs: Any, rule: Any, key: str):
    assert key_of(task, args, kwargs, key=rule, fingerprint=None) == key


NOWHERE: list[Any] = [None, {}, {"id": None}, {"Id": 1}, [], "text", Event()]
#: A task with its arguments, a rule, and which names of it lead nowhere.
MISSED: list[Any] = [
    *((handle, (event,), "event.id", "event.id") for event in NOWHERE),
    (handle, ({},), "event.items", "event.items"),  # not the method of a dict
    (collect, (), "order_id", "order_id"),
    (charge, ("o-1", 5), "note", "note"),
    (charge, (None, 5), "order_id", "order_id"),
    (charge, ("o-1", {"id": None}), "amount.id", "amount.id"),
    (charge, ("o-1", {}), ("order_id", "note", "amount.id"), "note, amount.id"),
]


@pytest.mark.parametrize(("task", "args", "rule", "missing"), MISSED)
def test_a_rule_that_finds_nothing_is_refused(task: Any, args: Any, rule: Any, missing: str):
    with pytest.raises(KeyMissing, match=f"key of task {TASK} is read from {missing}, which"):
        identify(task, args, key=rule)
    assert key_of(task, args, key=rule, call_key="k", fingerprint=None) == "k"


@pytest.mark.parametrize("option", ["key", "scope", "fingerprint"])
def test_a_function_that_fails_is_named_with_its_task_and_no_value(option: str):
    options: dict[str, Any] = {"key": "order_id", option: lambda **given: given[SECRET]}
    said = f"idempotency_{option} of task {TASK}.* KeyError"
    with pytest.raises(InvalidKey, match=said) as caught:
        identify(charge, ("o-1", 5), **options)
    assert SECRET not in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)  # where it failed
    refused = KeyMissing("no order")
    with pytest.raises(KeyMissing) as caught:
        identify(charge, ("o-1", 5), **{**options, option: Mock(side_effect=refused)})
    assert caught.value is refused


# -- fingerprints ----------------------------------------------------------------------------------


@given(in_json, in_json)
def test_position_keyword_and_default_agree_for_all_values(value: Any, default: Any):
    def task(a, b=default, *, c=default): ...

    expected = fingerprint(value, task__=task)
    given_default = copy.deepcopy(default)
    assert fingerprint(a=value, task__=task) == expected
    assert fingerprint(value, given_default, task__=task) == expected
    assert fingerprint(c=given_default, b=given_default, a=value, task__=task) == expected


def test_a_deploy_may_add_a_parameter_with_a_default():
    def before(a, b): ...

    def after(a, b, *args, c=None, d=(), **kwargs): ...

    assert fingerprint(1, 2, task__=before) == fingerprint(1, b=2, task__=after)


def test_other_arguments_have_another_fingerprint():
    different = [
        fingerprint("o-1", 5),
        fingerprint("o-1", 6),
        fingerprint("o-2", 5),
        fingerprint(5, "o-1"),
        fingerprint("o-1", 5, "USD"),
        fingerprint("o-1", 5, note="EUR"),
        fingerprint("o-1", None),
    ]
    assert len(set(different)) == len(different)


_DISTINCT: list[Any] = [
    *(0, 1, -1, 1.0, -0.0, 0.0, math.inf, -math.inf, math.nan, True, False, None),
    *("", "1", "1.0", "True", "None", "null", "0x1", "nan", b"1", b"\xff", "\xff"),
    *([], {}, [[]], [1], ["1"], [1, 2], [2, 1], [[1], 2], [1, [2]], {"a": 1}, {"a": "1"}),
    *({"a": 1, "b": 2}, {"a": 2, "b": 1}, {"a": {"b": 2}}, {"1": 1}, {"1.0": 1}, {"None": 1}),
    *({None: 1}, {(1,): 1}, {"[0x1]": 1}, {b"1": 1}),
    *(decimal.Decimal(1), decimal.Decimal("1.0"), AN_ID, str(AN_ID)),
    *(datetime.date(2020, 1, 1), datetime.datetime(2020, 1, 1), "2020-01-01"),  # noqa: DTZ001
    datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc),
    *(datetime.time(1), datetime.timedelta(1), datetime.timedelta(0, 1), [1, 0, 0]),
    *(Colour.RED, Colour.BLUE, Money(1), Money(2), {"amount": 1, "currency": "EUR"}),
    *(frozenset(), {1}, {1, 2}, {"1"}, "<set 0x1>"),
]


def test_values_that_differ_have_different_forms():
    forms = [form(value) for value in _DISTINCT]
    clashes = [
        (_DISTINCT[i], _DISTINCT[j])
        for i in range(len(forms))
        for j in range(i)
        if forms[i] == forms[j]
    ]
    assert clashes == []


def nested(depth: int, filling: str = "") -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [filling, {"a": value, "b": filling}]
    return value


@pytest.mark.parametrize("item", [{}, [], {"a": 1}, [[]], (), "deep"], ids=repr)
def test_many_small_parts_take_little_time(item: Any):
    """Clients choose the arguments: ten megabytes of them must not hold a process for seconds."""
    value: Any = item if item == "deep" else [item] * (1_000_000 // len(repr(item)))
    if item == "deep":
        value = nested(99, "x" * 5_000)
    begun = time.thread_time()
    form(value)
    assert time.thread_time() - begun < 0.3


def test_a_value_that_is_nested_too_deeply_is_refused_as_one_that_contains_itself():
    assert form(nested(100)) == form(through("json", nested(100)))
    with pytest.raises(InvalidKey, match=r"amount: .*nested too deeply"):
        fingerprint("o-1", [nested(100_000)])
    endless: dict[str, Any] = {}
    endless["again"] = endless
    with pytest.raises(InvalidKey, match="it contains itself"):
        fingerprint("o-1", endless)

    class Same:
        def __json__(self) -> Any:
            return self

    with pytest.raises(InvalidKey, match="it contains itself"):
        fingerprint("o-1", Same())


def test_the_order_of_dicts_sets_and_keyword_arguments_does_not_count():
    def task(**kwargs: Any) -> None: ...

    assert form({"a": 1, "b": {"c": 1, "d": 2}}) == form({"b": {"d": 2, "c": 1}, "a": 1})
    assert form({1: "a", 10: "b", 2: "c"}) == form({2: "c", 1: "a", 10: "b"})
    assert form({"a", "b", "c"}) == form(frozenset(["c", "b", "a"]))
    # Both want the same place in the table of a small set: whichever came first is first.
    one, other = {0}, {8}
    one.add(8)
    other.add(0)
    assert list(one) != list(other)
    assert form(one) == form(other)
    assert fingerprint(b=1, a=2, task__=task) == fingerprint(a=2, b=1, task__=task)


@given(st.lists(in_json, max_size=3), st.dictionaries(st.text(), in_json, max_size=3))
@example([{1: "a", "1": "b"}], {})
@example([{10: 1, 9: 2, "8": 3}], {})
@example([{math.nan: 1, math.inf: 2}], {})
@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_a_fingerprint_is_the_same_on_both_sides_of_the_broker(
    serializer: str, args: list[Any], kwargs: dict[str, Any]
):
    def task(*args: Any, **kwargs: Any) -> None: ...

    sent_args, sent_kwargs = through(serializer, (args, kwargs))
    assert fingerprint(*sent_args, task__=task, **sent_kwargs) == fingerprint(
        *args, task__=task, **kwargs
    )


@given(in_json)
@example([True, {"b": [1, -2.5], "a": "é"}, {"a!": None, "a": math.inf, "~": 0}])
@example({"a": {}, '"}]': []})
def test_the_writer_in_c_and_the_one_in_python_agree(value: Any):
    assert fingerprints.form(value) == fingerprints._write(value)


@pytest.mark.parametrize(
    ("serializer", "value"),
    [
        ("json", Reducible([1, (2, 3)])),
        ("json", {"deep": (Kind.CARD, Level.HIGH, Point(1, 2))}),
        ("json", b"\xff\x00"),
        ("json", {"__type__": "datetime", "__value__": "2020-01-01T00:00:00"}),
        ("pickle", {"a": {1, 2}, "b": frozenset("ab"), (1, 2): Colour.RED}),
        ("pickle", [datetime.timedelta(1, 2, 3), Money(5), Point(1, 2)]),
        ("msgpack", {"a": (1, 2.5, "x", b"\xff", None, True), "b": [], "c": {"d": -7}}),
        ("yaml", {"a": (1, 2.5, "x", b"\xff", None, True), "b": [], "c": {"d": -7}}),
    ],
)
def test_special_types_have_one_form_on_both_sides_of_the_broker(serializer: str, value: Any):
    if serializer in ("msgpack", "yaml"):
        pytest.importorskip(serializer)
    assert form(through(serializer, value)) == form(value)


def test_a_model_and_a_dataclass_count_as_their_type_and_content():
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("Order", id=(int, ...))
    assert form(model(id=1)) == form(model(id=1)) != form(model(id=2))
    dollars = dataclasses.make_dataclass("Dollars", [("amount", int), ("currency", str)])
    assert form(Money(5)) == form(Money(5)) != form(dollars(5, "EUR"))


def test_an_argument_without_canonical_form_is_named_with_its_type_alone():
    with pytest.raises(InvalidKey) as caught:
        fingerprint("o-1", {"card": [Opaque()]})
    message = str(caught.value)
    assert f"task {TASK} cannot include argument amount: a value of type" in message
    assert "Opaque has no canonical form" in message
    assert "Set idempotency_fingerprint to the names" in message
    assert SECRET not in message
    assert caught.value.__context__ is None


def test_a_fingerprint_may_count_some_arguments_only_or_be_made_by_a_function():
    def of(*args: Any, by: Any) -> Any:
        return identify(charge, args, call_key="k", fingerprint=by).fingerprint

    assert (
        of("o-1", 5, by="amount") == of("o-2", 5, "USD", by="amount") != of("o-1", 6, by="amount")
    )
    assert of("o-1", 5, by=("amount", "currency")) == of("o-2", 5, "EUR", by=["currency", "amount"])
    assert of("o-1", 5, by=("amount", "currency")) != of("o-1", 5, "USD", by=("amount", "currency"))
    assert of({"id": 1, "at": 5}, 5, by="order_id.id") == of({"id": 1}, 5, by="order_id.id")
    assert of(None, 5, by="order_id") is not None

    def rounded(amount: Any, **_: Any) -> Any:
        return round(amount), b"\xff"

    assert of("o-1", 5.1, by=rounded) == of("o-1", 4.9, by=rounded) != of("o-1", 6.1, by=rounded)
    assert of("o-1", 5, by=lambda **_: None) is None
    with pytest.raises(InvalidKey, match="Opaque"):
        of("o-1", 5, by=lambda **_: Opaque())


# -- identities ------------------------------------------------------------------------------------


def test_without_a_rule_the_key_is_the_task_id_and_nothing_is_compared():
    answer = identify(charge, (Opaque(), 5))
    assert answer == Identified(Identity(namespace=TASK, key="@id-1"))
    assert answer.identity.by_task_id
    replacement = identifier().identify(("o-1", 5), {}, task_id="id-1", nesting=1)
    assert replacement.identity.key == "@id-1+1"


def test_all_arguments_make_a_key_that_is_a_digest():
    key = key_of(charge, ("o-1", 5), key=ALL_ARGUMENTS)
    assert key[0] == "*"
    assert bytes.fromhex(key[1:]) == fingerprint("o-1", 5)
    assert key_of(charge, (), {"amount": 5, "order_id": "o-1"}, key=ALL_ARGUMENTS) == key
    assert key_of(charge, ("o-1", 6), key=ALL_ARGUMENTS) != key
    assert identify(charge, ("o-1", 5), key=ALL_ARGUMENTS).fingerprint is None
    with pytest.raises(InvalidKey, match=r"argument amount.*Set idempotency_key to .* of them\.$"):
        identify(charge, ("o-1", Opaque()), key=ALL_ARGUMENTS)


@pytest.mark.parametrize("rule", [None, "order_id", ALL_ARGUMENTS, lambda **_: "r"])
@pytest.mark.parametrize("key", [AN_ID, 0])
def test_a_key_given_with_the_call_wins_and_is_compared(rule: Any, key: Any):
    answer = identify(charge, ("o-1", 5), key=rule, call_key=key)
    assert answer.identity.key == str(key)
    assert answer.fingerprint == fingerprint("o-1", 5)
    assert not answer.identity.by_task_id
    assert identify(charge, (Opaque(),), call_key=key, fingerprint=None).fingerprint is None


@pytest.mark.parametrize(
    ("rule", "scope"),
    [
        (None, ""),
        ("currency", "EUR"),
        (("currency", "amount"), '["EUR",5]'),
        (lambda amount, **_: amount, "5"),
        ("note", ""),
        ("order_id.tenant", ""),
    ],
)
def test_a_scope_comes_from_the_arguments(rule: Any, scope: str):
    assert identify(charge, ("o-1", 5), scope=rule).identity.scope == scope
    assert identify(charge, ("o-1", 5), scope=rule, call_scope=7).identity.scope == "7"


@pytest.mark.parametrize("scope", ["", False, 1.5, ("t", ""), ("t", ()), ("t", ("", 1))])
def test_a_bad_scope_is_refused(scope: Any):
    with pytest.raises(InvalidKey, match=f"scope of task {TASK}"):
        identify(charge, (scope, 5), scope="order_id")


@pytest.mark.parametrize("options", [{"key": "order_id"}, {"key": ALL_ARGUMENTS}, {"key": "note"}])
def test_arguments_that_do_not_fit_are_left_for_the_task_to_refuse(options: Any):
    answer = identify(charge, (1, 2, 3, 4), scope="currency", **options)
    assert answer == Identified(Identity(namespace=TASK, key="@id-1"))
    unfit = identify(charge, (1, 2, 3, 4), call_key="k").fingerprint
    assert unfit not in (None, fingerprint(1, 2, 3))
    assert unfit != identify(charge, (1,), call_key="k").fingerprint


# -- stamps ----------------------------------------------------------------------------------------


@given(
    raw_key.filter(lambda raw: raw not in ("", [])),
    st.none() | printable.filter(bool),
    st.none() | st.just(ALL_ARGUMENTS),
)
def test_a_stamp_survives_the_broker(key: Any, scope: Any, by: Any):
    try:
        answer = identify(charge, (1, 2), call_key=key, call_scope=scope, fingerprint=by)
    except InvalidKey:
        return
    header = through("json", answer.to_header())
    assert Identified.from_header(header, TASK) == answer


def test_a_stamp_leaves_out_what_is_empty_and_may_hold_what_this_version_does_not_know():
    assert Identified.from_header(None, TASK) is None
    known = Identified(Identity(namespace=TASK, key="k"))
    assert Identified.from_header({"key": "k", "invented": "later"}, TASK) == known
    assert identify(charge, ("o-1", 5)).to_header() == {"key": "@id-1"}
    stamp = identify(charge, ("o-1", 5), key="order_id", scope="currency").to_header()
    assert stamp == {"key": "o-1", "scope": "EUR", "fingerprint": fingerprint("o-1", 5).hex()}


def test_a_key_that_was_handed_on_with_the_headers_of_another_message_is_not_this_ones():
    stamp = {"id": "another", "raw_key": "k"}
    assert read_stamp({"idempotency_key": "k", "idempotency": stamp}, "mine") == {}
    assert read_stamp({"idempotency_key": "given", "idempotency": stamp}, "mine") == {
        "raw_key": "given"
    }


@pytest.mark.parametrize(
    "header",
    [
        SECRET,
        5,
        {},
        {"key": None},
        {"key": 17},
        {"key": "x" * 256},
        {"key": SECRET + "\n"},
        {"key": "k", "scope": None},
        {"key": "k", "scope": "x" * 256},
        {"key": "k", "fingerprint": "0" * 33},
        {"key": "k", "fingerprint": "g" * 32},
        {"key": "k", "fingerprint": "0" * 32 + "\n"},
    ],
)
def test_a_malformed_stamp_is_refused(header: Any):
    with pytest.raises(InvalidKey, match=f"message of {TASK}") as caught:
        Identified.from_header(header, TASK)
    assert SECRET not in str(caught.value)


PYDANTIC: list[dict[str, Any]] = [
    {"key": ALL_ARGUMENTS},
    {"key": "order.id"},
    {"key": "order.id", "fingerprint": ("order.at", "times")},
    {"key": lambda order, **_: order.id},
]


@pytest.mark.parametrize("options", PYDANTIC, ids=["all", "path", "names", "function"])
@pytest.mark.parametrize("bound", [False, True], ids=["function", "bound"])
def test_a_pydantic_model_is_the_same_call_as_what_validates_as_it(
    options: dict[str, Any], bound: bool
):
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("Order", id=(uuid.UUID, ...), at=(datetime.datetime, ...))

    def pay(order: Any, times: int = 1) -> int:
        assert isinstance(order, model)
        return times

    def bound_pay(self: Any, order: Any, times: int = 1) -> int:
        return pay(order, times)

    with Celery("shop", broker="memory://", set_as_current=False) as app:
        app.conf.idempotency_store = "memory://"
        given = {f"idempotency_{name}": value for name, value in options.items()}
        given |= {"base": IdempotentTask, "bind": bound}
        task, _ = make_pydantic_task(app, bound_pay if bound else pay, model=model, **given)
        order = model(id=AN_ID, at=datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc))

        def stamp(order: Any, **more: Any) -> Any:
            found: Any = message_of(task, [order], more).headers[STAMP_HEADER]
            return found["key"], found.get("fingerprint")

        sent = order.model_dump(mode="json")
        assert stamp(order) == stamp(sent) == stamp(order, times=1)
        assert stamp(order) == stamp({**sent, "id": AN_ID.hex, "at": "2026-01-02 00:00Z"})
        definition = task.idempotency_definition()
        assert definition is not None
        of_worker = definition.identify([sent], {}, task_id="")
        of_publisher = definition.identify([order], {}, task_id="")  # of Celery < 5.7, too
        assert of_worker == of_publisher
        if options["key"] == "order.id":
            # What does not validate is left for the task to refuse.
            assert stamp({"id": "seven"})[0] == "seven"
        assert stamp(order) != stamp(order.model_copy(update={"at": order.at.replace(day=3)}))
        assert task.apply((order,), throw=True).get() == 1
