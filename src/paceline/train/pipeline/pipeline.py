"""Pipeline: a model whose layers are divided among ranks.

Layers are grouped into stages, and batches are split into micro-batches. All ranks agree on the size of a batch before
they exchange any activations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from paceline.comm.engine.channel import ReduceOp
from paceline.comm.group.collectives.coalesced import all_reduce_coalesced
from paceline.comm.group.default import Group, resolve
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.group.work import Work
from paceline.train.module_tensors import uncompiled_key
from paceline.train.pipeline.execution import Ending, Execution, Forms, Stage, StageTransport, Value
from paceline.train.pipeline.program import (
    PipelineProgram,
    PipelineSchedule,
    forwards_only,
    make_pipeline_schedule,
    program_of,
    verify_program,
)
from paceline.train.training_events import RecordedSteps

_NOT_NEEDED, _MISSING, _UNEVEN = -1, -2, -3  # sent instead of a number of rows
_STAGE_OF = {"inputs": "first", "targets": "last"}


def agreed_rows(
    group: ProcessGroup,
    plan: PipelineSchedule,
    inputs: Sequence[torch.Tensor] | None,
    targets: Sequence[torch.Tensor] | None,
) -> int:
    """Returns the number of samples in the batch; all ranks must call this function.

    Only the rank with the first stage passes `inputs`, and only the rank with the last stage passes `targets`, unless
    no loss is computed. If any are missing, or their sizes do not match, all ranks raise ValueError.
    """
    mine = torch.tensor([_rows_of_batch(inputs), _rows_of_batch(targets)], device="cpu")
    from_all = [torch.empty_like(mine) for _ in range(group.size())]
    group.all_gather(from_all, mine)
    first, last = plan.ranks_of_stages[0], plan.ranks_of_stages[-1]
    rows, wanted = int(from_all[first][0]), int(from_all[last][1])
    for name, rank, seen in (("inputs", first, rows), ("targets", last, wanted)):
        who = f"{group.me}: pipeline: the {name} on rank {group.ranks[rank]}, which has the {_STAGE_OF[name]} stage,"
        if seen == _MISSING:
            raise ValueError(
                f"{who} are missing; pass a tensor, or a tuple of tensors, with the samples along dimension 0"
            )
        if seen == _UNEVEN:
            raise ValueError(
                f"{who} are not tensors with the same number of samples along dimension 0; pass such tensors"
            )
    if wanted not in (_NOT_NEEDED, rows):
        raise ValueError(
            f"{group.me}: pipeline: rank {group.ranks[first]} passes inputs of {rows} samples, and rank "
            f"{group.ranks[last]} targets of {wanted}; pass the same batch on both"
        )
    if rows < plan.micro_batches:
        raise ValueError(
            f"{group.me}: pipeline: a batch of {rows} samples cannot be divided into {plan.micro_batches} "
            "micro-batches; each needs at least one sample"
        )
    return rows


def _rows_of_batch(batch: Sequence[torch.Tensor] | None) -> int:
    if batch is None:
        return _NOT_NEEDED
    if not batch:
        return _MISSING
    if not all(isinstance(part, torch.Tensor) and part.ndim and part.size(0) == batch[0].size(0) for part in batch):
        return _UNEVEN
    return batch[0].size(0)


def into_stages(layers: Sequence[nn.Module], stages: int, split: Sequence[int] | None) -> list[list[int]]:
    """Groups layers into stages; returns a list of layer indices for each stage.

    If `split`, the number of layers in each stage, is None, the largest stage is as small as possible; the size of a
    layer is its number of parameters plus one.
    """
    if split is not None:
        if len(split) != stages or sum(split) != len(layers) or min(split) < 1:
            raise ValueError(
                f"Pipeline: split={list(split)} must be {stages} numbers of at least 1, one per stage, whose sum is "
                f"{len(layers)}, the number of layers"
            )
        ends = list(accumulate(split))
        return [list(range(end - size, end)) for end, size in zip(ends, split, strict=True)]
    if len(layers) < stages:
        raise ValueError(f"Pipeline: there are {len(layers)} layers for {stages} stages; each stage needs at least one")
    return _balanced([1 + sum(p.numel() for p in layer.parameters()) for layer in layers], stages)


def _balanced(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Divides indices into consecutive parts, minimizing the weight of the heaviest part by bisection."""
    low, high = max(weights), sum(weights)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(weights, middle, parts)) <= parts:
            high = middle
        else:
            low = middle + 1
    return _filled(weights, low, parts)


