"""A fork and a verb inside SQLite wait for each other, and no fork for ever."""

from __future__ import annotations

import os
import threading
import time

import pytest

pytest.importorskip("django")

from celery_idempotent.django.sql import connections
from celery_idempotent.django.sql.connections import unforked
from tests.support.waiting import wait_for


def fork() -> int:
    pid = os.fork()
    if not pid:
        os._exit(len(connections._inside) + connections._forking.locked())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_fork_waits_until_no_thread_is_inside():
    inside, leave, left = threading.Event(), threading.Event(), []

    def verb() -> None:
        with unforked():
            inside.set()
            leave.wait(60)
            left.append(time.monotonic())

    thread = threading.Thread(target=verb)
    thread.start()
    inside.wait(60)
    threading.Timer(0.2, leave.set).start()
    assert fork() == 0
    assert left
    thread.join()
    assert not connections._inside
    assert not connections._forking.locked()


def test_a_fork_by_the_thread_that_is_inside_does_not_wait_for_itself():
    with unforked(), unforked():
        assert fork() == 1
    assert fork() == 0


def test_a_verb_waits_for_a_fork():
    entered = threading.Event()

    def verb() -> None:
        with unforked():
            entered.set()

    thread = threading.Thread(target=verb)
    with connections._forking:
        thread.start()
        assert not entered.wait(0.1)
    wait_for(entered.is_set, what="the verb")
    thread.join()


def test_a_fork_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(connections, "_FORK_SECONDS", 0.1)
    monkeypatch.setattr(connections, "_inside", {-1: None})
    assert fork() == 0
