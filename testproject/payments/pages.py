"""The page where a person presses a button twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.contrib.auth.decorators import login_required
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import ensure_csrf_cookie
from django.views.decorators.http import require_safe

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse

__all__ = ["pay_page"]


@never_cache
@require_safe
@login_required
@ensure_csrf_cookie
def pay_page(request: HttpRequest) -> HttpResponse:
    """Show the form; its key is made in the browser, or comes with the address of another tab."""
    return render(request, "payments/pay.html")