def _filled(weights: Sequence[int], most: int, parts: int) -> list[list[int]]:
    """Fills each part up to the weight `most`, but leaves at least one element for each remaining part."""
    filled: list[list[int]] = [[]]
    total = 0
    for index, weight in enumerate(weights):
        further = parts - len(filled)
        if filled[-1] and (total + weight > most or len(weights) - index <= further):
            filled.append([])
            total = 0
        filled[-1].append(index)
        total += weight
    return filled


def into_micro_batches(batch: tuple[torch.Tensor, ...], micro_batches: int) -> list[tuple[torch.Tensor, ...]]:
    """Splits the rows of each tensor into micro-batches as evenly as possible."""
    return list(zip(*(part.tensor_split(micro_batches) for part in batch), strict=True))


LossFunction = Callable[[Any, Any], torch.Tensor]
"""A function that computes a micro-batch's mean loss, a scalar, from the last layer's output and the target."""


class Pipeline(nn.Module):
    """A model whose layers are divided among the ranks in a group; micro-batches are passed from rank to rank.

    Each rank keeps only the layers in its stages, under their names in the whole model, so each rank's `state_dict()`
    is a part of the whole model's. A step accumulates gradients into `.grad`, as a backward pass does. Use optimizers,
    schedulers and `zero_grad` as usual, with `pipeline.parameters()`.

    Args:
        layers: the whole model, which must be the same on every rank: an `nn.Sequential`, or a list of modules that are
            called sequentially. If a module returns a tuple of tensors, the next module receives them as separate
            arguments. The shapes of tensors between stages may depend only on the shape of the batch.
        loss: a function that returns the mean loss for a micro-batch's output and target; it is called on the rank with
            the last stage.
        micro_batches: the number of micro-batches per batch. With m micro-batches, p ranks and one stage per rank, the
            bubble (idle time) is (p - 1) / (m + p - 1) of a step.
        schedule: `1f1b`, `gpipe`, `interleaved` or `zero_bubble`; see docs/large-models.md.
        stages_per_rank: the number of stages per rank; more than 1 only with `interleaved`.
        split: the number of layers in each stage; by default, the largest stage is as small as possible.
        group: the ranks in the pipeline, such as `mesh.get_group("pp")`; if None, the default group.
        data_parallel_group: the ranks that hold the same stages and train on different samples, such as
            `mesh.get_group("dp")`. Gradients are averaged over these ranks while other stages still compute.
        whole: the model to which the layers belong, needed if the model's names for the layers differ from those in
            `layers`, such as `blocks.0` for layer 1. Checkpoints then use this model's names and parameter order.

    Raises:
        ValueError: the schedule does not support this combination of ranks, stages and micro-batches; there are too few
            layers; two stages share a weight; or `whole` contains different layers.

    Example::

        pipeline = paceline.Pipeline(model, nn.functional.cross_entropy, micro_batches=8)
        optimizer = torch.optim.AdamW(pipeline.parameters())
        loss = pipeline.step(inputs, targets)  # on every rank
        optimizer.step()
        optimizer.zero_grad()
    """

    def __init__(
        self,
        layers: nn.Sequential | Sequence[nn.Module],
        loss: LossFunction,
        *,
        micro_batches: int,
        schedule: str = "1f1b",
        stages_per_rank: int = 1,
        split: Sequence[int] | None = None,
        group: Group = None,
        data_parallel_group: Group = None,
        whole: nn.Module | None = None,
    ) -> None:
        super().__init__()
        chosen = resolve(group)
        if chosen is None:
            raise ValueError("Pipeline: this rank is not in the group; create the pipeline on the group's ranks only")
        self._group: ProcessGroup = chosen
        self._replicas = None if data_parallel_group is None else resolve(data_parallel_group)
        self._loss: LossFunction = partial(loss)  # `partial` keeps a loss module from being registered as a submodule
        plan = make_pipeline_schedule(schedule, chosen.size(), micro_batches, stages_per_rank)
        self._train, self._infer = program_of(plan), program_of(forwards_only(plan))
        verify_program(self._train)
        listed = list(layers)
        divided = into_stages(listed, plan.stages, split)
        _require_own_weights(listed, divided)
        numbers = [str(number) for number in range(len(listed))]
        names = list(layers._modules) if isinstance(layers, nn.Sequential) else numbers
        self._whole = describe_undivided(names, listed, whole)
        self._stages = self._keep_own(names, listed, divided, plan)
        own = next(self.parameters(), None)
        self._device = torch.device("cpu") if own is None else own.device
        self._transport = StageTransport(chosen, micro_batches, self._device)
        self._forms: dict[tuple[str, bool, int], Forms] = {}
        self._recorded = RecordedSteps("pipeline", self._device)

    @property
    def plan(self) -> PipelineSchedule:
        """The schedule, as data."""
        return self._train.plan

    @property
    def whole(self) -> UndividedModel:
        """The names in the whole model."""
        return self._whole

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first stage, which receives the inputs."""
        return 0 in self._stages

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, which receives the targets."""
        return self.plan.stages - 1 in self._stages

    def step(
        self, inputs: Any = None, targets: Any = None, *, scaler: torch.amp.GradScaler | None = None
    ) -> torch.Tensor:
        """Runs the forward and backward passes for a batch, and accumulates gradients; all ranks must call it.

        Args:
            inputs: a tensor, or a tuple of tensors, with the samples along dimension 0. Ranks without the first stage
                may pass None.
            targets: a tensor, or a tuple of tensors, with the samples along dimension 0. Ranks without the last stage
                may pass None.
            scaler: a gradient scaler, such as `paceline.GradScaler(group=...)`, or None.

        Returns:
            The unscaled mean loss over the batch, a detached scalar, on every rank.

        Raises:
            ValueError: inputs or targets are missing, their sizes differ, or the batch has fewer samples than there are
                micro-batches; raised on all ranks.
            CollectiveTimeoutError: a rank did not call this method in time.
            PeerLostError: a rank died.
        """
        rows = self._begin(inputs, targets, True)
        self._recorded.forward_begins()
        averages: list[Work] = []
        scale = 1.0 if scaler is None else float(scaler.scale(torch.ones((), device=self._device)))
        endings = self._endings(targets, scale / rows)
        losses = self._run(self._train, inputs, rows, endings, partial(self._average, averages))
        for work in averages:
            work.wait()
        mean = torch.zeros((), device=self._device)
        if self.is_last:
            mean += torch.stack([loss for (loss,) in losses]).sum() / scale
        self._group.broadcast(mean, self.plan.ranks_of_stages[-1])
        self._recorded.backward_ended(averaged=True)
        return mean

    def forward(self, inputs: Any = None) -> Any:
        """Runs the forward passes for a batch without computing gradients; all ranks must call this method.

        Returns:
            The output for the whole batch on the rank with the last stage; None on other ranks.

        Raises:
            ValueError: see `step`.
        """
        rows = self._begin(inputs, None, False)
        with torch.no_grad():
            outputs = self._run(self._infer, inputs, rows)
        if not self.is_last:
            return None
        return _given(tuple(torch.cat(parts) for parts in zip(*outputs, strict=True)))

    def _keep_own(
        self,
        names: Sequence[str],
        layers: Sequence[nn.Module],
        divided: Sequence[Sequence[int]],
        plan: PipelineSchedule,
    ) -> dict[int, Stage]:
        """Registers this rank's layers under their names; returns this rank's stages by number."""
        stages = {}
        for stage, numbers in enumerate(divided):
            if plan.ranks_of_stages[stage] == self._group.rank():
                stages[stage] = Stage([layers[number] for number in numbers])
                for number in numbers:
                    self.add_module(names[number], layers[number])
        return stages

    def _begin(self, inputs: Any, targets: Any, needs_targets: bool) -> int:
        """Waits until all ranks have agreed on the number of samples in the batch, and returns it."""
        first = _several(inputs) if self.is_first else None
        last = _several(targets) if self.is_last and needs_targets else None
        return agreed_rows(self._group, self.plan, first, last)

    def _endings(self, targets: Any, weight: float) -> list[Ending]:
        """Returns each micro-batch's loss function if this rank has the last stage; `weight` applies to each sample."""
        if not self.is_last:
            return []
        parts = self.plan.micro_batches

        def ending(target: Value, size: int, output: Value) -> torch.Tensor:
            return self._loss(_given(output), _given(target)) * (size * weight)

        divided = into_micro_batches(_several(targets), parts)
        return [partial(ending, target, size) for target, size in zip(divided, map(_rows, divided), strict=True)]

    def _average(self, averages: list[Work], stage: Stage) -> None:
        """Starts averaging a stage's gradients over the replicas."""
        if self._replicas is None:
            return
        if grads := [parameter.grad for parameter in stage.parameters if parameter.grad is not None]:
            work = all_reduce_coalesced(grads, ReduceOp.AVG, self._replicas, async_op=True)
            assert work is not None, "it was started in the background"
            averages.append(work)

    def _run(
        self,
        program: PipelineProgram,
        inputs: Any,
        rows: int,
        endings: Sequence[Ending] = (),
        has_gradients: Callable[[Stage], None] = lambda stage: None,
    ) -> list[Value]:
        """Runs a program; returns losses or outputs on the rank with the last stage, and [] on other ranks."""
        divided = into_micro_batches(_several(inputs), self.plan.micro_batches) if self.is_first else []
        forms = self._forms.setdefault((program.plan.name, self.training, rows), Forms())
        rank, stages, transport = self._group.rank(), self._stages, self._transport
        try:
            return Execution(program, rank, stages, transport, forms, divided, endings, has_gradients).run()
        except BaseException:
            transport.forget()
            for stage in stages.values():
                stage.forget()
            raise


