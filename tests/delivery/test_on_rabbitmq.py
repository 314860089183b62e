"""Duplicates with RabbitMQ as the broker."""

from __future__ import annotations

import pytest

from tests.delivery.matrix import Matrix


@pytest.mark.worker
@pytest.mark.rabbitmq
@pytest.mark.timeout(400)
class TestOnRabbitMQ(Matrix):
    """Lost messages come back at once."""

    broker = "rabbitmq"
