"""Logs: lines of text, or one JSON object each, on standard error.

The access log of requests is in :mod:`penstock.server.metrics`.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

_encode: Final = msgspec.json.Encoder(enc_hook=str).encode


class JsonLines(logging.Formatter):
    """A record as a JSON object; ``fields`` of the record are put beside the rest."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one line."""
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _encode(line).decode()


class TextLines(logging.Formatter):
    """A record as a line for people."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one line, and a traceback below it if there is one."""
        fields = getattr(record, "fields", {})
        parts = [_time(record), record.levelname.lower(), record.name, record.getMessage()]
        parts += [f"{name}={value}" for name, value in fields.items()]
        if record.exc_info:
            parts.append(f"\n{self.formatException(record.exc_info)}")
        return " ".join(parts)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def configure(level: str, form: str) -> None:
    """Log everything of this process to standard error, from a level on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # At debug asyncio would log every read.
    logging.getLogger("asyncio").setLevel(max(logging.INFO, logging.getLogger().level))
