"""The names of a pipeline's layers in the undivided model."""

from __future__ import annotations

import torch
from torch import nn

from paceline.train.pipeline.pipeline import describe_undivided


def test_compiled_layers_have_plain_names_in_the_undivided_model():
    first, last = nn.Linear(1, 1), nn.Linear(1, 1, bias=False)
    for layers in ([first, last], [torch.compile(first), last]):
        whole = nn.Sequential(*layers)
        for model in (whole, torch.compile(whole)):
            undivided = describe_undivided(["0", "1"], layers, model)
            assert undivided.keys == {"0.weight", "0.bias", "1.weight"}
            assert undivided.key_of("0.weight") == "0.weight"
