"""The parts of the nccl engine that need neither a GPU nor other ranks."""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import os
import subprocess
import sys
import threading
import time

import nccl_stub
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launching import wait_until

import paceline as dist
from paceline.comm.engine.codes import DTYPE_CODES, ReduceOp
from paceline.comm.engine.failures import RankIdentity
from paceline.comm.engine.nccl import library, peers
from paceline.comm.engine.nccl.call_stream import CallWatch
from paceline.comm.engine.nccl.communicator import Communicator, NcclTimeoutError
from paceline.comm.engine.nccl.engine import missing_piece
from paceline.comm.engine.nccl.library import (
    UNIQUE_ID_BYTES,
    Config,
    LibraryMissingError,
    NcclError,
    UniqueId,
    without_blocking,
)
from paceline.comm.engine.nccl.peers import AbsentError, NcclPeer, SharedGpuError, exchange_peers
from paceline.comm.engine.nccl.plan import DataType, NcclCall, NcclFunction, NcclReduction, RedOp, find_reduction, plan
from paceline.comm.schedule.steps import Operation

MEMBERS = (RankIdentity(0, "alpha", 11), RankIdentity(1, "beta", 12))


@pytest.fixture
def search(monkeypatch):
    """`loader.find`, which otherwise finds once a process."""
    library.find.cache_clear()
    yield monkeypatch
    library.find.cache_clear()


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_without_cuda_the_engine_names_the_torch_that_is_needed():
    assert "built without CUDA" in str(missing_piece())
    assert not dist.is_nccl_available()
    with pytest.raises(ValueError, match=r"rank 0: backend 'nccl' cannot be used: this torch .* without CUDA"):
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


def test_a_library_that_is_not_there_is_named_with_the_variable(search):
    search.setenv(library.LIBRARY_VARIABLE, "/nowhere/libnccl.so.2")
    with pytest.raises(LibraryMissingError, match=r"/nowhere/libnccl.so.2 cannot be loaded .*PACELINE_NCCL_LIBRARY"):
        library.find()


def test_a_library_of_something_else_is_refused(search):
    search.setenv(library.LIBRARY_VARIABLE, ctypes.util.find_library("m"))
    with pytest.raises(LibraryMissingError, match=r"is no NCCL library, or one older than 2\.14\.0"):
        library.find()


def test_a_library_that_is_too_old_is_refused_with_the_reason(search, nccl_library):
    search.setenv(library.LIBRARY_VARIABLE, str(nccl_library))
    search.setenv("STUB_NCCL_VERSION", "21003")
    with pytest.raises(LibraryMissingError, match=r"is NCCL 2\.10\.3, older than 2\.14\.0, .* without blocking"):
        library.find()


def test_a_library_that_is_loaded_already_is_taken(search, nccl_library, tmp_path):
    search.delenv(library.LIBRARY_VARIABLE, raising=False)
    loaded = tmp_path / "libnccl.so.2"
    loaded.write_bytes(nccl_library.read_bytes())
    kept = ctypes.CDLL(str(loaded))
    found = library.find()
    assert found.path == str(loaded) == kept._name
    assert library.format_version(found.version) == "2.21.5"


def test_structures_have_the_sizes_of_nccl_h():
    assert ctypes.sizeof(UniqueId) == UNIQUE_ID_BYTES == 128
    assert ctypes.sizeof(Config) == without_blocking().size == 24
    assert without_blocking().blocking == 0


@pytest.mark.parametrize(
    ("dtype", "op", "wanted"),
    [
        (torch.float32, ReduceOp.SUM, NcclReduction(DataType.FLOAT32, 4, RedOp.SUM)),
        (torch.bfloat16, ReduceOp.AVG, NcclReduction(DataType.BFLOAT16, 2, RedOp.AVG)),
        (torch.int64, ReduceOp.MIN, NcclReduction(DataType.INT64, 8, RedOp.MIN)),
        (torch.int64, ReduceOp.AVG, NcclReduction(DataType.INT64, 8, RedOp.AVG)),
        (torch.float16, ReduceOp.PREMUL_SUM, NcclReduction(DataType.FLOAT16, 2, RedOp.SUM)),
        (torch.bool, ReduceOp.BAND, NcclReduction(DataType.UINT8, 1, RedOp.MIN)),
        (torch.bool, ReduceOp.BXOR, None),
        (torch.complex64, ReduceOp.SUM, NcclReduction(DataType.FLOAT32, 4, RedOp.SUM)),
        (torch.complex64, ReduceOp.PRODUCT, None),
        (torch.int16, ReduceOp.SUM, None),
        (torch.int32, ReduceOp.BOR, None),
        (torch.float8_e5m2, ReduceOp.SUM, None),
    ],
)
def test_types_and_reductions_are_those_of_nccl_2_21(dtype, op, wanted):
    assert find_reduction(DTYPE_CODES[dtype], op, 22105) == wanted


