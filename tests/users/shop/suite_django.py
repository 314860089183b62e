"""A user's suite for ``manage.py test``: nothing in it knows of records, or of how they are kept."""

from __future__ import annotations

from typing import Any

from django.db import connection
from django.test import TestCase, TransactionTestCase

from celery_idempotent import IdempotencyError
from celery_idempotent.testing import crash_matrix
from tests.users.shop.models import Payment
from tests.users.shop.tasks import charge, pay, pay_carelessly


def paid(order: str) -> int:
    return Payment.objects.filter(order=order).count()


class InATestCase(TestCase):
    """Each test begins with what all have, and leaves nothing to the next one."""

    @classmethod
    def setUpTestData(cls) -> None:
        assert pay.delay("first").get() == "paid first"

    def check(self, task: Any) -> None:
        assert paid("order") == 0
        first = task.delay("order")
        assert first.get() == task.delay("order").get()
        assert paid("order") == 1

    def test_a_payment(self) -> None:
        self.check(pay)

    test_the_same_payment_in_another_test = test_a_payment

    def test_a_charge(self) -> None:
        self.check(charge)

    test_the_same_charge_in_another_test = test_a_charge

    def test_what_all_tests_have_is_a_duplicate_in_each(self) -> None:
        assert pay.delay("first").get() == "paid first"
        assert paid("first") == 1

    test_what_all_tests_have_is_a_duplicate_in_each_again = (
        test_what_all_tests_have_is_a_duplicate_in_each
    )

    def test_a_failed_charge_is_rolled_back_and_may_be_tried_again(self) -> None:
        for _ in range(2):
            with self.assertRaises(ValueError):
                charge.apply(("bad",), throw=True).get()
        assert paid("bad") == 0

    def test_what_follows_a_charge_is_seen_by_who_captures_it(self) -> None:
        with self.captureOnCommitCallbacks(execute=True):
            charge.delay("order")
        assert paid("follow-up of order") == 1

    def test_a_killed_process_would_not_see_what_the_test_wrote(self) -> None:
        with self.assertRaisesRegex(IdempotencyError, "TransactionTestCase|in memory"):
            crash_matrix(charge, arguments=lambda order: [order], effects=paid)

    def test_a_request_that_is_sent_twice(self) -> None:
        for path in ("/buy/", "/buy-atomically/"):
            answers = [self.post(path) for _ in range(2)]
            assert [each.status_code for each in answers] == [201, 201]
            assert answers[0].content == answers[1].content
        assert paid("order") == 2

    test_the_same_request_in_another_test = test_a_request_that_is_sent_twice

    async def test_a_request_of_an_async_client(self) -> None:
        for path in ("/buy/", "/buy-atomically/"):
            headers = {"Idempotency-Key": f'"{path}"'}
            send = self.async_client.post
            answers = [await send(path, {"order": "order"}, headers=headers) for _ in range(2)]
            assert [each.status_code for each in answers] == [201, 201]
            assert answers[0].content == answers[1].content
        assert await Payment.objects.acount() == 3

    def test_an_order_that_is_sent_twice(self) -> None:
        with self.captureOnCommitCallbacks(execute=True):
            first = self.post("/order/")
        again = self.post("/order/")
        assert (first.status_code, again.status_code) == (202, 200)
        assert again.json()["result"] == "paid order"
        assert paid("order") == 1

    def test_an_order_that_is_sent_twice_before_the_commit(self) -> None:
        assert [self.post("/order/").status_code for _ in range(2)] == [202, 202]
        assert paid("order") == 0

    def post(self, path: str) -> Any:
        key = f'"{path}"'
        return self.client.post(path, {"order": "order"}, HTTP_IDEMPOTENCY_KEY=key)


class ForReal(TransactionTestCase):
    """What is committed is committed, and deleted after each test."""

    def test_a_payment(self) -> None:
        assert paid("order") == 0
        assert pay.delay("order").get() == pay.delay("order").get()
        assert paid("order") == 1

    test_the_same_payment_in_another_test = test_a_payment

    def test_a_charge(self) -> None:
        assert charge.delay("order").get() == charge.delay("order").get()
        assert paid("order") == 1
        assert paid("follow-up of order") == 1

    test_the_same_charge_in_another_test = test_a_charge


class KilledAtEachLine(TransactionTestCase):
    """Deliveries in processes of their own, which see what is committed."""

    def test_a_charge_and_its_record_agree(self) -> None:
        if connection.vendor == "sqlite":
            self.skipTest("the test database is in memory")
        report = crash_matrix(charge, arguments=lambda order: [order], effects=paid)
        assert report.expected == 1
        assert charge.idempotency_policy.lease_ms > 1000

    def test_one_that_is_written_beside_its_record_is_made_twice(self) -> None:
        if connection.vendor == "sqlite":
            self.skipTest("the test database is in memory")
        with self.assertRaisesRegex(AssertionError, "DOUBLED .* Payment.objects.create"):
            crash_matrix(pay_carelessly, arguments=lambda order: [order], effects=paid)
