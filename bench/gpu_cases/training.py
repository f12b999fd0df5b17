"""Compares the loss curves of Paceline's and torch's DistributedDataParallel, for features that GPU programs use."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

import paceline as dist
from gpu_cases.session import Session, Setting, session
from paceline.parallel import hooks

STEPS = 12
CLASSES = 8


class Network(nn.Module):
    """A convolution with batch normalization, and two blocks. A batch may skip one of the blocks."""

    def __init__(self, skips: bool = False, recomputes: bool | None = None) -> None:
        """Initializes the layers.

        Args:
            skips: True if every other batch of a rank skips a block.
            recomputes: The value of `use_reentrant` for checkpointing the blocks, or None to disable checkpointing.
        """
        super().__init__()
        self.skips, self.recomputes = skips, recomputes
        self.features = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten())
        self.first = nn.Sequential(nn.Linear(1024, 64), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
        self.last = nn.Linear(64, CLASSES)
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self._block(self.first, self.features(x))
        self.seen += 1
        if not (self.skips and self.seen % 2):
            hidden = hidden + self._block(self.second, hidden)
        return self.last(hidden)

    def _block(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x) if self.recomputes is None else checkpoint(block, x, use_reentrant=self.recomputes)


def powers_start() -> hooks.PowerSGDState:
    return hooks.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)


@dataclass(frozen=True)
class Variant:
    """A training configuration.

    Attributes:
        dtype: The type of parameters and inputs.
        autocast: The type for `torch.autocast`, or None to disable it.
        scales: True if losses are scaled with a GradScaler.
        accumulates: The number of batches in a step; all but the last run under `no_sync`.
        channels_last: True if parameters and inputs have the memory format `torch.channels_last`.
        synchronizes: True if batch normalization is synchronized across ranks.
        compiles: True if the wrapped module is compiled.
        network: The arguments for `Network`.
        ddp: The arguments for both DistributedDataParallel classes.
        hook: Paceline's and torch's communication hooks. torch's hook is None if torch has no equivalent.
        tolerance: The relative tolerance for losses.
    """

    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    scales: bool = False
    accumulates: int = 1
    channels_last: bool = False
    synchronizes: bool = False
    compiles: bool = False
    network: Mapping[str, bool] = field(default_factory=dict)
    ddp: Mapping[str, object] = field(default_factory=dict)
    hook: tuple[object, Callable[..., object] | None] | None = None
    tolerance: float = 1e-5


VARIANTS: dict[str, Variant] = {
    "float32": Variant(),
    "bfloat16": Variant(torch.bfloat16, tolerance=2e-2),
    "autocast": Variant(autocast=torch.bfloat16, tolerance=1e-2),
    "autocast and GradScaler": Variant(autocast=torch.float16, scales=True, tolerance=1e-2),
    "no_sync": Variant(accumulates=3),
    "channels_last": Variant(channels_last=True, tolerance=1e-4),
    "small buckets": Variant(ddp={"bucket_cap_mb": 0.01}),
    "find_unused_parameters": Variant(network={"skips": True}, ddp={"find_unused_parameters": True}),
    "static_graph": Variant(ddp={"static_graph": True}),
    "gradient_as_bucket_view": Variant(ddp={"gradient_as_bucket_view": True}),
    "checkpoint": Variant(network={"recomputes": False}),
    "reentrant checkpoint": Variant(network={"recomputes": True}),
    "SyncBatchNorm": Variant(synchronizes=True, tolerance=1e-4),
    "fp16 hook": Variant(hook=(hooks.fp16_compress_hook, default_hooks.fp16_compress_hook), tolerance=1e-2),
    "bf16 hook": Variant(hook=(hooks.bf16_compress_hook, default_hooks.bf16_compress_hook), tolerance=2e-2),
    "PowerSGD": Variant(hook=(hooks.power_sgd_hook, None), tolerance=0.5),
    "torch.compile": Variant(compiles=True, tolerance=1e-3),
}


def batch(step: int, rank: int, rows: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns images and their classes; the class is the column in which an image's first row is brightest."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    images = torch.randn(rows, 3, 8, 8, generator=generator)
    return images, images[:, 0, 0].argmax(1)


def _prepared(here: Session, variant: Variant, device: torch.device) -> nn.Module:
    torch.manual_seed(here.rank)  # parameters differ between ranks until wrapping makes them equal
    module: nn.Module = Network(**variant.network).to(device, variant.dtype)
    return module.to(memory_format=torch.channels_last) if variant.channels_last else module


def ours(here: Session, variant: Variant) -> nn.Module:
    module = _prepared(here, variant, here.device)
    if variant.synchronizes:
        module = dist.SyncBatchNorm.convert_sync_batchnorm(module)
    ids = None if here.device.type == "cpu" else [here.device.index]
    model = dist.DistributedDataParallel(module, device_ids=ids, **variant.ddp)
    if variant.hook is not None:
        is_power = variant.hook[0] is hooks.power_sgd_hook
        model.register_comm_hook(powers_start() if is_power else None, variant.hook[0])
    return model


def theirs(here: Session, variant: Variant) -> nn.Module:
    module = _prepared(here, variant, here.reference_device)
    is_cuda = here.reference_device.type == "cuda"
    if variant.synchronizes and is_cuda:
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    model = nn.parallel.DistributedDataParallel(
        module, device_ids=[here.reference_device.index] if is_cuda else None, **variant.ddp
    )
    has_hook = variant.hook is not None and variant.hook[1] is not None
    if has_hook and (is_cuda or variant.hook[1] is not default_hooks.bf16_compress_hook):  # not implemented by gloo
        model.register_comm_hook(None, variant.hook[1])
    return model


def curve(here: Session, variant: Variant, model: nn.Module, device: torch.device, steps: int = STEPS) -> list[float]:
    """Trains `model`, an instance of one of the two classes; returns the loss of each batch."""
    forward: Callable[[torch.Tensor], torch.Tensor] = model
    if variant.compiles:
        forward = torch.compile(model, backend="inductor" if device.type == "cuda" else "eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(device.type, enabled=variant.scales and device.type == "cuda")
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(variant.accumulates):
            is_last = part == variant.accumulates - 1
            inputs, targets = batch(step * variant.accumulates + part, here.rank)
            inputs = inputs.to(device, variant.dtype, non_blocking=True)
            if variant.channels_last:
                inputs = inputs.to(memory_format=torch.channels_last)
            casts = variant.autocast is not None
            with contextlib.nullcontext() if is_last else model.no_sync():
                with torch.autocast(device.type, variant.autocast, enabled=casts):
                    outputs = forward(inputs)
                loss = nn.functional.cross_entropy(outputs.float(), targets.to(device))
                scaler.scale(loss).backward()
            losses.append(loss.detach())
        scaler.step(optimizer)
        scaler.update()
    return [loss.item() for loss in losses]


def whole_curve(here: Session, variant: Variant) -> list[float]:
    """Trains one module on the batches of all ranks, as with SyncBatchNorm; returns the losses of this rank's rows."""
    torch.manual_seed(0)
    module = Network(**variant.network)
    optimizer = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        parts = [batch(step, rank) for rank in range(here.size)]
        inputs, targets = (torch.cat(each) for each in zip(*parts, strict=True))
        optimizer.zero_grad()
        outputs = module(inputs)
        nn.functional.cross_entropy(outputs, targets).backward()
        optimizer.step()
        rows = slice(here.rank * len(targets) // here.size, (here.rank + 1) * len(targets) // here.size)
        losses.append(nn.functional.cross_entropy(outputs[rows], targets[rows]).item())
    return losses


def largest_difference(label: str, found: list[float], wanted: list[float], tolerance: float) -> float:
    """Requires that two curves agree within a relative tolerance; returns the largest relative difference."""
    differences = [abs(a - b) / max(1e-3, abs(b)) for a, b in zip(found, wanted, strict=True)]
    if not max(differences) <= tolerance:
        at = next(step for step, each in enumerate(differences) if not each <= tolerance)
        raise AssertionError(f"{label}: at loss {at}, {found[at]:.6g} instead of {wanted[at]:.6g}")
    return max(differences)


def compare(setting: Setting, name: str) -> dict[str, object]:
    """Trains with both classes; returns the largest relative difference between their losses."""
    variant = VARIANTS[name]
    with session(setting) as here:
        found = curve(here, variant, ours(here, variant), here.device)
        if variant.synchronizes and here.reference_device.type == "cpu":
            wanted = whole_curve(here, variant)
        else:
            wanted = curve(here, variant, theirs(here, variant), here.reference_device)
        difference = largest_difference(f"rank {here.rank}: {name}", found, wanted, variant.tolerance)
        first, last = statistics.mean(found[:5]), statistics.mean(found[-5:])
        if not last < first:
            raise AssertionError(f"rank {here.rank}: {name}: the loss went from {first:.4g} to {last:.4g}")
    return {"losses": len(found), "largest difference": difference}


class _Halves(nn.Module):
    """A module on two devices."""

    def __init__(self, devices: tuple[torch.device, torch.device]) -> None:
        super().__init__()
        self.devices = devices
        self.first = nn.Sequential(nn.Linear(16, 64), nn.Tanh()).to(devices[0])
        self.second = nn.Linear(64, CLASSES).to(devices[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x.to(self.devices[0])).to(self.devices[1]))


def two_devices(setting: Setting) -> dict[str, object]:
    """Trains a module that spans two devices on each rank, with both classes."""
    with session(setting) as here:
        count = here.module.device_count()
        pair = tuple(torch.device(here.device.type, (here.rank * 2 + at) % count) for at in range(2))
        cpu = (torch.device("cpu"), torch.device("cpu"))

        def losses(wrap: Callable[[nn.Module], nn.Module], devices: tuple[torch.device, torch.device]) -> list[float]:
            torch.manual_seed(here.rank)
            model = wrap(_Halves(devices))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            told = []
            for step in range(STEPS):
                optimizer.zero_grad()
                inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + here.rank))
                loss = model(inputs).square().mean()
                loss.backward()
                optimizer.step()
                told.append(loss.item())
            return told

        found = losses(dist.DistributedDataParallel, pair)
        wanted = losses(nn.parallel.DistributedDataParallel, pair if here.reference_device.type == "cuda" else cpu)
        return {"largest difference": largest_difference("two devices", found, wanted, 1e-5)}


