"""The failure that explains the others, failures due to lack of memory, and the wording of reports."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from paceline.operate.launch.failures import (
    Record,
    WorkerFailure,
    describe_signal,
    report_parts,
    shortened,
    signal_name,
)


def failure(rank: int, text: str | None, code: int = 1, time_s: float = 1.0) -> WorkerFailure:
    kind = text.partition(":")[0].rpartition(".")[2] if text else ""
    record = Record(time_s, kind, f"Traceback\n{text}\n") if text else None
    return WorkerFailure(rank, 100 + rank, code, time_s, record, host="h0")


def report(failures: list[WorkerFailure]) -> str:
    return "\n".join(report_parts(failures))


@pytest.mark.parametrize(
    ("text", "summary"),
    [
        ("E: " + "first sentence. " * 3 + "word " * 60, "E: first sentence. first sentence. first sentence"),
        ("E: " + "word " * 60, "E: " + "word " * 39 + "..."),
    ],
)
def test_a_long_text_is_cut_after_a_word(text, summary):
    assert failure(0, text).summary == summary


def test_ranks_that_failed_as_the_first_did_share_a_line():
    alike = [failure(rank, f"ValueError: rank {rank} found no port {40 + rank}", time_s=rank) for rank in (3, 1, 2, 5)]
    other = failure(4, "ValueError: rank 4 found no host", time_s=9.0)
    told = report([*alike, other]).splitlines()
    assert told[0] == "rank 1 failed first (h0, pid 101, exit code 1):"
    assert told[-2:] == [
        "rank 4 (h0, pid 104), failed too: ValueError: rank 4 found no host",
        "ranks 2-3, 5 failed in the same way",
    ]


def test_the_line_of_a_single_other_rank_stays():
    both = [failure(rank, f"ValueError: rank {rank} found no port", time_s=rank) for rank in (0, 1)]
    assert report(both).splitlines()[-1] == "rank 1 (h0, pid 101), failed too: ValueError: rank 1 found no port"


@pytest.mark.parametrize(
    ("printer", "end"),
    [
        (1, "ValueError: rank 1 found no port 41; its traceback is above"),
        (2, "ValueError: rank 1 found no port 41; see rank 2's traceback above"),
        (4, "\nTraceback\nValueError: rank 1 found no port 41"),
    ],
)
def test_a_traceback_above_is_not_printed_again(printer, end):
    alike = [failure(rank, f"ValueError: rank {rank} found no port {40 + rank}", time_s=rank) for rank in (1, 2)]
    other = failure(4, "ValueError: rank 4 found no host", time_s=9.0)
    told = report_parts([*alike, other], is_in_view=lambda _, name: name == f"rank {printer}")
    assert told[0].endswith(f"(h0, pid 101, exit code 1): {end}".replace(": \n", ":\n"))


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:1234",
        "DistBackendError: NCCL error in: ... ncclRemoteError: A call failed possibly due to a network error",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "PeerLostError: rank 1 was lost",
        "paceline.errors.GroupAbortedError: rank 0 (h0, pid 1): all_reduce() as call 7 did not complete because rank 1 "
        "(h0, pid 2) aborted the group. Its tensors are undefined",
        "DistStoreError: failed to recv, got 0 bytes",
    ],
)
def test_what_another_ranks_death_brings_about_is_a_consequence(text):
    assert failure(0, text).is_consequence
    told = report([failure(0, text, time_s=1.0), failure(1, "ValueError: cause", time_s=2.0)])
    cause, *_, consequence = told.splitlines()
    assert cause == "rank 1 failed first (h0, pid 101, exit code 1):"
    assert consequence.startswith("rank 0 (h0, pid 100), a consequence: ")


@pytest.mark.parametrize(
    "text",
    [
        "rank 0 (h0, pid 1): barrier() as call 7 did not complete because this process aborted the group. Its",
        "rank 0: <ProcessGroup> was aborted by this process; continue with shrink_group",
    ],
)
def test_a_rank_that_aborted_the_group_itself_is_no_consequence(text):
    assert not failure(0, f"paceline.errors.GroupAbortedError: {text}").is_consequence


def test_a_consequence_that_comes_alone_is_not_told_as_the_cause():
    alone = failure(0, "PeerLostError: rank 1 was lost")
    assert report([alone]).startswith("rank 0 failed because of another rank (h0, pid 100, exit code 1):")
    told = report_parts([alone], is_in_view=lambda text, _: text == "PeerLostError: rank 1 was lost")
    assert told[-1].endswith("PeerLostError: rank 1 was lost; its traceback is above"), "its own frames are in view"


def test_no_rank_is_the_first_to_fail_if_the_calls_do_not_match():
    text = "paceline.errors.CollectiveMismatchError: rank {rank} (h0, pid 1): the ranks' calls do not match: ..."
    lines = ["loss.backward()", "loss.backward()", "dist.barrier()"]
    failures = [failure(rank, f"{line}\n{text.format(rank=rank)}") for rank, line in enumerate(lines)]
    failures = [replace(each, record=replace(each.record, kind="CollectiveMismatchError")) for each in failures]
    told = report(failures).splitlines()
    assert told[0].startswith("rank 0 failed because the ranks' calls do not match (h0, pid 100, exit code 1)")
    assert told[-1] == "ranks 1-2 failed in the same way"


def test_an_exit_with_a_code_is_told_with_its_line():
    left = replace(failure(1, None, 3), exit_line="train.py:9")
    assert (left.manner, left.how, left.line) == ("EXITED", "exit code 3", "train.py:9")
    assert "it called sys.exit or raised SystemExit at train.py:9" in report([left])


def test_the_message_of_an_exit_is_told():
    left = replace(failure(1, None, 1), exit_line="train.py:9", exit_message="no data for this rank")
    assert left.summary == "exit code 1: no data for this rank"
    assert ", exit code 1): no data for this rank; it called sys.exit or raised SystemExit at" in report([left])


def test_a_crash_refers_to_the_stack_that_was_printed():
    assert "look at its output above, where Python has printed the stack" in report([failure(1, None, -11)])


def test_a_connection_that_a_child_broke_is_told_as_such():
    text = 'Traceback\n  File "/lib/python3.11/multiprocessing/connection.py", line 395, in _recv\n{}: reset'
    record = Record(1.0, "ConnectionResetError", text.format("ConnectionResetError"))
    found = replace(failure(1, None), record=record)
    assert (found.manner, found.summary) == (
        "EXCEPTION",
        "ConnectionResetError: reset (a child process, such as a DataLoader worker, has exited; see its output)",
    )


def test_the_ranks_that_did_not_fail_are_listed():
    lost = "PeerLostError: rank 1 was lost"
    told = [report_parts([failure(0, lost)], range(size))[0] for size in (2, 5)]
    assert told == ["rank 1 did not fail", "ranks 1-4 did not fail"]


@pytest.mark.parametrize(
    ("workers", "told"),
    [
        (1, "SIGTERM: passed on to 1 worker, which has 30 s to exit (send it again to kill the worker)"),
        (2, "SIGTERM: passed on to 2 workers, which have 30 s to exit (send it again to kill them)"),
    ],
)
def test_a_signal_that_is_passed_on_is_told(workers, told):
    assert describe_signal("SIGTERM", workers, 30.0) == told


def test_signals_are_named_and_those_without_a_name_numbered():
    assert (signal_name(11), signal_name(40)) == ("SIGSEGV", "signal 40")


WRAPPED = """RuntimeError: Cannot extract tensors from value: {error}

