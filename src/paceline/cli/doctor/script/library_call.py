"""`LibraryCall`, a call to a function that the script does not define, and tests that recognize library objects."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from paceline.cli.doctor.script.execution_state import ExecutionState
from paceline.cli.doctor.script.trace import EventKind
from paceline.cli.doctor.script.value import AbstractValue, Fact, inherited_facts, shortened

FORKSERVER_IS_DEFAULT = sys.version_info >= (3, 14)
"""Whether `forkserver`, whose processes import the script, is the default start method on Linux."""


@dataclass(frozen=True)
class LibraryCall:
    """A call to a library function: the function, its arguments, and the state of the calling rank.

    `interpret` calls a function that the script defines, given the function, the arguments and the call's node.
    """

    state: ExecutionState
    callee: AbstractValue
    arguments: list[AbstractValue]
    keywords: dict[str, AbstractValue]
    node: ast.AST
    interpret: Callable[[AbstractValue, list[AbstractValue], dict[str, AbstractValue], ast.AST], AbstractValue]

    @property
    def name(self) -> str:
        """The last part of the function's name."""
        return self.callee.last_name

    @property
    def path(self) -> str:
        """The qualified name of the function."""
        return self.callee.text

    @property
    def module(self) -> str:
        """The qualified name without its last part."""
        return self.callee.text.rpartition(".")[0]

    @property
    def line(self) -> int:
        """The line of the call in the script."""
        return getattr(self.node, "lineno", 0)

    def argument(self, position: int, *names: str) -> AbstractValue | None:
        """Returns the argument at a position or with one of the names."""
        if 0 <= position < len(self.arguments):
            return self.arguments[position]
        return next((self.keywords[name] for name in names if name in self.keywords), None)

    def record(
        self,
        kind: EventKind,
        name: str,
        subject: AbstractValue | None = None,
        result: AbstractValue | None = None,
        in_group: bool = False,
    ) -> None:
        """Adds an event at this call to the trace."""
        self.state.path.record(kind, name, self.node, subject, result, in_group)

    def object(self, **parts: object) -> AbstractValue:
        """Returns a new object, identified by the function and the line that created it."""
        value = AbstractValue(
            f"{self.name} on line {self.line}", called=self.path, node=self.node, arguments=tuple(self.arguments),
            keywords=self.keywords,
        )  # fmt: skip
        for name, part in parts.items():
            setattr(value, name, part)
        return value

    def run(
        self,
        function: AbstractValue,
        arguments: Sequence[AbstractValue],
        keywords: Mapping[str, AbstractValue] | None = None,
    ) -> AbstractValue:
        """Interprets a function that the script defines and the library calls, such as a callback."""
        return self.interpret(function, list(arguments), dict(keywords or {}), self.node)


COMMUNICATORS = {
    "torch.distributed", "paceline", "dist", "distributed", "torch.distributed.distributed_c10d", "hvd", "horovod",
    "horovod.torch", "paceline.horovod", "torch.distributed.checkpoint",
}  # fmt: skip
_PREPARES = {"prepare", "prepare_data_loader", "setup_dataloaders"}  # of Accelerator and Fabric
INITIALIZERS = {"init_process_group", "init_distributed"}
_ORDERS_RANKS = re.compile(r"zero|first|main|master|rank|lock|join|once|sequential", re.I)


def qualified_name(node: ast.AST) -> str:
    """Returns the dotted name of an expression such as `torch.no_grad()`."""
    if isinstance(node, ast.Call):
        return qualified_name(node.func)
    if isinstance(node, ast.Attribute):
        return f"{qualified_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@cache
def is_generator(node: ast.AST) -> bool:
    """Returns True if a function is a generator function."""
    return any(isinstance(inner, (ast.Yield, ast.YieldFrom)) for inner in ast.walk(node))


