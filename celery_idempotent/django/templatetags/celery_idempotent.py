"""A filter for the names of tasks."""

from __future__ import annotations

import re

from django import template
from django.utils.html import conditional_escape
from django.utils.safestring import SafeString, mark_safe

register = template.Library()


@register.filter
def breakable(name: str) -> SafeString:
    """Let a long name break behind its dots and underscores, rather than anywhere."""
    return mark_safe(re.sub(r"(?<=[._/:])", "<wbr>", conditional_escape(name)))  # noqa: S308  escaped before
