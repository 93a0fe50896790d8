"""Drives a parser with a coverage-guided fuzzer: ``python tests/fuzz/run.py http_wire 60``.

Needs atheris, which ``make fuzz`` installs. What was found to be interesting is kept beside the
virtual environment's packages, for the next run; an input that fails is left there, too.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2])]

PARSERS = ("http_wire", "sqs_json", "sqs_query", "native_frames", "filter_text", "signature")


def main(name: str, seconds: str = "60") -> None:
    """Fuzz one parser for a while; ends with an error if an input fails."""
    # By name, since it is there on some systems only.
    atheris: Any = import_module("atheris")
    if name not in PARSERS:
        sys.exit(f"{name!r} is none of {', '.join(PARSERS)}")
    atheris.enabled_hooks.add("str")
    with atheris.instrument_imports(include=["penstock"]):
        driver = import_module(f"tests.fuzz.{name}")
    corpus = Path(sys.prefix) / "fuzz" / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(driver.SEEDS):
        (corpus / f"seed-{number}").write_bytes(seed)
    options = [f"-max_total_time={seconds}", "-timeout=10", "-rss_limit_mb=2048", "-max_len=4096"]
    options += ["-print_final_stats=1", "-verbosity=0", f"-artifact_prefix={corpus.parent}/{name}-"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], driver.one)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
