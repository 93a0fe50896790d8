"""Route orders by what they do not say themselves: the tier of the customer.

Messages name a customer; a table says which customers are gold. A join between log and queues
makes ``tier`` an attribute that filters can see. Run ``python examples/spark_enrich.py``; it
starts a broker, a Flight server and Spark on this machine, and needs nothing else.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql.functions import broadcast, col

import penstock
import penstock.spark
from penstock.server import in_process_server
from penstock.spark.route import AVAILABLE_NOW, status

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TIERS = [("ada", "gold"), ("bob", "tin"), ("cy", "gold")]
ORDERS = ["ada", "bob", "cy", "dan", "ada"]


def main(spark: SparkSession | None = None) -> dict[str, list[str]]:
    """Return the orders that each queue got."""
    spark = spark or penstock.spark.session("local[2]")
    customers = spark.createDataFrame(TIERS, "customer string, tier string")

    def enrich(log: DataFrame) -> DataFrame:
        named = log.withColumn("customer", col("attributes")["customer"])
        return named.join(broadcast(customers), "customer", "left")

    with (
        tempfile.TemporaryDirectory() as directory,
        penstock.open(f"rocksdb:{directory}/store", routing="pipeline") as broker,
        in_process_server(broker) as server,
    ):
        location = server.location
        broker.create_queue("vip", filter="tier = 'gold'")
        broker.create_queue("unknown", filter="tier IS NULL")
        broker.create_queue("all", filter="customer IS NOT NULL")
        broker.publish(
            penstock.Message(f"order {number}".encode(), {"customer": customer})
            for number, customer in enumerate(ORDERS)
        )
        print("to be routed:", status(location).behind)
        pipeline = penstock.spark.pipeline(spark, location).transform(enrich)
        query = pipeline.start(checkpoint=Path(directory) / "checkpoint", trigger=AVAILABLE_NOW)
        query.awaitTermination()
        print("to be routed:", status(location).behind)
        found = {
            queue.name: [(entry.payload or b"").decode() for entry in broker.browse(queue.name)]
            for queue in broker.queues()
        }
    for name, orders in found.items():
        print(f"{name:8} {', '.join(orders)}")
    return found


if __name__ == "__main__":
    main()
