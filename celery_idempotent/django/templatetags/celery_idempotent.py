"""Names that are too long for their column."""

from __future__ import annotations

from django import template
from django.utils.html import conditional_escape
from django.utils.safestring import SafeString, mark_safe

register = template.Library()


@register.filter
def breakable(name: str) -> SafeString:
    """Let a dotted name break behind its dots, rather than anywhere."""
    parts = str(name).split(".")
    return mark_safe(".<wbr>".join(map(conditional_escape, parts)))  # noqa: S308  escaped before
