"""Hooks of the documentation site: links into the source tree become plain text there."""

from __future__ import annotations

import re
from typing import Any

_SOURCE_LINK = re.compile(r"\[([^\]]+)\]\(\.\./(?:src|tests|benchmarks|examples)/[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Drop the target of links that leave ``docs/``: the site has no copy of the source."""
    return _SOURCE_LINK.sub(r"\1", markdown)
