"""The messages that are committed and not sent yet: a list to read, without the calls themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_idempotent.django.admin.base import ReadOnlyAdmin

if TYPE_CHECKING:
    from django.http import HttpRequest


class OutboxAdmin(ReadOnlyAdmin):
    """Transactions stage messages, and the sweep sends them: nobody changes one here."""

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
