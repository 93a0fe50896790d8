"""Order where it matters: a FIFO queue with the account as the group.

Deposits and withdrawals of one account must be booked in the order they came; those of different
accounts need not wait for each other. On a FIFO queue a group is given to one worker at a time
and in order, so three workers can share the queue without a lock among them.

    python examples/fifo_accounts.py
"""

from __future__ import annotations

import tempfile
import threading
from collections import defaultdict

import msgspec

import penstock
from penstock import Broker, Message

ACCOUNTS = [f"account-{letter}" for letter in "abcdef"]
BOOKINGS_EACH = 50


class Bank:
    """Balances, and who booked what."""

    def __init__(self) -> None:
        self.balances: dict[str, int] = defaultdict(int)
        self.booked_by: dict[str, list[str]] = defaultdict(list)
        self.refused = 0

    def book(self, account: str, amount: int, worker: str) -> None:
        """Book an amount; an account must never be overdrawn."""
        if self.balances[account] + amount < 0:
            self.refused += 1
        else:
            self.balances[account] += amount
        self.booked_by[account].append(worker)


def work(broker: Broker, bank: Bank, name: str) -> None:
    """Book what there is, until the queue has been empty for a while."""
    while deliveries := broker.claim("bookings", limit=5, wait_ms=200, consumer=name):
        for delivery in deliveries:
            bank.book(delivery.group, msgspec.json.decode(delivery.payload), name)
        broker.ack([delivery.receipt for delivery in deliveries])


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as directory,
        penstock.open(f"rocksdb:{directory}") as broker,
    ):
        broker.create_queue("bookings", ordering="fifo")
        # A deposit, then a withdrawal of the same sum: out of order the account is overdrawn.
        for number in range(BOOKINGS_EACH):
            broker.publish(
                Message(msgspec.json.encode(amount), {"queue": "bookings"}, group=account)
                for account in ACCOUNTS
                for amount in (number + 1, -(number + 1))
            )
        print(f"{broker.stats('bookings').available} bookings for {len(ACCOUNTS)} accounts")

        bank = Bank()
        workers = [
            threading.Thread(target=work, args=(broker, bank, f"worker-{number}"))
            for number in (1, 2, 3)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

        for account in ACCOUNTS:
            hands = len(set(bank.booked_by[account]))
            count = len(bank.booked_by[account])
            print(
                f"    {account}: {count} bookings by {hands} workers in turn, "
                f"balance {bank.balances[account]}"
            )
        print(f"withdrawals refused because they came before their deposit: {bank.refused}")


if __name__ == "__main__":
    main()
