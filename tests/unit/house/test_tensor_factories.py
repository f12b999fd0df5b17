"""Tensors are created on an explicit device, so `torch.set_default_device` affects only the user's tensors.

Otherwise, a message for the CPU's engine might be created on a GPU, and a buffer for a GPU tensor on the CPU.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

# The functions that `torch.set_default_device` affects; those of submodules, such as `torch.fft.fftfreq`, are not used.
_NAMES = """
    arange as_tensor asarray bartlett_window blackman_window empty empty_permuted empty_quantized empty_strided eye
    full hamming_window hann_window kaiser_window linspace logspace ones rand randint randn randperm range
    scalar_tensor sparse_bsc_tensor sparse_bsr_tensor sparse_compressed_tensor sparse_coo_tensor sparse_csc_tensor
    sparse_csr_tensor tensor tril_indices triu_indices zeros
"""
FACTORIES = frozenset(_NAMES.split())


def without_device(tree: ast.Module) -> Iterator[ast.Call]:
    """Yields the factory calls that use the default device."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr=name)) if name in FACTORIES:
                if not any(keyword.arg == "device" for keyword in node.keywords):
                    yield node


def test_every_tensor_is_made_on_a_named_device():
    wrong = [
        f"{file.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)} has no device=; a message to the CPU's engine is "
        'made with device="cpu", and what meets a tensor of the user\'s with device=tensor.device'
        for file in sorted((ROOT / "src").rglob("*.py"))
        for call in without_device(ast.parse(file.read_text()))
    ]
    assert not wrong, "\n".join(["", *wrong])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("torch.zeros(2)", 1),
        ("torch.tensor([torch.ones(1)], dtype=torch.int64)", 2),
        ("torch.empty(2, **options)", 1),
        ("torch.empty(2, device=x.device)", 0),
        ("torch.zeros_like(x)", 0),
        ("numpy.zeros(2)", 0),
    ],
)
def test_the_check_finds_what_depends_on_the_default(text, found):
    assert len(list(without_device(ast.parse(text)))) == found


def test_the_check_has_the_functions_that_torch_changes():
    import torch
    from torch.utils._device import _device_constructors

    assert {f.__name__ for f in _device_constructors() if getattr(torch, f.__name__, None) is f} <= FACTORIES
