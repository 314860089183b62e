"""Where things are: the webhook and its page, the payments, the status of their keys, the admin."""

from __future__ import annotations

from django.contrib import admin
from django.contrib.auth.decorators import login_required
from django.contrib.auth.views import LoginView, LogoutView
from django.urls import include, path
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import ensure_csrf_cookie
from django.views.generic import TemplateView

from testproject.payments.api import Payments, PayNow
from testproject.webhooks import views

#: The form's key is made in the browser, or comes with the address of another tab.
pay_page = TemplateView.as_view(template_name="payments/pay.html")

urlpatterns = [
    path("", views.status, name="status"),
    path("webhooks/github/", views.github, name="github-webhook"),
    path("pay/", never_cache(login_required(ensure_csrf_cookie(pay_page))), name="pay"),
    path("payments/", Payments.as_view(), name="payments"),
    path("payments/now/", PayNow.as_view(), name="payments-now"),
    path("idempotency/", include("celery_idempotent.django.http.urls")),
    path("login/", LoginView.as_view(), name="login"),
    path("logout/", LogoutView.as_view(), name="logout"),
    path("admin/", admin.site.urls),
]
