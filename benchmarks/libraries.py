"""Other libraries that keep a task from running twice, and how each is set up to be compared with ours."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery import Celery


@dataclass(frozen=True, slots=True)
class Peer:
    """A library: its task class, and the options of a task and of the app that it is used with here."""

    package: str
    base: str
    options: Mapping[str, object] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)

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
    "heimdall": Peer(
        "celery-heimdall",
        "celery_heimdall.HeimdallTask",
        options={"heimdall": {"unique": True}},
        # As it comes, its worker waits for a second for the lock that its own publisher took.
        settings={"heimdall_unique_lock_blocking": False},
    ),
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
    for peer in PEERS.values():
        app.conf.update(peer.settings)