At:
  /usr/lib/python3/site-packages/torch/autograd/graph.py(979): _engine_run_backward
  /home/me/train.py(20): <module>
"""


def test_an_error_that_torch_wraps_is_recognized():
    lost = failure(0, WRAPPED.format(error="PeerLostError: rank 1 (h0, pid 1) died, detected by rank 0"))
    assert lost.manner == "CONSEQUENCE"
    assert lost.summary.endswith("from value: PeerLostError: rank 1 (h0, pid 1) died, detected by rank 0")
    differs = failure(0, WRAPPED.format(error="CollectiveMismatchError: rank 0: the ranks' calls do not match"))
    assert differs.manner == "MISMATCH"


@pytest.mark.parametrize(
    ("text", "summary"),
    [
        ("ValueError: bad\n\n  sample", "ValueError: bad sample"),
        (
            "torch.AcceleratorError: no kernel\nException raised from launch at a.cpp:1 (most recent call first):\n0",
            "torch.AcceleratorError: no kernel",
        ),
        (
            "ValueError: Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):"
            "\n  File ...\nValueError: bad sample",
            "ValueError: bad sample",
        ),
        ("ValueError", "ValueError"),
    ],
)
def test_an_exception_is_summarized_in_one_line(text, summary):
    assert failure(0, text).summary == summary


def test_a_group_of_exceptions_is_summarized_by_itself():
    text = (
        "  + Exception Group Traceback (most recent call last):\n  | ExceptionGroup: many (1 sub-exception)\n  +-+----"
    )
    record = Record(1.0, "ExceptionGroup", f"{text} 1 ----\n    | ValueError: bad\n    +----\n")
    assert (
        WorkerFailure(0, 1, 1, 1.0, record).summary == "ExceptionGroup: many (1 sub-exception), first ValueError: bad"
    )


GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "/home/me/train.py", line 5, in <module>
  |     asyncio.run(main())
  | ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/home/me/train.py", line 2, in read
    |     raise ValueError("bad shard.")
    | ValueError: bad shard.
    +---------------- 2 ----------------
    | Traceback (most recent call last):
    |   File "/home/me/train.py", line 9, in write
    | KeyError: 3
    +------------------------------------
"""


