"""Measures the share of a core that the live page uses in the launcher, with 64 ranks at 10 steps per second each.

    python bench/page.py [--ranks 64] [--steps-per-second 10] [--seconds 10] [--json FILE]

One process records steps of data-parallel training. Once per second, as when a browser is connected, the page reads
this recording in place of every rank's recording. The time is that of the dashboard thread: reading, building the
state, and encoding the message. p50 and p95 are computed over n updates. The last row is measured without a connected
browser, when the page reads only every five seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from report import columns_of, parser, show, spread

from paceline.comm.record.layout import NBYTES
from paceline.comm.record.recorder import HANDED_VARIABLE, HandedMemory
from paceline.operate.dashboard.aggregator import DashboardAggregator
from paceline.operate.dashboard.event_queue import EventQueue
from paceline.operate.dashboard.event_stream import ALONE_S, WATCHED_S, Feed
from paceline.operate.dashboard.job_sample import JobInfo
from paceline.operate.dashboard.local_collector import LocalCollector

BUCKETS = 4
WRITER = """
import sys, time
import paceline._core as core
from paceline.comm.record.layout import EventKind as K
from paceline.comm.record.recorder import begin, identify
from paceline.comm.record.spans import begin_event
from paceline.comm.record.log import log

begin(); identify(0, 1)
group = core.record_group("default", "native", 7, 0, [0, 1])
buckets, every_s, until_s = int(sys.argv[1]), float(sys.argv[2]), time.monotonic() + float(sys.argv[3])
number = 0
while time.monotonic() < until_s:
    began_s = time.monotonic()
    number += 1
    core.record_step(number)
    step = begin_event(K.STEP, "ddp", number)
    for kind in (K.DATA_WAIT, K.FORWARD, K.BACKWARD, K.OPTIMIZER):
        part = begin_event(kind)
        if kind == K.BACKWARD:
            for at in range(buckets):
                bucket = begin_event(K.BUCKET, "ddp", at, 1 << 20)
                core.record_sent(bucket)
                call = core.RecordedCall(group, 1, 11, 0, number * buckets + at, 1 << 18, -1, True, -1)
                call.start()
                call.end(0)
                core.record_end(bucket)
        time.sleep(every_s / 10)
        core.record_end(part)
    log(loss=1.0 / number, samples=32)
    time.sleep(max(0.0, began_s + every_s - time.monotonic()))
    core.record_end(step)
"""


def measure(ranks: int, steps_per_s: float, seconds: float, every_s: float) -> dict[str, object]:
    """Returns the share of a core, the duration of updates, and the bytes of messages per second."""
    fd = os.memfd_create("recording")
    os.ftruncate(fd, NBYTES)
    handed = HandedMemory(fd, os.fstat(fd).st_ino, os.getpid())
    words = [sys.executable, "-c", WRITER, str(BUCKETS), str(1 / steps_per_s), str(seconds + 8)]
    notes = EventQueue()
    lookout = LocalCollector(notes, JobInfo("bench", world_size=ranks))
    board, feed = DashboardAggregator(), Feed("bench")
    writer = subprocess.Popen(words, env={**os.environ, HANDED_VARIABLE: str(handed)})
    try:
        for rank in range(ranks):
            notes.leave_worker(rank, writer.pid, f"node{rank // 8}", fd)
        time.sleep(3)
        for _ in range(3):  # until the interval between updates is stable
            board.take(lookout.look())
            time.sleep(WATCHED_S)
        feed.publish(board.state())
        looks, nbytes = [], 0
        first_s = time.monotonic()
        while time.monotonic() < first_s + seconds:
            time.sleep(every_s)
            began_s = time.thread_time()
            board.take(lookout.look())
            message = feed.publish(board.state())
            looks.append(time.thread_time() - began_s)
            nbytes += len(message.data) if message is not None else 0
        passed_s = time.monotonic() - first_s  # longer than the pauses caused by other processes on the cores
        return {
            "core %": 100 * sum(looks) / passed_s,
            **columns_of(spread(looks), "ms"),
            "longest ms": 1e3 * max(looks),
            "bytes a second": nbytes / passed_s,
        }
    finally:
        writer.kill()
        writer.wait()
        lookout.close()
        os.close(fd)


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--ranks", type=int, default=64)
    arguments.add_argument("--steps-per-second", type=float, default=10)
    arguments.add_argument("--seconds", type=float, default=10)
    options = arguments.parse_args()
    rows: list[dict[str, object]] = []
    for name, every_s in (("watched", WATCHED_S), ("alone", ALONE_S)):
        seconds = max(options.seconds, every_s)
        rows.append({"page": name, **measure(options.ranks, options.steps_per_second, seconds, every_s)})
    show(f"The page of {options.ranks} ranks, {options.steps_per_second:g} steps a second", rows, options.json)


if __name__ == "__main__":
    main()
