"""Copies with small pages, and is killed when so many of them were loaded or compared."""

from __future__ import annotations

import os
import signal
import sys

from penstock import copying
from penstock.store import transfer


def main(source: str, target: str, step: str, count: int) -> None:
    transfer.PAGE_MESSAGES = 5  # type: ignore[misc]
    copying.SYNC_PAGES = 1  # type: ignore[misc]
    left = count

    def told(text: str, _done: int, _total: int) -> None:
        nonlocal left
        left -= text == step
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    copying.copy(source, target, progress=told)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
