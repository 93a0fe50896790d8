"""A module that can't be imported in a child process."""

from __future__ import annotations

from multiprocessing import parent_process
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock import Delivery

if parent_process() is not None:
    raise RuntimeError("no children, please")


def handler(delivery: Delivery) -> None:
    pass