def _several(given: Any) -> Value:
    if given is None:
        return ()
    return tuple(given) if isinstance(given, (tuple, list)) else (given,)


def _rows(batch: Value) -> int:
    return batch[0].size(0)


def _given(several: Value) -> Any:
    return several[0] if len(several) == 1 else several


def _require_own_weights(layers: Sequence[nn.Module], divided: Sequence[Sequence[int]]) -> None:
    stages_of: dict[int, int] = {}
    for stage, numbers in enumerate(divided):
        for number in numbers:
            for name, parameter in layers[number].named_parameters():
                if stages_of.setdefault(id(parameter), stage) != stage:
                    raise ValueError(
                        f"Pipeline: {name} of layer {number} belongs to stage {stage} and to stage "
                        f"{stages_of[id(parameter)]}; stages can be on different ranks, so they cannot share a weight. "
                        "Give each its own, or put both into one stage with split="
                    )


_INDEX = "_paceline_place_in_whole"


@dataclass(frozen=True)
class ParameterIndex:
    """The index of a parameter in the whole model's `parameters()` (`number`), and the number of parameters (`of`)."""

    number: int
    of: int


@dataclass(frozen=True)
class UndividedModel:
    """The names in a model before its layers were divided among ranks."""

    names: Mapping[str, str]  # from layer names in the `Pipeline` to names in this model
    keys: frozenset[str]  # the keys in the model's `state_dict()`

    def key_of(self, key: str) -> str:
        """Converts a key in the Pipeline's `state_dict` to the corresponding key in the whole model."""
        layer, _, rest = key.partition(".")
        return _within(self.names[layer], rest)


