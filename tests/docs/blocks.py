"""Finds the Python of a page of the docs, and runs it."""

from __future__ import annotations

import doctest
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def blocks_of(path: Path) -> list[str]:
    """Return the blocks marked ``python``; those marked ``py`` are fragments that don't run."""
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def run_blocks(path: Path, place: str = "", here: str = "") -> dict[str, Any]:
    """Run all blocks of a page one after the other, and return the names that they leave.

    ``here`` is taken for a ``place`` that the page names.
    """
    names: dict[str, Any] = {"__name__": "docs"}
    for number, text in enumerate(blocks_of(path), 1):
        assert place in text
        block = text.replace(place, here)
        where = f"{path.name}, block {number}"
        if ">>>" not in block:
            exec(compile(block, where, "exec"), names)
            continue
        examples = doctest.DocTestParser().get_doctest(block, {}, where, where, 0)
        examples.globs = names
        said: list[str] = []
        result = doctest.DocTestRunner(verbose=False).run(
            examples, out=said.append, clear_globs=False
        )
        assert not result.failed, "".join(said)
    return names
