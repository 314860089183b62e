"""The messages that are committed and not sent yet: a list to read, without the calls themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.contrib import admin

from celery_idempotent.django.models import OutboxMessage

if TYPE_CHECKING:
    from django.http import HttpRequest

    Base = admin.ModelAdmin[OutboxMessage]
else:
    Base = admin.ModelAdmin


class OutboxAdmin(Base):
    """Nobody changes a staged message here: the sweep sends it."""

    list_display = ("task", "task_id", "key", "scope", "attempts", "error")
    list_display_links = None
    ordering = ("id",)
    show_full_result_count = False

    def has_view_permission(self, request: HttpRequest, obj: object = None) -> bool:  # noqa: ARG002
        """Who may see records may see which of them wait for their message."""
        return request.user.has_perm("celery_idempotent.view_idempotencyrecord")

    def has_module_permission(self, request: HttpRequest) -> bool:
        """As above."""
        return self.has_view_permission(request)

    def has_add_permission(self, request: HttpRequest) -> bool:  # noqa: ARG002
        """Nobody: transactions stage messages."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: object = None) -> bool:  # noqa: ARG002
        """Nobody."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: object = None) -> bool:  # noqa: ARG002
        """Nobody."""
        return False
