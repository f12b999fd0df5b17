"""The mapping from other libraries' names to Paceline's, and the types that describe a migrated file.

Names are fully qualified, as in "torch.distributed.all_reduce", possibly with attributes, as in
"torch.distributed.ReduceOp.SUM". A name without a counterpart stays unchanged or requires the program to keep
torch.distributed.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import paceline


class MigrationMode(Enum):
    """The migration mode of a program."""

    IMPORT = "import"  # the program uses `import paceline as dist` instead of torch.distributed
    PLUGIN = "plugin"  # the program keeps torch.distributed and uses the backend "paceline"


HOROVOD = "horovod.torch"
HOROVODS_NAMES = frozenset(
    (
        "Adasum", "Average", "Compression", "DistributedOptimizer", "HorovodInternalError", "Max", "Min", "ProcessSet",
        "Product", "Sum", "SyncBatchNorm", "add_process_set", "allgather", "allgather_async", "allgather_object",
        "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async", "barrier",
        "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_object",
        "broadcast_optimizer_state", "broadcast_parameters", "ccl_built", "cross_rank", "cross_size", "cuda_built",
        "ddl_built", "global_process_set", "gloo_built", "gloo_enabled", "grouped_allgather",
        "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
        "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async", "init", "is_homogeneous",
        "is_initialized", "join", "local_rank", "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported",
        "nccl_built", "poll", "rank", "reducescatter", "reducescatter_async", "remove_process_set", "rocm_built", "run",
        "shutdown", "size", "sparse_allreduce_async", "synchronize",
    )
)  # fmt: skip

_HOOKS = frozenset(
    (
        "PowerSGDState", "allreduce_hook", "bf16_compress_hook", "bf16_compress_wrapper", "fp16_compress_hook",
        "fp16_compress_wrapper", "powerSGD_hook",
    )
)  # fmt: skip
_TORCH = "torch.distributed"
_CORE = f"{_TORCH}.distributed_c10d"
_BUILT_ON_TORCHS_GROUPS = {"DeviceMesh", "init_device_mesh"}  # Paceline has these names too, but uses its own groups

# Names outside torch.distributed, and names whose path in torch.distributed differs from Paceline's.
_RENAMED = {
    "torch.nn.parallel.DistributedDataParallel": "paceline.DistributedDataParallel",
    "torch.nn.parallel.distributed.DistributedDataParallel": "paceline.DistributedDataParallel",
    "torch.nn.SyncBatchNorm": "paceline.SyncBatchNorm",
    "torch.nn.modules.batchnorm.SyncBatchNorm": "paceline.SyncBatchNorm",
    "torch.utils.data.DistributedSampler": "paceline.DistributedSampler",
    "torch.utils.data.distributed.DistributedSampler": "paceline.DistributedSampler",
    "torch.multiprocessing.spawn": "paceline.spawn",
    f"{_TORCH}.algorithms.Join": "paceline.Join",
    f"{_TORCH}.algorithms.JoinHook": "paceline.JoinHook",
    f"{_TORCH}.algorithms.Joinable": "paceline.Joinable",
    f"{_TORCH}.algorithms.join.Join": "paceline.Join",
    f"{_TORCH}.algorithms.join.JoinHook": "paceline.JoinHook",
    f"{_TORCH}.algorithms.join.Joinable": "paceline.Joinable",
    f"{_TORCH}.optim.ZeroRedundancyOptimizer": "paceline.ZeroRedundancyOptimizer",
}
_HOOK_MODULES = (
    f"{_TORCH}.algorithms.ddp_comm_hooks.default_hooks",
    f"{_TORCH}.algorithms.ddp_comm_hooks.powerSGD_hook",
)

# Modules that work with either library because they do not create groups.
_STAYS = (
    f"{_TORCH}.argparse_util",
    f"{_TORCH}.constants",
    f"{_TORCH}.elastic",
    f"{_TORCH}.logging_handlers",
    f"{_TORCH}.utils",
)

# Libraries (or parts of them) that use torch's default group, which must therefore exist.
_GROUP_USERS = {
    "accelerate": "Accelerate",
    "apex": "Apex",
    "colossalai": "Colossal-AI",
    "composer": "Composer",
    "deepspeed": "DeepSpeed",
    "detectron2": "Detectron2",
    "fairscale": "FairScale",
    "ignite": "Ignite",
    "lightning": "Lightning",
    "lightning_fabric": "Lightning",
    "megatron": "Megatron",
    "mmengine": "MMEngine",
    "pytorch_lightning": "Lightning",
    "timm": "timm",
    "torchmetrics": "TorchMetrics",
    "torchrec": "TorchRec",
    "transformers": "transformers",
}
_PARTS_WITH_GROUPS = {"timm": ("timm.utils",), "transformers": ("Trainer", "TrainingArguments")}

TELLING_WORDS = (
    ("distributed",),
    ("horovod",),
    *((name.rpartition(".")[2],) for name in _RENAMED),
    *((library, *part.split(".")) for library in _GROUP_USERS for part in _PARTS_WITH_GROUPS.get(library, ("",))),
)
"""Groups of words; a file to which `is_migrated` or `group_user` applies contains all words in at least one group."""


def is_migrated(name: str) -> bool:
    """Returns True if programs that use `name` need migration."""
    return is_in(name, _TORCH) or is_in(name, "horovod") or longest_renamed_prefix(name) is not None


def is_in(name: str, module: str) -> bool:
    """Returns True if `name` is `module` or a name inside it."""
    return name == module or name.startswith(f"{module}.")


def longest_renamed_prefix(name: str) -> str | None:
    """Returns the longest prefix of `name` that has an entry in the table of renamed names, or None."""
    while name not in _RENAMED:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return None
    return name


def new_name(name: str, way: MigrationMode) -> str | None:
    """Returns the replacement for `name` in migration mode `way`, or None if the name stays unchanged."""
    if is_in(name, "horovod"):
        return _of_horovod(name)
    if way is MigrationMode.PLUGIN:
        # torch's function returns "gloo" for CPU devices; Paceline's function returns a name that torch accepts.
        is_default = name in (f"{_TORCH}.get_default_backend_for_device", f"{_CORE}.get_default_backend_for_device")
        return "paceline.get_default_backend_for_device" if is_default else None
    if (known := longest_renamed_prefix(name)) is not None:
        return _RENAMED[known] + name[len(known) :]
    for module in _HOOK_MODULES:
        if is_in(name, module):
            rest = name[len(module) :]
            return f"paceline.parallel.hooks{rest}" if not rest or rest[1:] in _HOOKS else None
    for module in (_CORE, _TORCH):
        if is_in(name, module):
            return _of_torch(name[len(module) + 1 :])
    return None


def _of_torch(rest: str) -> str | None:
    first = rest.partition(".")[0]
    if not rest:
        return "paceline"
    is_ours = first in dir(paceline) and first not in _BUILT_ON_TORCHS_GROUPS
    return f"paceline.{rest}" if is_ours else None


def _of_horovod(name: str) -> str | None:
    if name in ("horovod", HOROVOD):
        return "paceline.horovod"
    if name == "horovod.run":
        return "paceline.horovod.run"
    if not name.startswith(f"{HOROVOD}."):
        return None
    rest = name[len(HOROVOD) + 1 :]
    for module in ("mpi_ops", "functions", "optimizer", "compression", "sync_batch_norm"):
        rest = rest.removeprefix(f"{module}.")
    return f"paceline.horovod.{rest}" if rest.partition(".")[0] in HOROVODS_NAMES else None


def group_user(name: str) -> str | None:
    """Returns the library that contains `name` if `name` uses torch's default group, otherwise None."""
    library = name.partition(".")[0]
    parts = _PARTS_WITH_GROUPS.get(library, ("",))
    return _GROUP_USERS.get(library) if any(part in name for part in parts) else None


