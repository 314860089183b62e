"""The bank: takes its time, refuses some, is closed or out of reach at times."""

from __future__ import annotations

import time
from pathlib import Path

from django.conf import settings


class PaymentRefused(Exception):
    """The bank will never make this payment."""


class BankUnreachable(Exception):
    """Trying again may help."""


def transfer(recipient: str) -> None:
    """Move the money; ``acct_closed`` is refused, ``acct_unreachable`` as long as the bank is out of reach."""
    time.sleep(settings.BANK_SECONDS)
    _while("closed")
    if recipient == "acct_closed":
        raise PaymentRefused(f"The account {recipient} is closed.")
    if recipient == "acct_unreachable" and _mood() != "back":
        raise BankUnreachable("no route to bank.internal:7001")


def receipt() -> None:
    """Wait for the bank's receipt, when the payment is entered."""
    _while("slow")


def _mood() -> str:
    """Return the word in the file by which tests hold a payment in progress, or make it fail."""
    mood = Path(settings.BANK_MOOD_FILE)
    return mood.read_text() if mood.exists() else ""


def _while(mood: str) -> None:
    while _mood() == mood:
        time.sleep(0.02)
