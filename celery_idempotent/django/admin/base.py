"""What every page of the admin has: who may see it, where it is, how it looks, and what it says in trouble."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar, cast

from django.contrib import admin
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed
from django.template.response import TemplateResponse
from django.urls import reverse

from celery_idempotent.django.admin import audit
from celery_idempotent.django.admin.audit import parse, unparse
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.records import Identity

if TYPE_CHECKING:
    from django.db.models import Model

    Base = admin.ModelAdmin[Model]
else:
    Base = admin.ModelAdmin

logger = logging.getLogger(__name__)

PageView = TypeVar("PageView", bound=Callable[..., HttpResponse])


def guarded(*methods: str) -> Callable[[PageView], PageView]:
    """Let a view see these methods only, of those who may; where the store does not answer, say so."""

    def decorate(view: PageView) -> PageView:
        @functools.wraps(view)
        def look_after(
            self: Pages, request: HttpRequest, *args: object, **kwargs: object
        ) -> HttpResponse:
            if not self.has_view_permission(request):
                raise PermissionDenied
            if request.method not in methods:
                return HttpResponseNotAllowed(methods)
            try:
                return view(self, request, *args, **kwargs)
            except IdempotencyError as error:
                logger.warning("idempotency: a page of the admin cannot be shown: %s", error)
                context = {"title": "The store cannot be used at the moment", "trouble": str(error)}
                return self.render(request, "trouble", context, status=503)

        return cast("PageView", look_after)

    return decorate


class ReadOnlyAdmin(Base):
    """Records are made by tasks, and changed by operations, each with a permission."""

    def _nobody(self, request: HttpRequest, obj: object = None) -> bool:  # noqa: ARG002
        return False

    has_add_permission = has_change_permission = has_delete_permission = _nobody


class OutboxAdmin(ReadOnlyAdmin):
    """The messages that are committed and not sent yet, without the calls themselves: the sweep sends them."""

    list_display = ("task", "task_id", "key", "scope", "attempts", "error")
    list_display_links = None
    ordering = ("id",)
    show_full_result_count = False

    def has_view_permission(self, request: HttpRequest, obj: object = None) -> bool:  # noqa: ARG002
        """Who may see records may see which of them wait for their message."""
        return request.user.has_perm("celery_idempotent.view_idempotencyrecord")

    has_module_permission = has_view_permission


class Pages(ReadOnlyAdmin):
    """The admin of a model without a table."""

    def may(self, request: HttpRequest, what: str) -> bool:
        """Does this person have the permission ``what``, such as ``view_result``?"""
        return request.user.has_perm(f"{self.opts.app_label}.{what}")

    def address(self, page: str, *args: str) -> str:
        """Return the address of one of the pages above."""
        name = f"{self.opts.app_label}_{self.opts.model_name}_{page}"
        return reverse(f"{self.admin_site.name}:{name}", args=args)

    def address_of(self, identity: Identity, page: str = "change") -> str:
        """Return the address of a page about one record."""
        return self.address(page, quote(unparse(identity)))

    @staticmethod
    def identity_of(object_id: str) -> Identity | None:
        """Return what an address is about, ``None`` if that is no record."""
        try:
            return parse(unquote(object_id))
        except ValueError:
            return None

    def render(
        self, request: HttpRequest, page: str, context: Mapping[str, object], *, status: int = 200
    ) -> HttpResponse:
        """Return a page in the look of the admin."""
        # So that {% url 'admin:index' %} leads to this site, whatever its name.
        vars(request)["current_app"] = self.admin_site.name
        about = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "list_url": self.address("changelist"),
            "charts_url": self.address("charts"),
            **context,
        }
        template = f"admin/celery_idempotent/idempotencyrecord/{page}.html"
        return TemplateResponse(request, template, about, status=status)

    def gone(self, request: HttpRequest, identity: Identity | None) -> HttpResponse:
        """Say that there is no such record, and what operators did to it when there was."""
        log = audit.log_entries(identity) if identity else []
        context = {"title": "No such record", "identity": identity, "log": log}
        return self.render(request, "gone", context, status=404)
