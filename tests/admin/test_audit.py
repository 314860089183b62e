"""Operations of named people are in the admin's log wherever they are done, and never wait for it."""

from __future__ import annotations

from unittest import mock

import pytest
from django.db import DatabaseError, InterfaceError

from celery_idempotent.celery.operations import (
    OperationRequest,
    Outcome,
    operate_on_each,
    operate_or_raise,
)
from celery_idempotent.errors import StoreUnavailable
from tests.support.admin import claim, identity, make_user, settle


def entries():
    from django.contrib.admin.models import LogEntry

    return [(each.user.get_username(), each.change_message) for each in LogEntry.objects.all()]


@pytest.fixture
def app(memory, serve):
    settle(memory, claim(memory, "order-1"))
    return serve(memory)


def test_a_user_who_operates_in_code_is_in_the_log(app):
    make_user("alice")
    assert operate_or_raise(
        app, identity("order-1"), OperationRequest("forget", who="alice", reason="a test")
    )
    assert entries() == [("alice", "Forgotten. Reason: a test")]


@pytest.mark.parametrize("who", ["", "nobody here"])
def test_who_is_no_user_of_the_project_has_no_entry(app, who):
    assert operate_or_raise(app, identity("order-1"), OperationRequest("forget", who=who))
    assert entries() == []


def test_an_operation_does_not_wait_for_a_log_that_is_down(app, memory, caplog):
    make_user("alice")
    log = "django.contrib.admin.models.LogEntry.objects.create"
    with mock.patch(log, side_effect=DatabaseError("it is down")):
        assert operate_or_raise(app, identity("order-1"), OperationRequest("forget", who="alice"))
    assert memory.get(identity("order-1")) is None
    assert "the admin's log does not have this operation: it is down" in caplog.text
    assert "alice forgot" in caplog.text


def test_what_may_have_been_done_is_in_the_log(app, memory):
    make_user("alice")
    silent = mock.patch.object(memory, "forget", side_effect=StoreUnavailable("no answer"))
    with silent, pytest.raises(StoreUnavailable):
        operate_or_raise(app, identity("order-1"), OperationRequest("forget", who="alice"))
    assert entries() == [("alice", "Forget: it may have been done")]


@pytest.mark.parametrize("error", [InterfaceError("the connection is closed"), RuntimeError("odd")])
def test_a_log_that_fails_changes_no_outcome(app, memory, error, caplog):
    make_user("alice")
    seen = [memory.get(identity("order-1"))]
    log = "django.contrib.admin.models.LogEntry.objects.create"
    with mock.patch(log, side_effect=error):
        ((_, outcome, _),) = operate_on_each(app, OperationRequest("forget", who="alice"), seen)
    assert outcome is Outcome.DONE
    assert "the admin's log does not have this operation" in caplog.text


def test_a_log_that_fails_hides_no_silent_store(app, memory):
    """After two records without an answer the others are not tried, whatever the log says."""
    make_user("alice")
    seen = [memory.get(identity("order-1"))] * 5
    silent = mock.patch.object(memory, "forget", side_effect=StoreUnavailable("no answer"))
    log = "django.contrib.admin.models.LogEntry.objects.create"
    with silent, mock.patch(log, side_effect=InterfaceError("the connection is closed")):
        ended = list(operate_on_each(app, OperationRequest("forget", who="alice"), seen))
    assert [outcome for _, outcome, _ in ended] == [None, None]


def test_an_operation_that_is_interrupted_is_in_the_log(app, memory):
    make_user("alice")
    forget = memory.forget

    def forget_and_end(*args, **options):
        forget(*args, **options)
        raise KeyboardInterrupt

    with (
        mock.patch.object(memory, "forget", forget_and_end),
        pytest.raises(KeyboardInterrupt),
    ):
        operate_or_raise(app, identity("order-1"), OperationRequest("forget", who="alice"))
    assert memory.get(identity("order-1")) is None
    assert entries() == [("alice", "Forget: it may have been done")]
