"""Error texts for devices that a program names and that the machine or the module does not have."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def absent_device_text(device_ids: Sequence[torch.device], output_device: torch.device | None) -> str | None:
    """Returns text on a named GPU that this machine does not have, with the fix; None if it has all of them."""
    named = {"device_ids": device_ids, "output_device": [] if output_device is None else [output_device]}
    for argument, devices in named.items():
        for device in devices:
            gpus = torch.cuda.device_count()
            if device.type != "cuda" or device.index < gpus:
                continue
            if gpus == 0:
                return (
                    f"{argument} names {device} (a bare number is a GPU's), and this process sees no GPU. To train on "
                    "the CPU leave device_ids and output_device out, or give None"
                )
            return (
                f"{argument} names {device}, and this process sees {gpus} GPU{'s' if gpus > 1 else ''}: the numbers "
                f"from 0 to {gpus - 1}, such as LOCAL_RANK with one process for each GPU"
            )
    return None


def wrong_device_text(name: str, tensor: torch.Tensor, device: torch.device) -> str:
    """Returns text that says that a parameter or buffer is not on the first of `device_ids`, with the fix."""
    if tensor.is_meta:
        move = f"module.to_empty(device={str(device)!r}) gives it memory, which must then be filled"
    elif tensor.is_cpu:
        move = f"module.to({str(device)!r}), or leave device_ids out for a module on the CPU"
    else:
        move = f"module.to({str(device)!r})"
    return f"{name!r} is on {tensor.device}, and device_ids begins with {device}: {move}"