def data_parallel(setting: Setting) -> dict[str, object]:
    """Compares Paceline's DataParallel over all devices with the module alone."""
    with session(setting, theirs=False) as here:
        torch.manual_seed(0)
        module = nn.Linear(16, 4).to(here.device)
        model = dist.DataParallel(module)
        inputs = torch.randn(12, 16).to(here.device)
        model(inputs).square().sum().backward()
        found = module.weight.grad.clone()
        module.zero_grad()
        module(inputs).square().sum().backward()
        if not torch.allclose(found.cpu(), module.weight.grad.cpu(), atol=1e-5):
            raise AssertionError("DataParallel's gradient is another one than the module's")
        return {"devices": here.module.device_count()}


def uneven_inputs(setting: Setting) -> dict[str, object]:
    """Trains with one more batch on each successive rank, under `join`, with both classes."""
    with session(setting) as here:
        variant = Variant()

        def losses(model: nn.Module, device: torch.device) -> list[float]:
            optimizer = torch.optim.SGD(model.parameters(), 0.05)
            told = []
            with model.join():
                for step in range(3 + here.rank):
                    inputs, targets = batch(step, here.rank)
                    loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    told.append(loss.item())
            return told

        found = losses(ours(here, variant), here.device)
        torch_dist.barrier()
        wanted = losses(theirs(here, variant), here.reference_device)
        return {"largest difference": largest_difference("uneven inputs", found, wanted, 1e-5)}