def describe_undivided(names: Sequence[str], layers: Sequence[nn.Module], whole: nn.Module | None) -> UndividedModel:
    """Describes the whole model, and attaches a ParameterIndex to each parameter.

    `names` are the names of the layers in the Pipeline; if `whole` is None, their names in the model are the same.

    Raises:
        ValueError: a layer is not in the whole model, or a tensor in the whole model is not in any layer.
    """
    if whole is None:
        paths = dict(zip(names, names, strict=True))
        parameters = list(nn.ModuleList(layers).parameters())
    else:
        paths = _found(names, layers, whole)
        parameters = list(whole.parameters())
        paths = {name: uncompiled_key(whole, path) for name, path in paths.items()}
    keys = {
        _within(paths[name], uncompiled_key(layer, key))
        for name, layer in zip(names, layers, strict=True)
        for key in layer.state_dict()
    }
    if whole is not None and (missing := sorted({uncompiled_key(whole, key) for key in whole.state_dict()} - keys)):
        raise ValueError(
            f"Pipeline: none of the layers has {missing[0]!r} of the whole model; pass all of its layers, in the order "
            "in which they run"
        )
    for number, parameter in enumerate(parameters):
        setattr(parameter, _INDEX, ParameterIndex(number, len(parameters)))
    return UndividedModel(paths, frozenset(keys))


def index_in_model(parameter: torch.Tensor) -> ParameterIndex | None:
    """Returns a parameter's index in the whole model, or None if the parameter does not belong to a `Pipeline`."""
    index: ParameterIndex | None = getattr(parameter, _INDEX, None)
    return index


def _found(names: Sequence[str], layers: Sequence[nn.Module], whole: nn.Module) -> dict[str, str]:
    paths = {id(module): path for path, module in whole.named_modules()}
    for name, layer in zip(names, layers, strict=True):
        if id(layer) not in paths and layer.state_dict():
            raise ValueError(
                f"Pipeline: layer {name}, a {type(layer).__name__}, is not a module of the whole model; take the "
                "layers from it"
            )
    return {name: paths.get(id(layer), name) for name, layer in zip(names, layers, strict=True)}


def _within(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
