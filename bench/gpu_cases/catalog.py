"""The steps of `bench/gpu.py` in order, with their programs, rank counts and time limits."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from gpu_cases import collectives, divided, failures, graphs, health, speed, states, training

ONE, MANY = 1, 0
ALL = ("cuda", "fake", "cpu")
GPU = ("cuda",)
DEVICES = ("cuda", "fake")

Program = Callable[..., object]


@dataclasses.dataclass(frozen=True)
class Step:
    """A program that is run on a number of ranks.

    Attributes:
        name: The name for `--steps`; the part before the first colon is its section.
        program: The function that each rank calls with a `Setting`.
        ranks: 1, or MANY for all ranks of the run.
        limit_s: The number of seconds after which the ranks are killed.
        devices: The device types to which the step applies.
        least: The minimum number of devices.
        dies: True if the last rank exits without returning a result.
        variables: Additional environment variables for the ranks.
        backend: Paceline's backend, if it differs from the run's.
    """

    name: str
    program: Program
    ranks: int = MANY
    limit_s: float = 40
    devices: tuple[str, ...] = ALL
    least: int = 1
    dies: bool = False
    variables: tuple[tuple[str, str], ...] = ()
    backend: str | None = None

    @property
    def section(self) -> str:
        return self.name.partition(":")[0]


DEBUG = (("NCCL_DEBUG", "INFO"),)
BLOCKING = (("CUDA_LAUNCH_BLOCKING", "1"),)


def steps() -> list[Step]:
    """Returns all steps; the first steps check the requirements of the other steps."""
    training_limit = {"torch.compile": 90.0}
    return [
        Step("health: torch on one rank", health.theirs, ONE, 60),
        Step("health: torch on all ranks", health.theirs, MANY, 60),
        Step("health: Paceline on one rank", health.ours, ONE),
        Step("health: Paceline on all ranks", health.ours),
        Step("health: NCCL_DEBUG=INFO", health.ours, MANY, devices=GPU, variables=DEBUG),
        *(
            Step(f"collectives: {name}, types and layouts", functools.partial(collectives.all_types, name=name))
            for name in collectives.CALLS
        ),
        *(
            Step(f"streams: {name}", functools.partial(collectives.all_patterns, name=name))
            for name in collectives.CALLS
        ),
        Step("collectives: objects and barriers", collectives.objects_and_barriers),
        Step("collectives: groups", collectives.subgroups),
        *(
            Step(
                f"ddp: {name}",
                functools.partial(training.compare, name=name),
                limit_s=training_limit.get(name, 40.0),
            )
            for name in training.VARIANTS
        ),
        Step("ddp: join", training.uneven_inputs),
        Step("ddp: float32 on one rank", functools.partial(training.compare, name="float32"), ONE),
        Step("ddp: two devices a rank", training.two_devices, devices=DEVICES, least=2),
        Step("ddp: DataParallel", training.data_parallel, ONE, devices=DEVICES),
        *(Step(f"zero: stage {stage}", functools.partial(states.zero, stage=stage)) for stage in states.STAGES),
        *(
            Step(f"checkpoint: {what}", functools.partial(states.checkpoints, stage=stage))
            for stage, what in enumerate(["DDP", *(f"ZeRO {stage}" for stage in states.STAGES)])
        ),
        Step("checkpoint: map_location", states.map_location),
        *(
            Step(f"divided: pipeline, {schedule}", functools.partial(divided.pipeline, schedule=schedule))
            for schedule in ("gpipe", "1f1b", "interleaved")
        ),
        Step("divided: tensor parallel", divided.tensor_parallel),
        Step("divided: LogicalShards", divided.logical_shards),
        Step("divided: deterministic DDP", divided.deterministic),
        Step("divided: DiLoCo", divided.diloco),
        Step("inputs: PackedSequence", divided.packed_sequences),
        Step("inputs: objects with tensors of the device", divided.device_objects),
        Step("inputs: lists of tensors", divided.several_tensors),
        Step("inputs: set_default_device", divided.default_device),
        Step("failures: a rank is killed", failures.killed, dies=True),
        Step("failures: a rank raises", failures.raised, dies=True),
        Step("failures: a rank is late", failures.late),
        Step("failures: destroyed behind a busy stream", failures.destroyed_behind_a_busy_stream),
        Step("failures: two ranks on one GPU", failures.two_on_one_gpu, devices=GPU),
        Step("graphs: beside calls", graphs.beside_calls, devices=GPU),
        Step("graphs: with calls", graphs.with_calls, devices=GPU),
        Step("graphs: with calls, one rank", graphs.with_calls, ONE, devices=GPU),
        Step(
            "CUDA_LAUNCH_BLOCKING=1: all_reduce",
            functools.partial(collectives.all_patterns, name="all_reduce"),
            devices=GPU,
            variables=BLOCKING,
        ),
        Step(
            "CUDA_LAUNCH_BLOCKING=1: ddp",
            functools.partial(training.compare, name="float32"),
            devices=GPU,
            variables=BLOCKING,
        ),
        *(dataclasses.replace(step, name=f"staged: {step.name}", devices=GPU, backend="paceline") for step in staged()),
        Step("speed: all_reduce on one rank", speed.bandwidth, ONE, 60),
        Step("speed: all_reduce on all ranks", speed.bandwidth, MANY, 90),
        Step("speed: staged all_reduce on all ranks", speed.bandwidth, MANY, 90, GPU, backend="paceline"),
        Step("speed: host time on one rank", speed.host_time, ONE),
        Step("speed: memory of a group", speed.memory, devices=GPU),
    ]


def staged() -> list[Step]:
    """Returns the steps that also run on GPUs without NCCL, with tensors staged in host memory."""
    return [
        *(
            Step(f"{name}, types and layouts", functools.partial(collectives.all_types, name=name))
            for name in ("all_reduce", "all_gather", "reduce_scatter_tensor")
        ),
        *(
            Step(f"streams of {name}", functools.partial(collectives.all_patterns, name=name))
            for name in ("all_reduce", "broadcast", "all_to_all_single", "batch_isend_irecv")
        ),
        *(
            Step(f"DDP, {name}", functools.partial(training.compare, name=name))
            for name in ("float32", "autocast and GradScaler", "SyncBatchNorm", "find_unused_parameters")
        ),
        Step("ZeRO stage 3", functools.partial(states.zero, stage=3)),
        Step("LogicalShards", divided.logical_shards),
        Step("pipeline, 1f1b", functools.partial(divided.pipeline, schedule="1f1b")),
        Step("a rank is killed", failures.killed, dies=True),
        Step("destroyed behind a busy stream", failures.destroyed_behind_a_busy_stream),
    ]
