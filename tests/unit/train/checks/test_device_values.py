"""Digests of tensors, computed on the tensors' device."""

from __future__ import annotations

import torch

from paceline.train.checks import device_values
from paceline.train.checks.device_values import DeviceDigests, HostCopy
from paceline.train.checks.replica_check import (
    RankDigests,
    tensors_part,
)


def digests(*totals: int) -> list[RankDigests]:
    return [RankDigests(1, total) for total in totals]


def device_digests(tensors: list[torch.Tensor]) -> list[int]:
    """Returns the digests that a device would compute, computed on the CPU."""
    values: dict[str, int] = {}
    digests = DeviceDigests()
    for number, tensor in enumerate(tensors):
        digests.add(values, str(number), tensor)
    digests.read()
    return list(values.values())


BIG = 40_001  # float32 numbers; too many to be hashed together with others


def test_a_device_tells_tensors_apart_by_each_of_their_bytes():
    grid, vector, big = torch.arange(6.0).reshape(2, 3), torch.arange(5, dtype=torch.bfloat16), torch.randn(BIG)
    tensors = [grid, torch.ones(()), torch.ones(0), vector, big[1:], torch.tensor([True, False]), big.double()]
    digests = device_digests(tensors)
    assert digests == device_digests([tensor.clone() for tensor in tensors])
    assert digests[0] == device_digests([grid.t().contiguous().t(), *tensors[1:]])[0]
    for number, tensor in enumerate(tensors):
        if tensor.numel() == 0:
            continue
        for at in {0, tensor.numel() // 2, tensor.numel() - 1}:
            changed = tensor.clone()
            memory = changed.view(-1).view(torch.uint8)
            memory[at * tensor.element_size()] ^= 1
            others = device_digests([*tensors[:number], changed, *tensors[number + 1 :]])
            assert [left != right for left, right in zip(digests, others, strict=True)] == [
                each == number for each in range(len(tensors))
            ]


def test_a_device_sees_signs_and_places_that_change():
    for size in (6, BIG):
        values = torch.randn(size, dtype=torch.float64)
        signs, places = values.clone(), values.clone()
        signs[1:3] *= -1
        places[[1, 2]] = values[[2, 1]]
        assert len({*device_digests([values]), *device_digests([signs]), *device_digests([places])}) == 3
        assert device_digests([values]) != device_digests([-values])


def test_large_tensors_are_hashed_in_parts(monkeypatch):
    monkeypatch.setattr(device_values, "_WORDS", 1 << 13)
    tensors = [torch.randn(BIG), *(torch.randn(900) for _ in range(40))]
    digests = device_digests(tensors)
    assert len(set(digests)) == len(tensors)
    tensors[0][-1] += 1
    assert [left != right for left, right in zip(digests, device_digests(tensors), strict=True)] == [True] + [
        False
    ] * 40


def test_tensors_without_memory_are_left_out():
    named = {"a": torch.ones(2), "b": torch.ones(2).to_sparse(), "c": torch.ones(2, device="meta")}
    assert list(tensors_part(named, DeviceDigests())) == ["'a'"]


class OnDevice(torch.Tensor):
    """A tensor for which a device's memory is assumed."""

    is_cpu = False


def test_values_are_copied_if_no_memory_can_be_pinned():
    """Without a GPU nothing can be pinned. On a GPU, the driver limits pinned memory, on WSL to half of the memory."""
    values = torch.arange(3.0).as_subclass(OnDevice)
    assert HostCopy(values).read() == [0, 1, 2]
