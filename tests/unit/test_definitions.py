"""To which task of an app the records of a namespace belong."""

from __future__ import annotations

import pytest
from celery import Celery

from celery_idempotent.celery import definition
from celery_idempotent.celery.task import IdempotentTask


@pytest.fixture
def app():
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.idempotency_store = "memory://"
    yield app
    app.close()


def run():
    pass


def task(app, name, **options):
    return app.task(base=IdempotentTask, name=name, shared=False, **options)(run)


def name_of(app, namespace):
    found = definition.definition_of(app, namespace)
    return found and found.name


def test_a_namespace_belongs_to_the_task_that_has_it(app):
    pay = task(app, "shop.pay", idempotency_namespace="payments")
    assert definition.definition_of(app, "payments") is pay.idempotency_definition()
    assert name_of(app, "payments") == "shop.pay"


def test_a_namespace_may_have_no_task(app):
    task(app, "shop.pay", idempotency_namespace="payments")
    assert definition.definition_of(app, "shop.pay") is None


def test_tasks_that_are_switched_off_are_known_and_celerys_own_are_not(app):
    task(app, "shop.off", idempotency_mode="off")
    app.task(name="shop.plain", shared=False)(run)
    names = {each.name for each in definition.definitions(app)}
    assert names == {"shop.off"}
    assert definition.definition_of(app, "shop.off").policy.mode == "off"


def test_tasks_that_this_process_does_not_know_are_imported_when_they_are_looked_for(app):
    imported = []

    def import_default_modules():
        imported.append(True)
        task(app, "shop.late")

    app.loader.import_default_modules = import_default_modules
    task(app, "shop.pay")
    assert definition.definition_of(app, "shop.pay", load=True) is not None
    assert definition.definition_of(app, "shop.late") is None
    assert not imported
    assert definition.definition_of(app, "shop.late", load=True).name == "shop.late"
    assert {each.name for each in definition.definitions(app, load=True)} == {
        "shop.late",
        "shop.pay",
    }
    assert len(imported) == 1
