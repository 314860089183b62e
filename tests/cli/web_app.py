"""An app without Django, and with a failed record that can run again, for `idempotency web`."""

from __future__ import annotations

from typing import Any

from celery_idempotent.records import SettleRequest, State
from celery_idempotent.stores.memory import MemoryStore
from tests.support.admin import TASK, claim, make_app, value

store = MemoryStore()
app = make_app(store)
_task: Any = app.tasks[TASK]
_error = value('{"exc_type": "CardDeclined", "exc_message": ["Ada"], "exc_module": "shop"}')
_end = SettleRequest(claim(store, "o-1"), State.FAILED, _error, 3_600_000)
_end.message = _task.idempotency_definition().codec.dump_message(_task.s("o-1"))
store.settle(_end)
