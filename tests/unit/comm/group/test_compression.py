"""Formats for data sent between hosts, and residuals: rounding errors that are added to the next call's data."""

from __future__ import annotations

import pytest
import torch

from paceline.comm.group.compression import Wire, checked_kind


def test_an_unknown_format_is_answered_with_the_known():
    assert checked_kind("int8") == "int8"
    for wrong in ("int2", 8, None):
        with pytest.raises(ValueError, match=r"it must be one of .*int8"):
            checked_kind(wrong)


def test_the_residual_of_a_call_is_kept_for_the_next():
    wire = Wire("int4")
    residual = wire.residual_of(3)
    assert residual.tolist() == [0, 0, 0] and residual.dtype is torch.float32
    residual += 1
    assert wire.residual_of(3) is residual


def test_a_call_of_another_length_begins_anew():
    wire = Wire("int4")
    wire.residual_of(3).fill_(1.0)
    assert wire.residual_of(2).tolist() == [0, 0]
    wire.residual_of(2).fill_(1.0)
    wire.reset()
    assert wire.residual_of(2).tolist() == [0, 0]
