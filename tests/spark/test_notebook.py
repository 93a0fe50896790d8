"""The notebook of the examples runs from top to bottom."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

import nbformat
from nbclient import NotebookClient

pytestmark = [pytest.mark.spark, pytest.mark.slow]

NOTEBOOK = Path(__file__).parents[2] / "examples" / "penstock.ipynb"


def shown(cell: nbformat.NotebookNode) -> str:
    """Return the text that a cell prints and the value that it shows."""
    parts = [
        each.get("text") or each.get("data", {}).get("text/plain", "") for each in cell.outputs
    ]
    return "\n".join(parts)


@pytest.mark.usefixtures("java")
def test_the_notebook_runs(tmp_path: Path) -> None:
    notebook = nbformat.reads(NOTEBOOK.read_text(), as_version=4)  # type: ignore[no-untyped-call]
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = [shown(cell) for cell in cells]
    assert said[0].startswith("'grpc://127.0.0.1:")
    assert said[2].endswith("(334, 200)")
    assert said[4].endswith("(286, 48)")
    assert ": the card was refused|customer-3|2       |48   |" in said[6]
    assert "customer-6" in said[7]
    assert "|books|released|      96|" in said[8]
    assert said[9] == "1"
