"""Tables of the docs that are written from the code are as the code has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.docs.tables import DOCS, TABLES, pages, written

if TYPE_CHECKING:
    from pathlib import Path


def test_every_table_has_its_page() -> None:
    text = "".join(path.read_text() for path in pages())
    assert {name: text.count(f"<!-- table: {name} -->") for name in TABLES} == dict.fromkeys(
        TABLES, 1
    )


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(DOCS)))
def test_a_table_is_as_the_code_has_it(path: Path) -> None:
    assert path.read_text() == written(path.read_text()), "run python -m tests.docs.tables"
