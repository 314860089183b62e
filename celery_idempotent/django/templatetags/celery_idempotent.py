"""Names of tasks as people read them."""

from __future__ import annotations

import re

from django import template
from django.utils.html import conditional_escape
from django.utils.safestring import SafeString, mark_safe

register = template.Library()

_BREAKS = re.compile(r"(?<=[._/:])")


@register.filter
def breakable(name: str) -> SafeString:
    """Let a long name break behind its dots and underscores, rather than anywhere."""
    parts = _BREAKS.split(str(name))
    return mark_safe("<wbr>".join(map(conditional_escape, parts)))  # noqa: S308  escaped before
