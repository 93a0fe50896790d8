"""The audit of what memory believes: it is held against a second reading of the disk.

Only of a store whose disk is as it should be. Otherwise a repair writes to it first, and memory is
rebuilt from that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.store.check_report import Kind

if TYPE_CHECKING:
    from penstock.store.check_report import Findings

__all__ = ["check_memory"]


def check_memory(findings: Findings) -> None:
    """Compare memory with what it would be if the store were opened now."""
    core = findings.core
    # Reads that met a damaged record have counted it off, to be written with the next commit.
    if findings.found or core.has_aside:
        return
    believed, true = core.beliefs(), core.reread().beliefs()
    for key in sorted(believed.facts.keys() | true.facts.keys(), key=repr):
        says, is_ = believed.facts.get(key), true.facts.get(key)
        if says != is_:
            _violate(findings, key, f"memory has {says!r:.200}, the disk {is_!r:.200}")
    for key, is_ in sorted(true.bounds.items(), key=repr):
        says = believed.bounds.get(key)
        if says is None or says > is_:
            text = f"memory looks from {says!r:.200} on, and there is something at {is_!r:.200}"
            _violate(findings, key, text)


def _violate(findings: Findings, key: tuple[object, ...], text: str) -> None:
    findings.count("differences between memory and disk")
    name = ": ".join(str(part) for part in key)
    findings.violate(Kind.MEMORY, "memory", name.encode(), f"{name}: {text}")
