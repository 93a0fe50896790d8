"""Parts that are kept running: again if they fail, by the clock, and not against another."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest
from tests.waiting import wait_until

from penstock.clock import ManualClock
from penstock.pipeline.supervisor import (
    FAILED,
    TAKEN_OVER,
    Ending,
    Part,
    Schedule,
    Superseded,
    Supervisor,
    pause_ms,
    unready,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DAY_MS = 86_400_000
HOUR_MS = 3_600_000


def test_a_pause_doubles_up_to_five_minutes() -> None:
    pauses = [pause_ms(tries) for tries in range(1, 12)]
    assert pauses[:4] == [1_000, 2_000, 4_000, 8_000]
    assert pauses[-2:] == [300_000, 300_000]
    assert pause_ms(10_000) == 300_000


@pytest.mark.parametrize(
    ("schedule", "now", "expected"),
    [
        (Schedule(), 5, 5),
        (Schedule(60_000), 5, 60_005),
        (Schedule(DAY_MS, 3 * HOUR_MS), 10 * DAY_MS, 10 * DAY_MS + 3 * HOUR_MS),
        (Schedule(DAY_MS, 3 * HOUR_MS), 10 * DAY_MS + 3 * HOUR_MS, 11 * DAY_MS + 3 * HOUR_MS),
        (Schedule(6 * HOUR_MS, 3 * HOUR_MS), 10 * DAY_MS + 4 * HOUR_MS, 10 * DAY_MS + 9 * HOUR_MS),
        (Schedule(HOUR_MS, 23 * HOUR_MS), 10 * DAY_MS + 1, 10 * DAY_MS + HOUR_MS),
    ],
)
def test_when_a_run_is_due(schedule: Schedule, now: int, expected: int) -> None:
    assert schedule.next(now) == expected


class Stage:
    """A supervisor on a clock that the test moves, and what it has ended with."""

    def __init__(self) -> None:
        self.clock = ManualClock(10 * DAY_MS)
        self.endings: list[Ending] = []
        self.made: list[Supervisor] = []
        self.lost = ""

    def run(self, *lanes: list[Part]) -> Supervisor:
        supervisor = Supervisor(
            lanes, self.clock, ended=self.endings.append, lost=lambda: self.lost
        )
        self.made.append(supervisor)
        supervisor.start()
        return supervisor


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    for each in stage.made:
        each.stop()
        assert each.join(60)


def reached(found: list[int], count: int) -> bool:
    return len(found) == count


def failing(times: int) -> tuple[Callable[[Part], int], list[int]]:
    """Return a run that fails so many times, and the list of its tries."""
    tries: list[int] = []

    def run(_: Part) -> int:
        tries.append(len(tries))
        if len(tries) <= times:
            raise ValueError(f"try {len(tries)}\nand more")
        return 7

    return run, tries


def test_a_part_that_fails_is_started_again_and_the_others_go_on(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    run, tries = failing(2)
    other_run, others = failing(0)
    part, other = Part("route", run, Schedule(10)), Part("archive", other_run, Schedule(10))
    stage.run([part], [other])
    wait_until(lambda: part.status.state == "failed" and other.status.runs == 1)
    assert part.status.next_at == stage.clock.now_ms() + 1_000
    assert part.status.last_error == "try 1 and more"
    assert unready([part, other]) == ["route: try 1 and more"]
    # The other goes on meanwhile.
    for count in range(2, 5):
        stage.clock.advance(10)
        wait_until(partial(reached, others, count))
    assert len(tries) == 1
    stage.clock.advance(1_000)
    wait_until(lambda: part.status.failures == 2)
    assert part.status.next_at == stage.clock.now_ms() + 2_000
    stage.clock.advance(2_000)
    wait_until(lambda: part.status.runs == 1)
    wait_until(lambda: part.status.state == "waiting")
    assert (part.status.restarts, part.status.rows, part.tries) == (2, 7, 0)
    assert unready([part, other]) == []
    said = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert [each.partition(":")[0] for each in said] == [
        "route failed, it is started again in 1 s",
        "route failed, it is started again in 2 s",
    ]


def test_a_part_is_started_at_once_when_what_it_failed_for_is_over(stage: Stage) -> None:
    run, tries = failing(1)
    part = Part("route", run, Schedule(10))
    supervisor = stage.run([part])
    wait_until(lambda: part.status.state == "failed")
    supervisor.hurry()
    wait_until(lambda: part.status.runs == 1)
    assert len(tries) == 2


def test_jobs_of_the_clock_run_one_at_a_time(stage: Stage) -> None:
    inside, order = threading.Lock(), []

    def run(part: Part) -> int:
        assert inside.acquire(blocking=False)
        order.append(part.name)
        inside.release()
        return 0

    lane = [
        Part("optimize", run, Schedule(DAY_MS, 3 * HOUR_MS)),
        Part("report", run, Schedule(DAY_MS, 2 * HOUR_MS)),
    ]
    stage.run(lane)
    # They have only to wait for their time.
    assert unready(lane) == []
    stage.clock.advance(3 * HOUR_MS)
    wait_until(lambda: len(order) == 2)
    assert order == ["report", "optimize"]
    wait_until(lambda: all(each.status.state == "waiting" for each in lane))
    assert lane[1].status.next_at == 11 * DAY_MS + 2 * HOUR_MS


def test_what_another_pipeline_has_taken_over_ends_everything(stage: Stage) -> None:
    def run(_: Part) -> int:
        raise Superseded("another pipeline has taken over")

    other = Part("archive", lambda _: 0, Schedule(10))
    supervisor = stage.run([Part("route", run)], [other])
    assert supervisor.join(60)
    assert stage.endings == [Ending(TAKEN_OVER, "route: another pipeline has taken over")]
    assert other.status.state == "stopped"


def test_without_spark_no_part_can_go_on(stage: Stage) -> None:
    stage.lost = "Spark has ended"
    run, tries = failing(100)
    supervisor = stage.run([Part("route", run)])
    assert supervisor.join(60)
    assert len(tries) == 1
    assert stage.endings == [Ending(FAILED, "Spark has ended; route said: try 1\nand more")]


def test_a_part_that_goes_on_counts_for_itself_and_is_told_to_stop(stage: Stage) -> None:
    def run(part: Part) -> int:
        part.worked(stage.clock.now_ms(), runs=3)
        assert part.stopping.wait(60)
        raise OSError("it was cut off")

    part = Part("route", run)
    supervisor = stage.run([part])
    wait_until(lambda: part.status.runs == 3)
    assert unready([part]) == []
    supervisor.stop()
    assert supervisor.join(60)
    # An error of the end is none.
    assert (part.status.failures, part.status.state, stage.endings) == (0, "stopped", [])
