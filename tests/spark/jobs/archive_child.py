"""Archives, and kills itself at a step: location, path and the step are its arguments."""

from __future__ import annotations

import os
import signal
import sys

from penstock.spark import session
from penstock.spark.jobs import archive


def main(location: str, path: str, step: str) -> None:
    """Run as far as the step."""

    def tell(now: str) -> None:
        if now == step:
            os.kill(os.getpid(), signal.SIGKILL)

    quick = {
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    }
    spark = session("local[1]", conf={"spark.log.level": "OFF", **quick})
    archive(spark, location, path, progress=tell)


if __name__ == "__main__":
    main(*sys.argv[1:])
