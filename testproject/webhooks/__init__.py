"""Receives GitHub's webhooks and keeps a ledger of them, twice: with and without idempotency."""
