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

ALICE = OperationRequest("forget", who="alice", reason="a test")
LOG = "django.contrib.admin.models.LogEntry.objects.create"


def entries():
    from django.contrib.admin.models import LogEntry

    return [(each.user.get_username(), each.change_message) for each in LogEntry.objects.all()]


@pytest.fixture
def app(memory, app):
    settle(memory, claim(memory, "order-1"))
    make_user("alice")
    return app


@pytest.mark.parametrize(
    ("who", "noted"),
    [("alice", [("alice", "Forgotten. Reason: a test")]), ("", []), ("nobody here", [])],
)
def test_a_user_of_the_project_who_operates_in_code_is_in_the_log(app, who, noted):
    request = OperationRequest("forget", who=who, reason="a test")
    assert operate_or_raise(app, identity("order-1"), request)
    assert entries() == noted


@pytest.mark.parametrize("error", [DatabaseError("down"), InterfaceError("closed"), RuntimeError()])
def test_a_log_that_fails_changes_no_outcome(app, memory, error, caplog):
    with mock.patch(LOG, side_effect=error):
        assert operate_or_raise(app, identity("order-1"), ALICE)
    assert memory.get(identity("order-1")) is None
    assert "the admin's log lacks this operation" in caplog.text
    assert "alice forgot" in caplog.text


def test_a_log_that_fails_hides_no_silent_store(app, memory):
    """After two records without an answer the others are not tried, whatever the log says."""
    seen = [memory.get(identity("order-1"))] * 5
    silent = mock.patch.object(memory, "forget", side_effect=StoreUnavailable("no answer"))
    with silent, mock.patch(LOG, side_effect=InterfaceError("the connection is closed")):
        ended = list(operate_on_each(app, ALICE, seen))
    assert [outcome for _, outcome, _ in ended] == [Outcome.UNKNOWN] * 2


@pytest.mark.parametrize("error", [StoreUnavailable("no answer"), KeyboardInterrupt()])
def test_what_may_have_been_done_is_in_the_log(app, memory, error):
    with mock.patch.object(memory, "forget", side_effect=error), pytest.raises(type(error)):
        operate_or_raise(app, identity("order-1"), ALICE)
    assert entries() == [("alice", "Forget: it may have been done. Reason: a test")]