def initializes(tree: ast.AST) -> bool:
    """Returns True if the script contains a call that connects the ranks."""
    calls = [qualified_name(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return any(name.rpartition(".")[2] in INITIALIZERS or name == "hvd.init" for name in calls)


def starts_processes(nodes: Iterable[ast.AST]) -> bool:
    """Returns True if the statements start processes."""
    calls = (qualified_name(inner) for node in nodes for inner in ast.walk(node) if isinstance(inner, ast.Call))
    return any(name.rpartition(".")[2] == "Process" for name in calls)


def imports_script(start_method: object) -> bool:
    """Returns True if processes started with this method, or with the default method if None, import the script."""
    return FORKSERVER_IS_DEFAULT if start_method is None else start_method in ("spawn", "forkserver")


def is_loader(value: AbstractValue) -> bool:
    """Returns True if the value is a `DataLoader`."""
    return value.called_name == "DataLoader"


def sampler_of(loader: AbstractValue) -> AbstractValue | None:
    """Returns the sampler passed to a `DataLoader` (possibly the constant None), or None if no sampler is passed."""
    for name in ("batch_sampler", "sampler"):
        value = loader.keywords.get(name)
        if value is not None and value.is_none() is not True:
            return value
    return loader.arguments[3] if len(loader.arguments) > 3 else loader.keywords.get("sampler")


def loaders_in(value: AbstractValue) -> list[AbstractValue]:
    """Returns the data loaders that a loop over the value reads."""
    return [source for source in value.sources(3) if is_loader(source)]


def is_different_on_each_rank(iterable: AbstractValue) -> bool:
    """Returns True if the items of an iterable are samples that only this rank reads."""
    if any(source.called_name in _PREPARES for source in iterable.sources()):
        return True
    for loader in loaders_in(iterable):
        sampler, shuffle = sampler_of(loader), loader.keywords.get("shuffle")
        if (sampler is not None and sampler.is_none() is not True) or (shuffle is not None and shuffle.truth()):
            return True
    return False


def disables_gradients(value: AbstractValue) -> bool:
    """Returns True if a context manager disables gradients, as in evaluation."""
    return "no_grad" in value.text or "inference_mode" in value.text


def skips_averages(value: AbstractValue) -> bool:
    """Returns True if the context manager is a wrapped model's `no_sync`."""
    owner = value.receiver
    return value.called_name == "no_sync" and owner is not None and owner.wraps is not None


def orders_ranks(value: AbstractValue) -> bool:
    """Returns True if the context manager runs the ranks one after another or supports uneven inputs."""
    name = value.called or value.text
    return _ORDERS_RANKS.search(name.partition("(")[0]) is not None


def output_of(module: AbstractValue, result: AbstractValue, arguments: Sequence[AbstractValue]) -> AbstractValue:
    """Returns the result of a forward pass."""
    facts = result.inherited() | inherited_facts(arguments)
    if module.wraps is not None:
        facts |= {Fact.REPLICA_OUTPUT}
    elif module.wrapper is not None:
        facts |= {Fact.INNER_OUTPUT}
    text = shortened(f"{module.text}({', '.join(argument.text for argument in arguments)})")
    return AbstractValue(text, facts=facts, arguments=(result,))


def is_torch_module(value: AbstractValue) -> bool:
    """Returns True if the value is a layer or a model."""
    if value.instance_of is not None:
        return any(name.rpartition(".")[2].endswith("Module") for name in value.instance_of.base_names())
    name = value.called
    return name.startswith(("torch.nn.", "nn.")) and value.is_object and not name.endswith(("Parameter", "Parallel"))


def wrapped_owner(value: AbstractValue) -> AbstractValue | None:
    """Returns the wrapper whose module contains the value, or None."""
    owner: AbstractValue | None = value
    while owner is not None:
        if owner.wraps is not None or owner.wrapper is not None:
            return owner if owner.wraps is not None else owner.wrapper
        owner = owner.receiver
    return None


def is_work(value: AbstractValue) -> bool:
    """Returns True if an asynchronous call returned the value."""
    return value.called == "asynchronous"


def is_world(group: AbstractValue) -> bool:
    """Returns True if a group argument denotes all ranks."""
    return group.is_none() is True or group.text.endswith("WORLD")


def is_function(value: AbstractValue) -> bool:
    """Returns True if the value is a function that the script defines."""
    return value.function is not None