def test_float8_is_reduced_from_2_24_on():
    code = DTYPE_CODES[torch.float8_e4m3fn]
    assert find_reduction(code, ReduceOp.SUM, 22400) == NcclReduction(DataType.FLOAT8_E4M3, 1, RedOp.SUM)


def no_room(nbytes: int) -> int:
    raise AssertionError(f"{nbytes} bytes were asked for, and everything lies flat")


def test_parts_that_lie_flat_are_gathered_without_a_copy():
    made = plan(Operation.ALL_GATHER, 1, -1, [[1000, 8]], [[2000, 8], [2008, 8]], no_room)
    assert made.calls == [NcclCall(NcclFunction.ALL_GATHER, 1000, 2000, 8)]
    assert not made.before and not made.after


def test_a_list_is_reduced_piece_by_piece_in_place():
    made = plan(Operation.ALL_REDUCE, 0, -1, [], [[1000, 8, 3000, 0, 5000, 4]], no_room)
    assert made.calls == [
        NcclCall(NcclFunction.ALL_REDUCE, 1000, 1000, 8),
        NcclCall(NcclFunction.ALL_REDUCE, 5000, 5000, 4),
    ]


def test_ranks_of_which_only_the_root_reads_get_no_target():
    assert plan(Operation.REDUCE, 1, 0, [], [[1000, 8]], no_room).calls == [
        NcclCall(NcclFunction.REDUCE, 1000, 0, 8, 0)
    ]
    assert plan(Operation.REDUCE, 0, 0, [], [[1000, 8]], no_room).calls == [
        NcclCall(NcclFunction.REDUCE, 1000, 1000, 8, 0)
    ]


def test_an_empty_part_is_no_message():
    made = plan(Operation.ALL_TO_ALL, 0, -1, [[10, 4], [20, 0]], [[30, 4], [40, 6]], no_room)
    assert [(call.kind, call.peer) for call in made.calls] == [(NcclFunction.RECEIVE, 1)]


@st.composite
def cuts(draw: st.DrawFn, total: int) -> list[int]:
    places = sorted(draw(st.lists(st.integers(0, total), max_size=4)))
    return [after - before for before, after in zip([0, *places], [*places, total], strict=True)]


@given(st.data(), st.integers(1, 3), st.integers(1, 20))
def test_whatever_way_tensors_are_cut_the_bytes_arrive_in_order(data, size, nbytes):
    """One rank's all_gather, in a memory of bytes in which NCCL's part is to copy its input to every place."""
    memory = bytearray(4096)
    end = 1

    def lay(cut: list[int]) -> list[int]:
        nonlocal end
        pieces: list[int] = []
        for length in cut:
            end += data.draw(st.integers(0, 1))
            pieces += (end, length)
            end += length
        return pieces

    def room(length: int) -> int:
        return lay([length])[0]

    sent = lay(data.draw(cuts(nbytes)))
    targets = [lay(data.draw(cuts(nbytes))) for _ in range(size)]
    value = bytes(range(1, nbytes + 1))
    at = 0
    for address, length in zip(sent[::2], sent[1::2], strict=True):
        memory[address : address + length] = value[at : at + length]
        at += length
    made = plan(Operation.ALL_GATHER, 0, -1, [sent], targets, room)
    for copy in made.before:
        memory[copy.target : copy.target + copy.nbytes] = memory[copy.source : copy.source + copy.nbytes]
    (call,) = made.calls
    memory[call.target : call.target + size * nbytes] = size * memory[call.source : call.source + nbytes]
    for copy in made.after:
        memory[copy.target : copy.target + copy.nbytes] = memory[copy.source : copy.source + copy.nbytes]
    for pieces in targets:
        parts = zip(pieces[::2], pieces[1::2], strict=True)
        assert b"".join(memory[address : address + length] for address, length in parts) == value


def test_the_first_rank_that_is_missing_is_told():
    with pytest.raises(AbsentError) as caught:
        here = NcclPeer.here("GPU-1", "cuda:0")
        exchange_peers(dist.HashStore(), MEMBERS, 0, here, lambda: b"id", time.monotonic() + 0.05, lambda: False)
    assert caught.value.missing == (1,)


