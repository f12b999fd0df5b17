"""Trees of values."""

from __future__ import annotations

from collections import Counter

import torch

from paceline.train.checkpoint.pytree import put_together, take_apart, with_classes_of


def test_a_tree_comes_back_with_its_classes() -> None:
    state = {"counts": Counter({3: 2}), 7: [torch.ones(2), (1, None)], "kind": torch.float16, "a/b": {"x@": 1.5}}
    tensors: dict[str, torch.Tensor] = {}
    taken = take_apart("s", state, tensors)
    assert list(tensors) == ["s/7/0"]
    back = with_classes_of(put_together(taken, tensors.__getitem__), state)
    assert isinstance(back["counts"], Counter)
    assert torch.equal(back[7][0], torch.ones(2))
    assert (back[7][1], back["kind"], back["a/b"], back["counts"]) == ((1, None), torch.float16, {"x@": 1.5}, {3: 2})
