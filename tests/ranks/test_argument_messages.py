"""Messages about invalid arguments state the argument, the expected value and the solution on one line."""

from __future__ import annotations

import numpy
import pytest
import torch

import paceline as dist


def raises(kind: type[Exception], text: str, call) -> None:
    with pytest.raises(kind) as raised:
        call()
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)


def name_what_was_passed() -> None:
    dist.init_process_group()
    two = torch.zeros(2)
    tensors = "must be a tensor or a list of tensors, not "
    raises(TypeError, tensors + "list of float", lambda: dist.all_reduce([1.0]))
    raises(TypeError, tensors + "float", lambda: dist.all_reduce(1.0))
    raises(TypeError, tensors + "ndarray", lambda: dist.all_reduce(numpy.zeros(2)))
    raises(ValueError, "broadcast: src is 5, which is not in ProcessGroup(", lambda: dist.broadcast(two, 5))
    raises(TypeError, "broadcast: src is '0' (str); a rank is an integer", lambda: dist.broadcast(two, "0"))
    lists = "it must be a list with one entry for each of the 2 ranks"
    raises(TypeError, f"all_gather: the list of outputs is None; {lists}", lambda: dist.all_gather(None, two))
    raises(TypeError, f"reduce_scatter: input_list is 3; {lists}", lambda: dist.reduce_scatter(two, 3))
    raises(TypeError, f"all_to_all: input_tensor_list is None; {lists}", lambda: dist.all_to_all([two, two], None))
    raises(ValueError, "output_tensor_lists is NoneType", lambda: dist.all_gather_coalesced(None, [two]))
    raises(TypeError, "output_tensor must be a tensor, not NoneType", lambda: dist.all_gather_into_tensor(None, two))
    raises(TypeError, "input must be a tensor, not list of tensors", lambda: dist.reduce_scatter_tensor(two, [two]))
    raises(TypeError, "all_to_all_single: input must be a tensor", lambda: dist.all_to_all_single(two, 1.0))
    raises(
        TypeError,
        "output_split_sizes is a list; it must be a list of i",
        lambda: dist.all_to_all_single(two, two, [0.5]),
    )
    raises(TypeError, "object_list is None; it must be a list of objects", lambda: dist.broadcast_object_list(None))
    raises(TypeError, "send: tag is '1'; it must be an integer", lambda: dist.send(two, 1 - dist.get_rank(), tag="1"))
    raises(TypeError, "new_group: ranks is a list; it must contain only integers", lambda: dist.new_group([None]))
    for call in (dist.all_reduce, lambda tensor, op: dist.reduce(tensor, 0, op)):
        raises(TypeError, "op must be a paceline.ReduceOp, ", lambda call=call: call(two, op=None))
    raises(ValueError, "send: dst is 9, which is not in ProcessGroup(", lambda: dist.send(two, 9))
    raises(TypeError, "it must be a list of P2POp objects", lambda: dist.batch_isend_irecv(two))
    raises(TypeError, "new_group: ranks is 1; it must be a list of ranks", lambda: dist.new_group(1))
    raises(TypeError, "new_group: ranks is '01'", lambda: dist.new_group("01"))
    raises(TypeError, "timeout is 'soon'", lambda: dist.new_group([0], timeout="soon"))
    raises(
        ValueError, "it must have 1 different names", lambda: dist.init_device_mesh("cpu", (2,), mesh_dim_names="ab")
    )
    raises(TypeError, "module is a Tensor; it must be a torch.nn.Module", lambda: dist.DistributedDataParallel(two))
    raises(TypeError, "module is a int", lambda: dist.SyncBatchNorm.convert_sync_batchnorm(3))
    layer = torch.nn.Linear(2, 2)
    classes = "it must be a class derived from torch.optim.Optimizer"
    raises(TypeError, classes, lambda: dist.ZeroRedundancyOptimizer(layer.parameters(), "adam", lr=1.0))
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    raises(TypeError, classes, lambda: dist.ZeroRedundancyOptimizer(layer.parameters(), optimizer))
    raises(TypeError, "Join got a Linear, which is not a Joinable", lambda: dist.Join([layer]))
    raises(
        dist.CheckpointError, "the state is a Linear; it must be a dict", lambda: dist.save(layer, "/nowhere", step=1)
    )
    raises(TypeError, "a span is named 3; its name must be a string", lambda: dist.span(3).__enter__())
    raises(ValueError, "no dimension may be negative", lambda: dist.empty_shared(-1))
    raises(ValueError, "<lambda>", lambda: dist.spawn(lambda rank: None))
    raises(TypeError, "spawn: args is 3; it must be a tuple", lambda: dist.spawn(print, args=3))
    dist.destroy_process_group()


def test_messages_name_what_was_passed(ranks):
    ranks(2)(name_what_was_passed)


def warn_outside_the_group() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    groups = [dist.new_group([0]), dist.new_group([1])]
    other = groups[1 - rank]
    with pytest.warns(
        UserWarning, match=f"rank {rank}: all_reduce does nothing, because this rank is not in the group"
    ):
        assert dist.all_reduce(torch.zeros(1), group=other) is None
    with pytest.warns(UserWarning, match=f"rank {rank}: barrier does nothing"):
        dist.barrier(other)
    dist.destroy_process_group()


def test_a_call_on_a_group_without_this_rank_warns(ranks):
    ranks(2)(warn_outside_the_group)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("allreduce", "all_reduce"),
        ("allReduce", "all_reduce"),
        ("DDP", "DistributedDataParallel"),
        ("DistributedDataParalel", "DistributedDataParallel"),
        ("init_processgroup", "init_process_group"),
    ],
)
def test_a_name_that_does_not_exist_is_corrected(name, meant):
    with pytest.raises(AttributeError, match=rf"has no attribute '{name}'; did you mean paceline\.{meant}\?$"):
        getattr(dist, name)
    assert not hasattr(dist, "xyzzy")
