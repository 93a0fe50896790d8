"""A program whose handler of signals raises in the middle of the library, beside a second thread.

``child.py URL SECONDS ERROR SEED``: the main thread uses every verb of a broker under a timer, as
programs with soft time limits do, while a second thread publishes. Then the store is audited and
emptied, and what both were told is held to what it gives. A hang ends the process.
"""

from __future__ import annotations

import faulthandler
import random  # noqa: TID251 - a seed replays it
import signal
import sys
import threading
import traceback
from collections import Counter

import penstock
from penstock import Broker, Message, OutcomeStatus
from penstock.clock import SystemClock

HANG_S = 45
# Messages of a queue from which on the second thread waits.
MOST_WAITING = 200


class LateError(Exception):
    """What a soft time limit raises."""


ERRORS = {"alarm": LateError, "interrupt": KeyboardInterrupt}
clock = SystemClock()


class Program:
    """The verbs of the main thread, and what it was told."""

    def __init__(self, broker: Broker, error: type[BaseException], seed: int) -> None:
        self.broker, self.error = broker, error
        self.rng = random.Random(seed)
        self.armed = False
        self.interrupts = 0
        self.verbs: Counter[str] = Counter()
        self.wrong: list[BaseException] = []
        self.published: set[int] = set()
        self.acked: set[tuple[str, int]] = set()
        self.again: set[int] = set()

    def ring(self, *_: object) -> None:
        """Handle the signal."""
        if self.armed:
            self.armed = False
            self.interrupts += 1
            raise self.error

    def run(self, until: float) -> None:
        """Call verbs, each for as long as the timer lets it, until a time."""
        steps = [self.publish, self.work, self.work, self.give_back, self.consume, self.look]
        for step in steps:
            # What is loaded when it is used is loaded.
            step()
        while clock.seconds() < until:
            step = self.rng.choice(steps)
            try:
                self.armed = True
                signal.setitimer(signal.ITIMER_REAL, self.rng.uniform(0.0001, 0.004))
                step()
                self.armed = False
                self.verbs[step.__name__] += 1
            except self.error:
                pass
            except Exception as error:
                self.armed = False
                self.wrong.append(error)
                if len(self.wrong) > 20:
                    return
        self.armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def publish(self) -> None:
        """Publish messages into both queues."""
        self.published |= {*self.broker.publish([Message(b"main", {"kind": "both"})] * 3)}

    def work(self) -> None:
        """Claim and ack."""
        queue = self.rng.choice("ab")
        taken = self.broker.claim(queue, limit=4, wait_ms=self.rng.choice([0, 0, 2, 20]))
        self.note(queue, taken)
        receipts = [each.receipt for each in taken]
        if receipts and self.rng.random() < 0.2:
            self.broker.extend(receipts, lease_ms=2_000)
        outcomes = self.broker.ack(receipts)
        self.settle(queue, taken, outcomes)

    def give_back(self) -> None:
        """Claim and release."""
        taken = self.broker.claim("a", limit=2)
        self.note("a", taken)
        self.broker.release([each.receipt for each in taken], delay_ms=self.rng.choice([0, 5]))

    def consume(self) -> None:
        """Ack what a consumer gives, wait for an outcome, and close it."""
        with self.broker.consume("b", prefetch=5, wait_ms=5) as consumer:
            for delivery in consumer:
                self.note("b", [delivery])
                settlement = delivery.ack()
                if self.rng.random() < 0.3:
                    self.settle("b", [delivery], [settlement.result()])
                if self.rng.random() < 0.1:
                    break

    def look(self) -> None:
        """Read what there is."""
        self.broker.stats("a")
        self.broker.browse("b", state="available", limit=5)
        self.broker.sweep()

    def note(self, queue: str, taken: list[penstock.Delivery]) -> None:
        """Note a delivery; of a message that is known to be done it is an error."""
        for each in taken:
            if (queue, each.message_id) in self.acked:
                self.again.add(each.message_id)

    def settle(
        self, queue: str, taken: list[penstock.Delivery], outcomes: list[penstock.Outcome]
    ) -> None:
        """Note what is done."""
        done = {each.receipt for each in outcomes if each.status is OutcomeStatus.DONE}
        self.acked |= {(queue, each.message_id) for each in taken if each.receipt in done}


def publish(
    broker: Broker, ended: threading.Event, told: set[int], failed: list[BaseException]
) -> None:
    """Publish in the second thread, until much waits."""
    while not ended.wait(0.001):
        try:
            told |= {*broker.publish([Message(b"other", {"kind": "both"})] * 2)}
            while broker.stats("a").available > MOST_WAITING and not ended.is_set():
                ended.wait(0.005)
        except BaseException as error:
            failed.append(error)
            return


def account(program: Program, told: set[int]) -> None:
    """Work through what is left, and compare it with what the threads were told."""
    broker = program.broker
    for queue in "ab":
        while True:
            taken = broker.claim(queue, limit=100, wait_ms=10)
            program.note(queue, taken)
            broker.ack([each.receipt for each in taken])
            stats = broker.stats(queue)
            if not stats.available + stats.delayed + stats.in_flight:
                break
        done: list[int] = []
        cursor = None
        while True:
            page = broker.browse(queue, state="done", limit=1_000, cursor=cursor)
            done += [each.message_id for each in page]
            cursor = page.next_cursor
            if cursor is None:
                break
        assert len(done) == len(set(done)) == stats.done == stats.acked_total, stats
        assert stats.enqueued_total == stats.done + stats.failed, stats
        assert not told - set(done), f"lost: {told - set(done)}"
        acked = {message_id for name, message_id in program.acked if name == queue}
        assert not acked - set(done), f"acked, and not done: {acked - set(done)}"
    assert not program.again, f"acked, and delivered again: {program.again}"
    assert broker.store_stats().published_total == stats.enqueued_total


def main(url: str, seconds: float, error: type[BaseException], seed: int) -> None:
    """Run the program; raise if anything is not as it must be."""
    faulthandler.dump_traceback_later(seconds + HANG_S, exit=True)
    ended, told, failed = threading.Event(), set[int](), list[BaseException]()
    with penstock.open(url) as broker:
        program = Program(broker, error, seed)
        for queue in "ab":
            broker.create_queue(
                queue,
                filter="kind = 'both'",
                lease_ms=1_000,
                max_attempts=100,
                backoff_base_ms=0,
                bucket_exponent=4,
            )
        signal.signal(signal.SIGALRM, program.ring)
        other = threading.Thread(target=publish, args=(broker, ended, told, failed))
        other.start()
        program.run(clock.seconds() + seconds)
        ended.set()
        other.join()
        for wrong in (*program.wrong, *failed):
            traceback.print_exception(wrong)
        assert not program.wrong
        assert not failed
        report = broker.check()
        assert not report.found, report.violations
        account(program, told | program.published)
        report = broker.check()
        assert not report.found, report.violations
    sys.stdout.write(f"{program.interrupts} interrupts, {len(told)} published beside\n")
    assert program.interrupts
    assert all(program.verbs.values()), program.verbs


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), ERRORS[sys.argv[3]], int(sys.argv[4]))