def needs_torchs_groups(name: str) -> bool:
    """Returns True if `name` requires torch's process groups and therefore the plug-in."""
    return (
        is_in(name, _TORCH)
        and new_name(name, MigrationMode.IMPORT) is None
        and not any(is_in(name, module) for module in _STAYS)
    )


MARK = "TODO(paceline): "  # prefix of comments about remaining work in the user's files
_WIDTH = 100


@dataclass(frozen=True)
class MigrationFinding:
    """A location in a program that the migration changes or reports.

    Attributes:
        line: The 1-based line number in the original file.
        what: The subject, such as "torch.distributed.all_reduce".
        reason: The reason why a manual change is required, or None.
        note: A note about a migrated location, or None.
    """

    line: int
    what: str
    reason: str | None = None
    note: str | None = None

    @property
    def is_migrated_fully(self) -> bool:
        """Whether the location was migrated automatically, so that no manual change is required."""
        return self.reason is None


@dataclass(frozen=True)
class ModeChoice:
    """The chosen migration mode and the reason for the choice."""

    way: MigrationMode
    reason: str = ""  # the reason why the program must keep torch.distributed, or ""


@dataclass(frozen=True)
class MigratedFile:
    """The migrated text of a file and its findings in line order."""

    text: str
    places: tuple[MigrationFinding, ...] = ()
    backend_options: frozenset[str] = frozenset()  # command-line options that supply the name of a backend


def comment_lines(reason: str, indent: int = 0) -> list[str]:
    """Returns the unindented lines of a comment about remaining work."""
    width = max(40, _WIDTH - indent)
    return textwrap.wrap(MARK + reason, width, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False)


def score(places: Sequence[MigrationFinding]) -> tuple[int, int]:
    """Returns the number of locations that were migrated automatically, and the total number of locations."""
    return sum(place.is_migrated_fully for place in places), len(places)