def test_an_exception_group_is_told_with_its_first_member():
    found = WorkerFailure(0, 1, 1, 1.0, Record(1.0, "ExceptionGroup", GROUP))
    assert found.line == "train.py:2"
    assert found.summary.endswith("(2 sub-exceptions), first ValueError: bad shard")


def test_a_long_message_keeps_its_beginning_between_machines():
    long = failure(1, f"RuntimeError: the models differ{' x' * 2000}", time_s=2.0)
    (kept,) = (each for each in shortened([long, failure(0, "ValueError: cause")]) if each.rank == 1)
    assert kept.record is not None and len(kept.record.text) == 1000
    assert kept.summary.startswith("RuntimeError: the models differ x")


def test_a_connection_to_a_child_is_not_one_to_a_rank():
    error = "ConnectionResetError: [Errno 104] Connection reset by peer"
    loader = '  File "/usr/lib/python3/site-packages/torch/utils/data/dataloader.py", line 1, in _next_data\n'
    assert failure(0, error).is_consequence
    record = Record(1.0, "ConnectionResetError", f"Traceback\n{loader}{error}\n")
    assert WorkerFailure(0, 1, 1, 1.0, record).manner == "EXCEPTION"


def test_an_object_that_was_not_sent_is_a_consequence():
    text = (
        "paceline.errors.CollectiveObjectError: rank 0: gather_object: rank 1 could not send its object; see the error"
    )
    assert failure(0, f"{text} on that rank. Change what it sends").is_consequence
    assert not failure(0, "paceline.errors.CollectiveObjectError: rank 0: rank 1 sent a pickle").is_consequence


@pytest.mark.parametrize(
    ("before", "handled"),
    [
        (
            'Traceback\n  File "/home/me/train.py", line 20, in f\nValueError: bad\nsample\n',
            "ValueError: bad (train.py:20)",
        ),
        ('Traceback\n  File "/usr/lib/python3/dist-packages/a.py", line 2, in f\nKeyError\n', "KeyError"),
        ('Traceback\n  File "/home/me/train.py", line 20, in f\n', ""),
    ],
)
def test_the_exception_that_was_being_handled_is_known(before, handled):
    during = "\nDuring handling of the above exception, another exception occurred:\n\n"
    record = Record(1.0, "PeerLostError", f"{before}{during}Traceback\nPeerLostError: rank 1 was lost\n")
    assert WorkerFailure(0, 1, 1, 1.0, record).handled == handled
    assert failure(0, "ValueError: bad").handled == failure(0, None).handled == ""
