"""Databases for the projects of users."""

from __future__ import annotations