def test_two_ranks_with_one_gpu_are_named_with_the_fix(monkeypatch):
    store = dist.HashStore()
    with pytest.raises(AbsentError):
        exchange_peers(store, MEMBERS, 1, NcclPeer.here("GPU-1", "cuda:0"), bytes, time.monotonic(), lambda: False)
    wanted = r"rank 0 \(alpha, pid 11\) and rank 1 \(beta, pid 12\) both use one GPU .*set_device\(LOCAL_RANK\)"
    with pytest.raises(SharedGpuError, match=wanted):
        exchange_peers(
            store, MEMBERS, 0, NcclPeer.here("GPU-1", "cuda:0"), lambda: b"id", time.monotonic() + 1, lambda: False
        )
    monkeypatch.setenv("PACELINE_NCCL_SHARED_GPU", "1")
    met = exchange_peers(
        store, MEMBERS, 0, NcclPeer.here("GPU-1", "cuda:0"), lambda: b"id", time.monotonic() + 1, lambda: False
    )
    assert met.unique_id == b"id"


@pytest.fixture
def functions(search, nccl_library, tmp_path):
    search.setenv(library.LIBRARY_VARIABLE, str(nccl_library))
    search.setenv("STUB_NCCL_FOLDER", str(tmp_path))
    search.setenv("STUB_NCCL_LOG", str(tmp_path / "log"))
    return library.find().functions


def alone(functions, size: int = 1, wait_s: float = 5.0) -> Communicator:
    deadline = time.monotonic() + wait_s
    return Communicator(functions, functions.new_id(), 0, size, deadline, lambda: False)


def test_a_start_in_progress_is_waited_for(functions, tmp_path):
    with nccl_stub.told(in_progress=5):
        made = alone(functions)
    assert made.error() is None
    made.close()
    made.close()
    wanted = ["ncclGetUniqueId", "ncclCommInitRankConfig size=1 rank=0", "ncclCommFinalize", "ncclCommDestroy"]
    assert (tmp_path / "log").read_text().splitlines() == wanted


def test_a_start_that_nobody_joins_is_aborted(functions, tmp_path):
    with pytest.raises(NcclTimeoutError, match="ncclCommInitRankConfig was not done in time"):
        alone(functions, size=2, wait_s=0.05)
    assert (tmp_path / "log").read_text().splitlines()[-1] == "ncclCommAbort"


def test_calls_of_a_plan_form_one_group(functions, tmp_path):
    made = alone(functions)
    stream = nccl_stub.stand_in_for_cuda(library.find().path).stubOpenStream()
    memory = torch.ones(6)
    address = memory.data_ptr()
    calls = [
        NcclCall(NcclFunction.ALL_REDUCE, address, address, 8),
        NcclCall(NcclFunction.ALL_REDUCE, address + 8, address + 8, 16),
    ]
    how = NcclReduction(DataType.FLOAT32, 4, RedOp.SUM)
    with nccl_stub.told(in_progress=3):
        made.launch(calls, how, stream, time.monotonic() + 5)
    told = [line.split(" stream")[0] for line in (tmp_path / "log").read_text().splitlines()[2:]]
    assert told == [f"ncclAllReduce count={count} type=7 op=0 peer=-1 depth=1" for count in (2, 4)]
    with (
        nccl_stub.told(refuses="ncclAllReduce"),
        pytest.raises(NcclError, match="all_reduce: invalid argument: ncclAllReduce was told to refuse"),
    ):
        made.launch(calls, how, stream, time.monotonic() + 5)
    assert (tmp_path / "log").read_text().splitlines()[-1] == "ncclCommAbort"


class EndsAtTheEndOfThePause(threading.Event):
    """Is set, as `Watch.close` would, at the moment at which nobody waits for it any more."""

    def __init__(self, watch: CallWatch) -> None:
        super().__init__()
        self._watch = watch

    def wait(self, timeout: float | None = None) -> bool:
        was_set = super().wait(timeout)
        self.set()
        self._watch.wake()
        return was_set


def test_the_watch_ends_whenever_it_is_closed():
    watch = CallWatch()
    watch._closing = EndsAtTheEndOfThePause(watch)
    watch.wake()
    watch._thread.join(10)
    assert not watch._thread.is_alive()


@pytest.mark.parametrize("refusal", [errno.ENOSYS, errno.EPERM])
def test_peers_are_watched_without_descriptors_too(monkeypatch, refusal):
    def refuse(pid: int) -> int:
        raise OSError(refusal, "refused")

    monkeypatch.setattr(peers, "pidfd_open", refuse)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as peer:
        presences = [NcclPeer("here", pid, "", "") for pid in (os.getpid(), peer.pid)]
        watched = peers.PeerWatch(presences, 0)
        assert watched.gone() == []
        peer.kill()
        wait_until(lambda: watched.gone() == [1])
        watched.close()
    assert peers.PeerWatch(presences, 0).gone() == [1], "it had ended before"
