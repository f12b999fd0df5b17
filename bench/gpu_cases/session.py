"""A rank's session: its device, Paceline's and torch's process groups, and streams."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as torch_dist
from shared_gpu import share_gpu

import paceline as dist

BACKENDS = {"cuda": "cpu:paceline,cuda:nccl", "fake": "paceline", "cpu": "paceline"}
_DELAY_CYCLES, _DELAY_S = 20_000_000, 0.01  # about 10 ms on a GPU


@dataclass(frozen=True)
class Setting:
    """Settings that apply to every step of a run.

    Attributes:
        device_type: "cuda", "fake" or "cpu".
        backend: The backend for Paceline's `init_process_group`.
        folder: A folder for this step. It contains the rendezvous file for torch's ranks.
        scale: The number of rounds of a measurement, relative to the default.
        variables: Additional environment variables for the ranks.
    """

    device_type: str
    backend: str
    folder: str
    scale: float = 1.0
    variables: tuple[tuple[str, str], ...] = ()

    def rounds(self, usual: int) -> int:
        """Returns the number of rounds of a measurement, at least 3."""
        return max(3, round(usual * self.scale))


@dataclass(frozen=True)
class Session:
    """A rank in its process groups.

    Attributes:
        setting: The settings of the run.
        rank, size: This rank's number in both groups, and the groups' size.
        device: The rank's device.
        reference_device: The device for torch.distributed: the rank's device with CUDA, otherwise the CPU (with gloo).
    """

    setting: Setting
    rank: int
    size: int
    device: torch.device
    reference_device: torch.device

    @property
    def module(self) -> Any:
        return torch.get_device_module(self.device)

    @property
    def is_staged(self) -> bool:
        """Returns True if Paceline's calls are staged in host memory."""
        return self.device.type != "cpu" and "nccl" not in self.setting.backend

    @property
    def has_streams(self) -> bool:
        return self.device.type != "cpu" and hasattr(self.module, "Stream") and hasattr(self.module, "stream")

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            self.module.synchronize()

    def stream(self) -> Any:
        return self.module.Stream()

    def within(self, stream: Any) -> contextlib.AbstractContextManager[object]:
        return self.module.stream(stream)

    def current_stream(self) -> Any:
        return self.module.current_stream()

    def delay(self) -> None:
        """Delays the current stream by a few milliseconds, if the device has streams."""
        if self.device.type == "cuda":
            torch.cuda._sleep(_DELAY_CYCLES)
        elif self.device.type == "fake":
            self.module.launch(lambda: time.sleep(_DELAY_S))

    def meet(self) -> None:
        """Waits for all ranks and for the work in their streams."""
        self.synchronize()
        dist.barrier()


def open_device(setting: Setting) -> torch.device:
    """Selects and returns the device of this rank."""
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    os.environ.update(dict(setting.variables))
    torch.manual_seed(0)
    if setting.device_type == "cpu":
        return torch.device("cpu")
    if setting.device_type == "fake":
        import fake_device

        fake_device.load()
    elif torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        share_gpu(rank)
    module = torch.get_device_module(setting.device_type)
    device = torch.device(setting.device_type, local_rank % module.device_count())
    module.set_device(device.index)
    if setting.device_type == "cuda":
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True
    return device


@contextlib.contextmanager
def session(
    setting: Setting, ours: bool = True, theirs: bool = True, timeout_s: float = 30, ends: bool = True
) -> Iterator[Session]:
    """Forms the process groups of `paceline` and of `torch.distributed`.

    Destroys the groups if no error occurs. Programs that break their group set `ends` to False to prevent this.
    """
    device = open_device(setting)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=timeout_s)
    reference_device = device if device.type == "cuda" else torch.device("cpu")
    if theirs:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        method = f"file://{setting.folder}/torch"
        torch_dist.init_process_group(backend, init_method=method, rank=rank, world_size=size, timeout=timeout)
    if ours:
        dist.init_process_group(setting.backend, timeout=timeout)
    with torch.fake.delays(seed=rank) if device.type == "fake" else contextlib.nullcontext():
        yield Session(setting, rank, size, device, reference_device)
    if not ends:
        return
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
    if ours:
        dist.destroy_process_group()
    if theirs:
        torch_dist.destroy_process_group()


def modules() -> tuple[ModuleType, ModuleType]:
    """Returns the two libraries to compare: Paceline and torch.distributed."""
    return dist, torch_dist
