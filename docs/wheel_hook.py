"""Puts the documentation site into the wheel, if ``make docs`` has built it, for the console."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class DocumentationSite(BuildHookInterface[Any]):
    """Adds ``build/site`` to a wheel; an editable install finds it in the checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the directory and its place in the wheel."""
        site = Path(self.root, "build", "site")
        if version != "editable" and (site / "index.html").is_file():
            build_data["force_include"][str(site)] = "penstock/server/console/site"
