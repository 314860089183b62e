"""Which test process gets which file: one that has the servers, databases and sites of a folder gets more of it."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]


class ByFolder(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """A file stays in one process, as with ``--dist loadfile``, and a folder in as few as its length allows.

    What a folder's fixtures make for the session is made once in each process that runs a file of it. A process
    therefore goes on with a folder that it knows, else with one that no process has begun, else it helps with the next.
    """

    def _assign_work_unit(self, node: Any) -> None:
        known = {_folder(file) for file in self.assigned_work[node]}
        begun = {_folder(file) for work in self.assigned_work.values() for file in work}
        waiting: list[str] = list(self.workqueue)
        chosen = min(waiting, key=lambda file: (_folder(file) not in known, _folder(file) in begun))
        self.workqueue.move_to_end(chosen, last=False)
        super()._assign_work_unit(node)


def _folder(file: str) -> str:
    return file.rpartition("/")[0]
