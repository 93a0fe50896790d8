"""Spark over a broker: the data source ``penstock``, the route job, and pipelines of your own.

This package is the only one that imports pyspark; ``import penstock`` never does.
"""

from __future__ import annotations

from penstock.spark.route import Pipeline, pipeline
from penstock.spark.sessions import session
from penstock.spark.source import PenstockSource

__all__ = ["PenstockSource", "Pipeline", "pipeline", "session"]
