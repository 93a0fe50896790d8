"""The process of a pipeline: from the file to the end in good order.

::

    settings checked ─▶ pages ─▶ Spark ─▶ parts ─▶ SIGTERM, SIGINT ─▶ queries stopped, jobs cut off
                                            │                           ─▶ Spark stopped: exit 0
                                            ├─ another pipeline has taken over ─▶ the same: exit 4
                                            └─ Spark has ended by itself ─▶ the same: exit 1

The JVM ends with this process, however that ends: it reads a pipe that this process holds open.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from penstock import limits
from penstock.clock import SystemClock
from penstock.errors import PenstockError
from penstock.pipeline.file import located
from penstock.pipeline.pages import Pages, RoutingWatch
from penstock.pipeline.supervisor import FAILED, Ending, Supervisor
from penstock.server import logs
from penstock.server.config import parse_address
from penstock.server.process import Stop

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.pipeline.file import Settings

log = logging.getLogger("penstock.pipeline")


def run(path: Path, settings: Settings) -> NoReturn:
    """Run a pipeline until SIGTERM or SIGINT, in the main thread, and end the process."""
    logs.configure_logs(settings.log.level, settings.log.format)
    # It says that each connection to the JVM ends, and shows the stack of what a part is told, too.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    # Some of it goes to the root: what a filter of that sees is logged there alone.
    logging.getLogger().addFilter(lambda record: "py4j" not in record.pathname)
    code = asyncio.run(_Process(path, settings).run())
    logs.drain()
    # Threads may be left that wait for Spark or for the broker: nothing is lost by their end.
    os._exit(code)


class _Process:
    """One pipeline from its start to its end."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self._path, self._settings = path, settings
        self._clock = SystemClock()
        self._pages = Pages(self._clock)
        self._work: Any = None
        self._supervisor: Supervisor | None = None
        self._ending: Ending | None = None

    async def run(self) -> int:
        """Start, wait for an end, and end in order."""
        loop = asyncio.get_running_loop()
        stop, over = Stop(loop), asyncio.Event()
        pages = None
        if self._settings.operations.address != "off":
            host, port = parse_address(self._settings.operations.address)
            pages = self._pages.listener(host, port)
            await pages.start()
            host, port = pages.address
            logs.say(f"operations at http://{host}:{port}/ready and /metrics")

        def ended(ending: Ending) -> None:
            self._ending = self._ending or ending
            loop.call_soon_threadsafe(over.set)

        # Signals stay with this thread: Spark would take SIGINT for itself.
        start = threading.Thread(
            target=self._start, args=(ended,), name="penstock-spark", daemon=True
        )
        start.start()
        waits = [loop.create_task(each.wait()) for each in (stop.begun, over)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        self._pages.why = "stopping"
        if self._ending is not None:
            log.error("%s", self._ending.why)
        in_order = asyncio.Event()
        args = (lambda: loop.call_soon_threadsafe(in_order.set),)
        threading.Thread(target=self._stop, args=args, name="penstock-stop", daemon=True).start()
        waits += [loop.create_task(each.wait()) for each in (stop.at_once, in_order)]
        await asyncio.wait(waits[2:], return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()
        if pages is not None:
            await pages.stop(0)
        log.info("stopped")
        if not in_order.is_set():
            return FAILED
        return self._ending.code if self._ending else 0

    def _start(self, ended: Any) -> None:
        """Start Spark, then the parts."""
        try:
            from penstock.pipeline.parts import Work, start_spark  # noqa: PLC0415 - takes a second
            from penstock.spark.sessions import one_line  # noqa: PLC0415

            begin = self._clock.seconds()
            self._work = Work(self._path, self._settings, start_spark(self._settings))
            log.info("Spark runs, after %.1f s", self._clock.seconds() - begin)
            lanes = self._work.lanes()
            supervisor = Supervisor(
                lanes, self._clock, ended=ended, lost=self._work.lost, text_of=one_line
            )
            self._pages.parts = supervisor.parts
            self._supervisor = supervisor
            supervisor.start()
            place = located(self._settings, patient=False)
            self._pages.watch = RoutingWatch(place, supervisor.hurry)
            self._pages.watch.start()
            self._pages.why = ""
        except Exception as error:
            text = str(error) if isinstance(error, PenstockError) else repr(error)
            ended(Ending(FAILED, f"Spark can't be started: {text}"[: limits.PIPELINE_LINE_CHARS]))

    def _stop(self, done: Any) -> None:
        """End the parts, then Spark; each has a bound, and is cut off beyond it."""
        seconds = limits.PIPELINE_STOP_MS / 1000
        if self._pages.watch is not None:
            self._pages.watch.stop()
        supervisor = self._supervisor
        if supervisor is not None:
            supervisor.stop()
            # A short job may end by itself.
            if not supervisor.join(seconds / 4):
                self._work.cancel(supervisor.parts)
                if not supervisor.join(seconds * 3 / 4):
                    log.warning("some parts did not stop in time: they are cut off")
        if self._work is not None:
            self._work.end(seconds / 2)
        done()
