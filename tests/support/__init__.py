"""What to take for what.

- A worker to kill, freeze or stop: ``start_worker`` (``workers.Worker``); its effects are lines of ``ledger``.
- Broker, store, queue and publisher together: ``sites.Site``; ``open_site`` of tests/delivery for workers that break,
  ``shared`` for one that no test breaks, ``set_stage`` of tests/faults where the store itself breaks.
- Many situations at once, each a generator of what it waits for: ``tests.delivery.driving``. A fault at a point of a
  delivery: a line in ``tests.delivery.histories``.
- A task that waits: ``gate``. A message to deliver twice: ``Site.message`` and ``Site.deliver``.
- A lost request, a lost answer, a server that is away: ``proxy.Proxy``.
- A server: ``redis_url`` (others use it, too), ``databases`` (unused ones), ``private_redis`` (to be broken),
  ``persistent_redis`` (that keeps its data), ``rabbitmq``.
- What callers see: ``watch.Results``.
- A run without Celery: ``runs``. A record in some state: ``records``. What was reported: ``telling.listening``.
- Threads that start together: ``threads.all_at_once``; one in the background: ``threads.in_background``.
- A condition: ``waiting.wait_for``. The time of a test is never waited for.
- A tutorial as its reader follows it: ``newcomer.Newcomer``.
"""
