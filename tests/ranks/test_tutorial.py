"""Runs the tutorial notebook from top to bottom; the nightly run uses a kernel, as Jupyter does."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tutorial.ipynb"


@pytest.fixture(scope="module")
def notebook() -> Any:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed; `make test` installs it")
    return nbformat.read(NOTEBOOK, as_version=4)


def test_the_tutorial_is_kept_without_outputs(notebook):
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(cells) > 5
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)


def said_by(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


TOLD = (
    "rank 1 of 2 is process",
    "\nrank 0 received 2\n",
    "rank 1 passed [10.0, 11.0, 12.0] and received [10.0, 12.0, 14.0]",
    "all_reduce(float32, 3",
    "epoch 4: loss",
    "of the held-out digits are recognized",
    "world size 1: training starts at step 10",
    "step 20: loss",
)


def run_cells(sources: list[str], directory: str) -> str:
    """Runs the code of the cells in one namespace, and returns the output of the cells and of their ranks."""
    os.chdir(directory)
    with open("printed", "a") as file:
        os.dup2(file.fileno(), 1)  # ranks are processes that inherit this descriptor
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for source in sources:
        exec(compile(source, "cell", "exec"), namespace)
        sys.stdout.flush()
    return Path("printed").read_text()


def test_the_tutorial_runs_from_top_to_bottom(ranks, notebook, tmp_path):
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    (told,) = ranks(1)(run_cells, cells, str(tmp_path))
    for words in TOLD:
        assert words in told, told


@pytest.mark.soak
@pytest.mark.timeout(400)  # for a busy machine; the test takes about 16 s of CPU time
def test_the_tutorial_runs_in_a_kernel(notebook, tmp_path):
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed; `make test` installs it")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed; `make test` installs it")
    client = nbclient.NotebookClient(
        notebook,
        timeout=300,
        startup_timeout=200,
        iopub_timeout=200,  # nbclient drops output that arrives later than this after its cell (default 4 s)
        raise_on_iopub_timeout=True,
        kernel_name="python3",
        resources={"metadata": {"path": tmp_path}},
    )
    client.execute()
    told = "\n".join(map(said_by, (cell for cell in notebook.cells if cell.cell_type == "code")))
    for words in TOLD:
        assert words in told, told
