"""Tensors in a call: lists, dtypes, layouts, and descriptions of invalid arguments."""

from __future__ import annotations

import pytest
import torch

from paceline.comm.engine.channel import DTYPE_CODES
from paceline.comm.group.buffers import address_of, as_list, count_elements, dtype_code, is_plain, kind_of


def test_a_tensor_or_a_sequence_becomes_a_list():
    one, other = torch.ones(1), torch.ones(2)
    assert as_list(one, "x") == [one]
    assert [id(tensor) for tensor in as_list((one, other), "x")] == [id(one), id(other)]
    with pytest.raises(TypeError, match="x: the argument must be a tensor or a list of tensors, not list of float"):
        as_list([one, 1.0], "x")


def test_a_wrong_argument_is_described_by_its_type():
    values = (1.0, [1.0, "a"], [], (), [torch.ones(1)])
    assert [kind_of(value) for value in values] == [
        "float", "list of float and str", "empty list", "empty tuple", "list of tensors",
    ]  # fmt: skip


def test_the_tensors_of_a_call_have_one_dense_type():
    assert dtype_code([torch.ones(1), torch.ones(2)], "f") == DTYPE_CODES[torch.float32]
    with pytest.raises(TypeError, match=r"f got tensors of torch.float32 and torch.int64"):
        dtype_code([torch.ones(1), torch.ones(1, dtype=torch.int64)], "f")
    with pytest.raises(TypeError, match=r"layout torch.sparse_coo; use tensor.to_dense"):
        dtype_code([torch.ones(1).to_sparse()], "f")


def test_a_view_is_plain_only_if_its_memory_holds_its_values():
    matrix = torch.ones(2, 3, dtype=torch.complex64)
    assert is_plain(matrix) and is_plain(matrix[1])
    assert not any(map(is_plain, (matrix.T, matrix[:, 0], matrix.conj(), matrix.conj().imag)))


def test_a_tensor_without_memory_is_refused():
    tensor = torch.ones(3)
    assert address_of(tensor) == tensor.data_ptr()
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"a tensor of shape \(3,\) has no memory"):
        address_of(tensor)
    assert address_of(torch.ones(0)) == 0


def test_elements_of_all_tensors_are_counted():
    assert count_elements([torch.ones(2, 3), torch.ones(()), torch.ones(0)]) == 7
