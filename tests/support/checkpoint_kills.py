"""Saves with two processes and kills chosen ones at their n-th disk operation, for every n.

It is a separate program (`python checkpoint_kills.py DIRECTORY`), because it forks. It prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from multiprocessing import Pipe, connection
from pathlib import Path

import msgspec
from checkpoint_disks import KillingDisk
from checkpoint_states import WORLD_SIZE, newest_whole, steps_in, write
from checkpoint_states import save as save_alone

from paceline.train.checkpoint.format.local_storage import Disk, LocalStorage
from paceline.train.checkpoint.format.manifest import Draft, RankPart
from paceline.train.checkpoint.format.root import Root
from paceline.train.checkpoint.format.values import encode

KEEP = 2
DEADLINE_S = 60


def lead(root: Root, step: int, follower: connection.Connection, reports: int) -> None:
    """The program of rank 0; it writes to `reports` when the checkpoint is complete, before old ones are removed."""
    draft = root.begin(step)
    follower.send_bytes(draft.to_bytes())
    own = write(root, draft, step, 0)
    assert follower.poll(DEADLINE_S)
    try:
        other = msgspec.json.decode(follower.recv_bytes(), type=RankPart)
    except EOFError:  # the other rank was killed
        root.abandon(draft)
        return
    root.publish(draft, [own, other], encode({"step": step}), world_size=WORLD_SIZE)
    os.write(reports, b"done")
    root.retire(KEEP)


def follow(root: Root, step: int, leader: connection.Connection) -> None:
    """The program of rank 1."""
    assert leader.poll(DEADLINE_S)
    try:
        draft = Draft.from_bytes(leader.recv_bytes())
        leader.send_bytes(msgspec.json.encode(write(root, draft, step, 1)))
    except (EOFError, BrokenPipeError):  # rank 0 was killed
        return


@dataclass
class Outcome:
    """The outcome: whether the checkpoint was reported as complete, and whether a process was killed."""

    is_reported: bool
    is_killed: bool


def save(directory: Path, step: int, number: int, killed: set[int]) -> Outcome:
    """Saves with two processes; the `killed` ranks are killed at the given disk operation."""
    ends = Pipe()
    reader, writer = os.pipe()
    pids = []
    for rank in range(WORLD_SIZE):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                ends[1 - rank].close()
                os.close(reader)
                root = Root(LocalStorage(directory, KillingDisk(number) if rank in killed else Disk()))
                if rank == 0:
                    lead(root, step, ends[0], writer)
                else:
                    follow(root, step, ends[1])
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    for end in ends:
        end.close()
    os.close(writer)
    told = os.read(reader, 16)
    os.close(reader)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    is_killed = any(os.WIFSIGNALED(status) for status in statuses)
    assert all(os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0 for status in statuses), (step, statuses)
    return Outcome(told == b"done", is_killed)


def sweep(directory: Path, killed: set[int]) -> dict[str, int]:
    """Kills processes at the 1st, 2nd, ... operation until none is killed; checks the checkpoints each time."""
    root = Root(directory)
    latest = step = number = reported = 0
    while True:
        number, step = number + 1, step + 2
        prepare(root, step - 1)
        latest = step - 1
        outcome = save(directory, step, number, killed)
        if outcome.is_reported:
            latest, reported = step, reported + 1
        found, _ = newest_whole(root, digests=True)
        assert found is not None and found.step is not None, f"no checkpoint after a kill at operation {number}"
        assert found.step >= latest, f"{found} is older than {latest}"
        assert steps_in(root, found.name) == {found.step}
        if not outcome.is_killed:
            return {"operations": number - 1, "reported": reported}


def prepare(root: Root, step: int) -> None:
    """Saves without killing a process: new files replace old ones, so that later saves all do the same work."""
    save_alone(root, step)
    root.retire(KEEP)
    assert not [name for name in root.storage.names() if name.startswith(".")]
    root.storage.make_directory(".writing-step_0000000000-dead")
    root.storage.create(".writing-step_0000000000-dead/rank_00000_000.safetensors").close()


if __name__ == "__main__":
    top = Path(sys.argv[1])
    sweeps = {"rank 0": {0}, "rank 1": {1}, "all": {0, 1}}
    print(json.dumps({name: sweep(top / name.replace(" ", ""), ranks) for name, ranks in sweeps.items()}))
