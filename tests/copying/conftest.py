from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.copying.places import Places

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def places(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Places]:
    made = Places(tmp_path, request)
    yield made
    made.drop()
