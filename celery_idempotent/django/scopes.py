"""The scope of a user's keys: the same for the requests of that user and for tasks."""

from __future__ import annotations

import uuid
from typing import Any

from celery_idempotent.errors import InvalidKey


def user_scope(user: object) -> tuple[object, ...]:
    """Return the scope of a user's keys: tenant, model (unless it is ``AUTH_USER_MODEL``) and primary key.

    Requests have it by default; a task gets it by ``idempotency_scope=user_scope(user)``. The tenant is the schema of
    the database connection, where that has one (django-tenants). So user 5 of one tenant is not user 5 of another, and
    neither is customer 5 or a scope that a project gives its own tasks.

    Raises:
        InvalidKey: if the user has no primary key, for example because it was never saved.
    """
    kind: tuple[str, ...] = ()
    model = _user_model()
    if model is not None and isinstance(user, model):
        # A model that extends the users' has the primary key of its user.
        pk = getattr(user, model._meta.pk.attname)
    else:
        kind, pk = (_name_of_model(user),), getattr(user, "pk", None)
    if pk is None or pk == "":
        raise InvalidKey(
            "This user has no primary key, and a scope that all such users share would mix their results. "
            "Save the user, or give a scope."
        )
    usable = isinstance(pk, (int, str, uuid.UUID)) and not isinstance(pk, bool)
    return (*tenant_scope(), "user", *kind, pk if usable else str(pk))


def tenant_scope() -> tuple[str, ...]:
    """Return the parts of a scope that name the tenant; none without django-tenants."""
    # Late: a worker imports the task class of this package before Django is set up.
    from django.db import connection

    schema = getattr(connection, "schema_name", None)
    return ("tenant", str(schema)) if schema else ()


def _user_model() -> Any:
    from django.contrib.auth import get_user_model
    from django.core.exceptions import ImproperlyConfigured

    try:
        return get_user_model()
    except ImproperlyConfigured:  # the project does without django.contrib.auth
        return None


def _name_of_model(user: object) -> str:
    options = getattr(user, "_meta", None)
    if options is not None:
        return str(options.concrete_model._meta.label_lower)
    cls = user.__class__  # not type(): the user of a request is a lazy object
    return f"{cls.__module__}.{cls.__qualname__}"
