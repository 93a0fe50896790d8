"""Where Spark looks for the data source ``penstock``: a module of this name, this class in it."""

from __future__ import annotations

from penstock.spark.source import PenstockSource as DefaultSource

__all__ = ["DefaultSource"]
