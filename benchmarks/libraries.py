"""Other libraries that keep a task from running twice, and how each is set up to be compared with ours."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery import Celery


@dataclass(frozen=True, slots=True)
class Peer:
    """A library: its package and its task class."""

    package: str
    base: str

    @property
    def label(self) -> str:
        return f"{self.package} {version(self.package)}"

    def task_class(self) -> type[Any]:
        module, _, name = self.base.rpartition(".")
        found: type[Any] = getattr(importlib.import_module(module), name)
        return found


#: By the name of the task. Each has a key of the task's arguments, as ours has.
PEERS = {
    "once": Peer("celery-once", "celery_once.QueueOnce"),
    "singleton": Peer("celery-singleton", "celery_singleton.Singleton"),
}


def installed() -> Mapping[str, Peer]:
    """Return those that are here."""
    found = {}
    for name, peer in PEERS.items():
        with suppress(PackageNotFoundError):
            version(peer.package)
            found[name] = peer
    return found


def configure(app: Celery, url: str) -> None:
    """Let each of them have its locks where our records are."""
    app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": {"url": url}}
    app.conf.singleton_backend_url = url
