"""Operations of named people are in the admin's log wherever they are done, and never wait for it."""

from __future__ import annotations

from unittest import mock

import pytest
from django.db import DatabaseError

from celery_idempotent.celery.operations import OperationRequest, operate_or_raise
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
    assert "the admin's log does not have what follows: it is down" in caplog.text
    assert "alice forgot" in caplog.text


def test_a_log_that_goes_down_meanwhile_keeps_the_note_that_nobody_knows_the_end(app, caplog):
    make_user("alice")
    save = "django.contrib.admin.models.LogEntry.save"
    forget = app.conf.idempotency_store.forget

    def forgets_and_goes_down(*args, **options):
        patch.start()
        return forget(*args, **options)

    patch = mock.patch(save, side_effect=DatabaseError("it is down"))
    with mock.patch.object(app.conf.idempotency_store, "forget", forgets_and_goes_down):
        try:
            assert operate_or_raise(
                app, identity("order-1"), OperationRequest("forget", who="alice")
            )
        finally:
            patch.stop()
    ((who, message),) = entries()
    assert who == "alice"
    assert "begun, and it is not known how it ended" in message
    assert "does not have how it ended: it is down" in caplog.text
