"""The launcher serves the stores of a job, so rank 0 may exit or restart, as under torchrun."""

from __future__ import annotations

import socket

import pytest
from forked_launcher import run
from launching import ENVIRONMENT, MEET

AGAIN_AND_LEAVE = """
import datetime, os, sys, time
import torch, torch.distributed as dist
backend, url = sys.argv[1], "env://"
for turn in range(3):
    dist.init_process_group(backend, url, timeout=datetime.timedelta(seconds=60),
                            rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    t = torch.ones(1)
    dist.all_reduce(t)
    print("turn", turn, t.item(), flush=True)
    if turn < 2:
        dist.destroy_process_group()
        url = "tcp://localhost:" + os.environ["MASTER_PORT"]
pair = dist.new_group([1, 2])  # rank 0 is no member, and ends
if dist.get_rank() != 0:
    while os.path.exists(sys.argv[2]):
        time.sleep(0.02)
    again = dist.new_group([1, 2], use_local_synchronization=True)
    for group in (pair, again):
        t = torch.ones(1)
        dist.all_reduce(t, group=group)
        print("pair", t.item(), flush=True)
    dist.destroy_process_group()
else:
    os.unlink(sys.argv[2])
    os._exit(0)
"""


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_torch_forms_groups_again_and_without_rank_0(script, tmp_path, backend):
    held = tmp_path / "rank 0 is here"
    held.touch()
    done = run("--nproc-per-node=3", script(AGAIN_AND_LEAVE), backend, str(held))
    assert done.returncode == 0, done.stderr
    turns = [f"[rank {rank}] turn {turn} 3.0" for rank in range(3) for turn in range(3)]
    pairs = [f"[rank {rank}] pair 2.0" for rank in (1, 2) for _ in range(2)]
    assert sorted(done.stdout.splitlines()) == sorted([*turns, *pairs])


KEYS = """
import datetime, os, sys
import torch.distributed as dist
timeout, rank = datetime.timedelta(seconds=60), int(os.environ["RANK"])
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = {store}
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
assert not store.check(["key of attempt"]) or store.get("key of attempt").decode() == attempt
store.set("key of attempt", attempt)
store.set(f"rank {rank}", "")
store.wait(["rank 0", "rank 1"])
print("attempt", attempt, store.get("key of attempt").decode(), flush=True)
store.set(f"end {rank}", "")
store.wait(["end 0", "end 1"])  # a rank that serves the store ends last
sys.exit(1 if attempt == "0" else 0)
"""


@pytest.mark.parametrize(
    "store",
    [
        'next(dist.rendezvous("env://", timeout=timeout))[0]',
        "dist.TCPStore(*place, 2, False, timeout)",
        "dist.TCPStore(host_name=place[0], port=place[1], timeout=timeout)",
        "dist.TCPStore(*place, 2, is_master=rank == 0, timeout=timeout)",  # torchrun refuses this: its port is taken
    ],
)
def test_a_restarted_generation_finds_no_old_key(script, store):
    done = run("--nproc-per-node=2", "--max-restarts=1", script(KEYS.replace("{store}", store)))
    assert done.returncode == 0, done.stderr
    assert [f"[rank {rank}] attempt 1 1" in done.stdout for rank in range(2)] == [True, True]


OWN = """
import datetime, os, socket, sys
import torch.distributed as dist
with socket.create_server(("127.0.0.1", 0)) as probe:
    port = probe.getsockname()[1]
child = os.fork()
place = dict(rank=1 if child else 0, world_size=2)
dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", timeout=datetime.timedelta(seconds=60), **place)
dist.barrier()  # until both have connected
sys.stdout.write(f"own {dist.get_world_size()}\\n")  # in one piece, since both processes write to one pipe
sys.stdout.flush()
if child:
    sys.exit(os.waitpid(child, 0)[1])
os._exit(0)
"""


def test_torch_serves_a_store_of_its_own_elsewhere(script):
    done = run(script(OWN))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("own 2") == 2


MEETS_AT_MASTER_PORT = f"""
import os
{MEET}
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
for url in ("env://", "tcp://127.0.0.1:" + os.environ["MASTER_PORT"], "env://"):
    met = rendezvous(url, None, size, rank, 60)
    met.store.set("rank %d" % rank, url)
    met.store.wait(["rank %d" % each for each in range(size)])
    print("met", met.rank, met.world_size, flush=True)
"""


def test_ranks_meet_at_master_port(script):
    done = run("--nproc-per-node=2", script(MEETS_AT_MASTER_PORT))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] met {rank} 2" for rank in range(2) for _ in range(3)]


LISTENERS = """
import os, socket
def look():
    for address in ("127.0.0.1", "127.0.0.2"):
        try:
            socket.create_connection((address, int(os.environ["MASTER_PORT"])), 10).close()
            print(address, "answers")
        except ConnectionRefusedError:
            print(address, "refuses")
look()
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()  # gloo's connections fail on a rank that is still making them when another rank exits
look()
"""


def test_the_store_of_torch_listens_on_loopback_once_it_is_used(script):
    done = run(script(LISTENERS))
    found = ["127.0.0.1 refuses", "127.0.0.2 refuses", "127.0.0.1 answers", "127.0.0.2 refuses"]
    assert done.stdout.splitlines() == [f"[rank 0] {line}" for line in found], done.stderr


def test_the_store_of_torch_is_there_at_once_without_the_plug_in(script):
    environment = {**ENVIRONMENT, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = run("--nproc-per-node=2", script(LISTENERS), env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("127.0.0.1 answers") == 4
    assert done.stdout.count("refuses") == 4


def test_a_taken_master_port_is_told(script):
    text = MEETS_AT_MASTER_PORT.replace('"tcp://127.0.0.1:" + os.environ["MASTER_PORT"]', '"env://"')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("--nproc-per-node=2", f"--master-port={port}", script(text))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("met") == 6
    assert f"no store can be served at MASTER_PORT, which env:// of torch.distributed needs: port {port}" in done.stderr
