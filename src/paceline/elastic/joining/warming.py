"""What a process that computes pays for once, paid while nobody waits for it."""

from __future__ import annotations

import torch


def warm_up() -> None:
    """Computes a product and its gradient, which takes several milliseconds the first time in a process.

    The libraries of torch set themselves up then, also after a fork. The sizes do not matter, and no random number is
    drawn.
    """
    with torch.inference_mode(False), torch.enable_grad():
        weight = torch.zeros(8, 8, dtype=torch.float32, device="cpu", requires_grad=True)
        torch.nn.functional.linear(torch.zeros(8, 8, dtype=torch.float32, device="cpu"), weight).sum().backward()
