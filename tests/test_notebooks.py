"""Every notebook runs from top to bottom, and is kept with what it shows."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path):
    notebook = nbformat.read(path, as_version=4)
    shown = [len(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]
    nbclient.NotebookClient(
        notebook,
        timeout=300,
        coalesce_streams=True,  # what is printed slowly is one output too
        resources={"metadata": {"path": ROOT}},
    ).execute()
    again = [len(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]
    assert shown == again and any(shown)
