"""Tensors that a collective does not support are rejected with a message that names them, in both APIs."""

from __future__ import annotations

import numpy
import pytest
import torch
import torch.distributed as torch_dist

import paceline as dist


def tensors_without_rows_are_refused(call, size) -> None:
    scalar, rows = torch.tensor(1.0), torch.ones(2 * size)
    with pytest.raises(
        ValueError, match=rf"all_to_all_single: output has no dimensions, and therefore no rows .* {size} ranks"
    ):
        call(scalar, scalar)
    with pytest.raises(ValueError, match=r"all_to_all_single: input has no dimensions.*input.view\(1\)"):
        call(rows, scalar)
    with pytest.raises(
        ValueError, match=r"output_split_sizes is \[5, -1\]; it needs 2 with the sum 4, none of them neg"
    ):
        call(rows, rows, [5, -1], [2, 2])
    with pytest.raises(ValueError, match=r"input_split_sizes is \[-1, 5\]"):
        call(rows, rows, [2, 2], [-1, 5])
    with pytest.raises(ValueError, match=r"all_to_all: this rank sends itself 3 elements, but has room for 2 elements"):
        call(rows, rows.clone(), [2, 2], [3, 1] if dist.get_rank() == 0 else [1, 3])
    for kind in (numpy.array, iter, torch.tensor):  # sizes need not be in a list
        rows.zero_()
        call(rows, torch.arange(2.0 * size), kind([2] * size), kind([2] * size))
        assert rows.tolist() == [2.0 * dist.get_rank() + each for each in range(2)] * size


def wrong_on_the_native_face() -> None:
    dist.init_process_group()
    tensors_without_rows_are_refused(dist.all_to_all_single, dist.get_world_size())
    for wrong, kind in ((None, "NoneType"), (3, "int"), ([1.0], "list")):
        with pytest.raises(
            TypeError, match=f"all_reduce: the argument must be a tensor or a list of tensors, not {kind}"
        ):
            dist.all_reduce(wrong)
        with pytest.raises(
            TypeError, match=f"broadcast: the argument must be a tensor or a list of tensors, not {kind}"
        ):
            dist.broadcast(wrong, 0)
    dist.destroy_process_group()


def wrong_on_the_plugin() -> None:
    torch_dist.init_process_group("paceline")
    scalar, rows = torch.tensor(1.0), torch.ones(4)
    with pytest.raises(ValueError, match=r"all_to_all_single: output has no dimensions"):
        torch_dist.all_to_all_single(scalar, scalar)
    with pytest.raises(ValueError, match=r"none of them negative"):
        torch_dist.all_to_all_single(rows, rows, [5, -1], [2, 2])
    torch_dist.destroy_process_group()


@pytest.mark.parametrize("face", [wrong_on_the_native_face, wrong_on_the_plugin])
def test_tensors_that_a_collective_cannot_take_are_named(ranks, face):
    ranks(2)(face)
