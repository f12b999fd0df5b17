"""Spans and numbers that a program records."""

from __future__ import annotations

from recorded_programs import recorded, run

from paceline.comm.record.layout import EventKind


def test_spans_and_numbers_are_recorded_with_their_step(tmp_path):
    code = """
import paceline, torch
from paceline.comm.record.spans import STEPS
class Loop: pass
loop, other = Loop(), Loop()
STEPS.begin(loop, "mine")
STEPS.begin(other, "not the maker")
@paceline.span("whole")
def function():
    with paceline.span("part"):
        paceline.log(loss=torch.ones(1, requires_grad=True) / 4, lr=3)
function()
STEPS.begin(loop, "mine")
"""
    recording = recorded(code, tmp_path)
    assert recording.step == 2
    facts = [(event.kind, event.name, event.value, event.step) for event in recording.events]
    assert facts == [
        (EventKind.STEP, "mine", None, 1),
        (EventKind.SPAN, "whole", None, 1),
        (EventKind.SPAN, "part", None, 1),
        (EventKind.VALUE, "loss", 0.25, 1),
        (EventKind.VALUE, "lr", 3.0, 1),
        (EventKind.STEP, "mine", None, 2),
    ]
    (open_step,) = recording.open_events()
    assert open_step.first == 2
    assert recording.events[1].start_ns <= recording.events[2].start_ns <= recording.events[2].end_ns


def test_a_value_that_is_no_number_is_refused(tmp_path):
    done = run("import paceline; paceline.log(loss='much')", tmp_path)
    assert "paceline.log: loss is a str that cannot be converted to one number" in done.stderr


WAITS = """
import sys, threading, time
from datetime import timedelta
import torch.distributed as torch_dist
import paceline
from paceline import _core
from paceline.comm.record import recorder
from paceline.comm.record.spans import begin_store_wait
from paceline.comm.store import store as stores
from paceline.interop.torch_backend import patches

stores._SHORT_S = patches._SHORT_WAIT_S = 0.01
recorder.begin()
patches.record_store_waits()
patches.record_store_waits()  # no effect
PROGRAM = '''
def wait(store, method, *keys):
    try:
        getattr(store, method)(*keys)
    except Exception as error:
        assert "a" in str(error) or isinstance(error, torch_dist.DistStoreError), error

short = timedelta(seconds=0.2)
ours, theirs = paceline.HashStore(short), torch_dist.PrefixStore("mine", torch_dist.HashStore())
theirs.set_timeout(short)
for store in (ours, theirs):
    store.set("there", "1")
    store.get("there")
wait(ours, "get", "a")
wait(ours, "wait", ["b" * 80, "there", "a"])
wait(theirs, "get", "a")
wait(theirs, "wait", ["a", "c"])
thread = threading.Thread(target=wait, args=(ours, "get", "a"))
thread.start()
thread.join()
'''
exec(compile(PROGRAM, "/home/me/train.py", "exec"))
LIBRARY = '''
try:
    ours.get("a")
except paceline.errors.StoreTimeoutError:
    pass
'''
exec(compile(LIBRARY, "/usr/lib/python3/dist-packages/library.py", "exec"))
for number in range(70):
    _core.record_end(begin_store_wait("get", [str(number)], 0.0))
_core.record_end(begin_store_wait("get", ["3"], 0.0))
"""


def test_long_waits_for_a_store_are_recorded(tmp_path):
    recording = recorded(WAITS, tmp_path)
    waits = [event for event in recording.events if event.kind is EventKind.STORE_WAIT]
    assert [(wait.name, wait.first) for wait in waits[:4]] == [
        ("get 'a'", 1),
        (f"wait '{'b' * 54}...", 2),
        ("get 'a'", 1),
        ("wait 'a', 'c'", 2),
    ]
    assert all(wait.end_ns is not None and wait.end_ns - wait.start_ns > 0.1e9 for wait in waits[:4])
    names = [wait.name for wait in waits[4:]]
    assert names[:61] == [f"get '{number}'" for number in range(61)], "a recording holds few names"
    assert set(names[61:70]) == {"get"} and names[70:] == ["get '3'"]
