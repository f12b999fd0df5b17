"""Messages between ranks, on real processes and compared with torch's gloo."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as torch_dist
from hosts.talking import await_word, say

import paceline as dist

TYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32, torch.complex64]


@dataclass
class Setting:
    rate: float


def make(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def around_the_ring(library: object, rank: int, size: int) -> list[torch.Tensor]:
    """Runs every kind of message; returns the received values."""
    received = []
    after, before = (rank + 1) % size, (rank - 1) % size
    for at, dtype in enumerate(TYPES):
        for count in (1, 7, 100_001):
            tensor, room = make(dtype, count, 10 * rank + at), torch.empty(count, dtype=dtype)
            if rank % 2:
                assert library.recv(room, before) == before
                library.send(tensor, after)
            else:
                library.send(tensor, after)
                assert library.recv(room, src=before) == before
            received.append(room)

            room = torch.empty(count, dtype=dtype)
            works = [library.isend(tensor, after), library.irecv(room, before)]
            assert all(work.wait() for work in works)
            received.append(room)

    rooms = [torch.empty(5), torch.empty(5)]
    sends = [library.P2POp(library.isend, torch.full((5,), 10.0 * rank + at), after, tag=at) for at in range(2)]
    receives = [library.P2POp(library.irecv, room, before, tag=at) for at, room in enumerate(rooms)]
    batch = [*receives, *sends] if rank % 2 else [*sends, *receives]
    works = library.batch_isend_irecv(batch)
    assert len(works) == 4
    for work in works:
        work.wait()
    received += rooms

    # The receiver selects messages by their tags, in any order.
    works = [library.isend(torch.full((3,), float(tag)), after, tag=tag) for tag in (5, 6)]
    for tag in (6, 5):
        room = torch.empty(3)
        library.recv(room, before, tag=tag)
        received.append(room)
    for work in works:
        work.wait()

    # From any rank.
    if rank == 0:
        rooms = {}
        for _ in range(size - 1):
            room = torch.empty(4)
            rooms[library.recv(room)] = room
        received += [rooms[r] for r in sorted(rooms)]
    else:
        library.send(torch.full((4,), float(rank)), 0)
    return received


def as_torch_does(rendezvous: str) -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    torch_dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    ours, theirs = around_the_ring(dist, rank, size), around_the_ring(torch_dist, rank, size)
    assert len(ours) == len(theirs)
    assert all(map(same, ours, theirs))
    dist.barrier()
    torch_dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3])
def test_messages_arrive_as_torch_would_bring_them(ranks, size, tmp_path):
    ranks(size)(as_torch_does, str(tmp_path / "rendezvous"))


def in_a_group() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    group = dist.new_group([2, 0])
    tensor = torch.full((4, 4), float(rank))[:, 1]  # not contiguous
    if rank == 1:
        dist.send(tensor, group_dst=1, group=group)
        assert dist.isend(tensor, 0, group) is None
        assert dist.recv(tensor, group=group) == -1
        assert dist.irecv(tensor, group_src=0, group=group) is None
        assert dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 0, group)]) == []
    elif rank == 2:
        dist.send(tensor, group_dst=1, group=group)
        dist.send([tensor, tensor], 0, group)
    else:
        assert dist.recv(tensor, group_src=0, group=group) == 2
        assert (tensor == 2).all()
        pair = [torch.zeros(4), torch.zeros(4)]
        work = dist.irecv(pair, group=group)
        work.wait()
        assert work.source_rank() == 0
        assert work.get_future().wait()[1] is pair[1]
        assert (pair[1] == 2).all()
    dist.barrier()  # another test covers messages whose sender leaves


def test_in_a_group_ranks_are_taken_as_torch_takes_them(ranks):
    ranks(3)(in_a_group)


def leave_after_sending() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    group = dist.new_group([0, 1])
    if rank == 1:
        for at in range(3):
            dist.send(torch.full((4,), float(at)), 0, group)
        dist.destroy_process_group()
        return
    received = torch.zeros(4)
    dist.recv(received, 1, group)
    assert (received == 0).all()
    time.sleep(0.3)  # rank 1's farewell is read with the first message or here
    for at in (1, 2):
        assert dist.recv(received, None if at == 2 else 1, group) == 1
        assert (received == at).all()
    with pytest.raises(dist.PeerLostError, match=r"rank 1 .*left the group"):
        dist.recv(received, 1, group)


def test_what_was_sent_before_a_rank_left_arrives(ranks):
    ranks(2)(leave_after_sending)


def send_objects() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    sent = [{"a": (1, torch.arange(5))}, None, "ä" * 1000]
    if rank == 0:
        dist.send_object_list(sent, 1)
        dist.send_object_list([], group_dst=1)
        dist.send_object_list([Setting(1.0)], 1, allow_pickle=True)
        dist.send_object_list([Setting(2.0)], 1, allow_pickle=True)
        with pytest.raises(TypeError, match=r"rank 0 .*send_object_list: object_list\[1\]\[0\] is a .*Setting"):
            dist.send_object_list([1, [Setting(2.0)]], 1)
        dist.send_object_list(["last"], 1, use_batch=True)
        return
    got: list[object] = [None] * 3
    assert dist.recv_object_list(got) == 0
    assert got[1:] == sent[1:]
    assert got[0]["a"][0] == 1
    assert torch.equal(got[0]["a"][1], torch.arange(5))
    assert dist.recv_object_list([], 0) == 0
    one: list[object] = [None]
    dist.recv_object_list(one, 0, allow_pickle=True)
    assert one == [Setting(1.0)]
    with pytest.raises(dist.CollectiveObjectError, match="rank 0 .* sent a pickle"):
        dist.recv_object_list(one, 0)
    with pytest.raises(dist.CollectiveObjectError, match="rank 0 .* could not send"):
        dist.recv_object_list([None, None], 0)
    assert dist.recv_object_list(one, group_src=0, use_batch=True) == 0
    assert one == ["last"]


def test_objects_go_from_rank_to_rank(ranks):
    ranks(2)(send_objects)


def give_bad_arguments() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    tensor = torch.ones(1)
    for call, name in ((dist.send, "dst"), (dist.isend, "dst"), (dist.recv, "src"), (dist.irecv, "src")):
        with pytest.raises(ValueError, match=f"{name} is rank {rank}, this one"):
            call(tensor, rank)
        with pytest.raises(ValueError, match="is 7, which is not in"):
            call(tensor, 7)
        with pytest.raises(ValueError, match=f"{name} and group_{name} are mutually exclusive"):
            call(tensor, 1 - rank, None, 0, 1 - rank)
        with pytest.raises(ValueError, match="tag is -1; it must be from 0 to 2147483647"):
            call(tensor, 1 - rank, tag=-1)
        with pytest.raises(TypeError, match="must be a tensor or a list of tensors, not int"):
            call(5, 1 - rank)
    with pytest.raises(ValueError, match="send needs dst"):
        dist.send(tensor)
    with pytest.raises(ValueError, match="group_dst is 2; .*has ranks 0 to 1"):
        dist.send(tensor, group_dst=2)
    with pytest.raises(ValueError, match="must be paceline.isend or paceline.irecv"):
        dist.P2POp(dist.send, tensor, 1 - rank)
    with pytest.raises(ValueError, match="the list is empty"):
        dist.batch_isend_irecv([])
    with pytest.raises(TypeError, match="the list contains a int"):
        dist.batch_isend_irecv([1])
    op = dist.P2POp(dist.irecv, tensor, group_peer=1 - rank, tag=3)
    assert (op.peer, op.group_peer) == (1 - rank, 1 - rank)
    assert repr(op) == f"P2POp(irecv, peer={1 - rank}, tag=3, 1 elements)"
    with pytest.raises(ValueError, match="device is cuda"):
        dist.send_object_list([1], 1 - rank, device="cuda")
    dist.barrier()


def test_bad_arguments_are_refused_before_anything_is_sent(ranks):
    ranks(2)(give_bad_arguments)


def wait_for_nothing(directory: str) -> str:
    dist.init_process_group()
    if dist.get_rank() == 1:
        await_word(directory, "told")
        return ""
    with pytest.raises(dist.CollectiveTimeoutError) as caught:
        dist.recv(torch.ones(1), 1, timeout=timedelta(seconds=0.5))
    say(directory, "told")
    return str(caught.value)


def test_a_missing_message_is_reported_with_its_sender(ranks, tmp_path):
    assert "rank 1" in ranks(2)(wait_for_nothing, str(tmp_path))[0]


def receive_from_each_other() -> str:
    dist.init_process_group()
    rank = dist.get_rank()
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    with pytest.raises(dist.CollectiveTimeoutError) as caught:
        dist.recv(torch.ones(1), 1 - rank, timeout=timedelta(seconds=0.3 if rank == 0 else 20))
    with pytest.raises(dist.CollectiveTimeoutError):
        dist.send(torch.ones(1), 1 - rank)
    dist.barrier()
    group = dist.new_group()
    assert group is not None
    group.send(torch.ones(1), 1 - rank, async_op=False)
    group.recv(torch.ones(1), 1 - rank, async_op=False)
    return str(caught.value)


def test_ranks_that_receive_from_each_other_are_told_the_truth(ranks):
    first, second = ranks(2)(receive_from_each_other)
    assert "rank 1 (" in first and "did not reach the call" in first
    assert "on rank 0 (" in second and "was waiting for this rank" in second and "did not reach the call" not in second
    for message in (first, second):
        assert "No further messages can be sent or received in this group; its collective calls still work" in message
        assert "no call" not in message
