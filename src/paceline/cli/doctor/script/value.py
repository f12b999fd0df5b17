"""Abstract values and their operators. A value contains static information about an object on one rank."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum


class Fact(Enum):
    """A property that derived values inherit until a collective makes the value equal on all ranks."""

    RANK = "computed from the rank"
    PERHAPS_RANK = "returned by an unknown function that received the rank"
    WORLD_SIZE = "the number of ranks"
    LOCAL_SIZE = "the number of ranks on a machine"
    WORLD_RANGE = "computed from the number of ranks"
    TIMES_WORLD_SIZE = "multiplied by the number of ranks"
    PER_RANK = "different on each rank, such as a batch or a loss"
    CLOCK = "read from a clock"
    FINITENESS = "a test for NaN or infinity"
    REPLICA_OUTPUT = "computed by the forward pass of a wrapped model"
    INNER_OUTPUT = "computed by the forward pass of the module inside a wrapper"
    OPAQUE = "assigned by the script, so that its name does not determine its meaning"


INHERITED = {
    Fact.RANK, Fact.PERHAPS_RANK, Fact.WORLD_RANGE, Fact.PER_RANK, Fact.CLOCK, Fact.FINITENESS,
    Fact.REPLICA_OUTPUT, Fact.INNER_OUTPUT,
}  # fmt: skip
"""The properties that a computed value inherits from its operands."""


class _UnknownValue(Enum):
    UNKNOWN = "unknown"


UNKNOWN = _UnknownValue.UNKNOWN
_LONGEST_TEXT = 160


@dataclass(eq=False)
class FunctionObject:
    """A function or a lambda in the script, with the variables that it can read."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scopes: tuple[dict[str, AbstractValue], ...]
    defaults: dict[str, AbstractValue]
    owner: ClassObject | None = None
    decorators: tuple[str, ...] = ()

    @property
    def is_nested(self) -> bool:
        """Whether the function is nested in another function and therefore cannot be imported by other processes."""
        return len(self.scopes) > 1 and self.owner is None

    def bind(self, arguments: Sequence[AbstractValue], keywords: dict[str, AbstractValue]) -> dict[str, AbstractValue]:
        """Binds the arguments of a call to the parameters; returns the function's initial variables."""
        signature = self.node.args
        positional = [*signature.posonlyargs, *signature.args]
        names = [parameter.arg for parameter in [*positional, *signature.kwonlyargs]]
        scope = {name: AbstractValue(name) for name in names} | self.defaults
        scope |= dict(zip((parameter.arg for parameter in positional), arguments, strict=False))
        scope |= {name: value for name, value in keywords.items() if name in names}
        if signature.vararg is not None:
            rest = list(arguments[len(positional) :])
            scope[signature.vararg.arg] = AbstractValue(signature.vararg.arg, items=rest or None)
        if signature.kwarg is not None:
            rest_keywords = {f"['{name}']": value for name, value in keywords.items() if name not in names}
            scope[signature.kwarg.arg] = AbstractValue(signature.kwarg.arg, attributes=rest_keywords)
        return scope


@dataclass(eq=False)
class ClassObject:
    """A class defined in the script."""

    node: ast.ClassDef
    members: dict[str, AbstractValue]
    bases: tuple[AbstractValue, ...]

    def lookup(self, name: str) -> AbstractValue | None:
        """Returns a member of the class or of a base class in the script, or None."""
        if name in self.members:
            return self.members[name]
        for base in self.bases:
            if base.class_object is not None and (found := base.class_object.lookup(name)) is not None:
                return found
        return None

    def parent(self) -> ClassObject:
        """Returns a class that has only the inherited members, as `super` provides them."""
        bases = [base.class_object for base in self.bases if base.class_object is not None]
        return ClassObject(self.node, {}, tuple(AbstractValue("", class_object=base) for base in bases))

    def base_names(self) -> Iterator[str]:
        """Yields the names of all bases, including indirect bases through classes in the script."""
        for base in self.bases:
            yield base.text
            if base.class_object is not None:
                yield from base.class_object.base_names()


@dataclass(eq=False)
class AbstractValue:
    """An object on one rank: a constant, a function, an instance, the result of an unknown call, or alternatives.

    `text` is the expression that yields the value, with all known parts replaced by constants. Two ranks whose texts
    differ have different values.
    """

    text: str
    constant: object = UNKNOWN
    facts: frozenset[Fact] = frozenset()
    attributes: dict[str, AbstractValue] = field(default_factory=dict)
    function: FunctionObject | None = None
    class_object: ClassObject | None = None
    instance_of: ClassObject | None = None
    receiver: AbstractValue | None = None  # the object that owns the method or attribute
    items: list[AbstractValue] | None = None
    alternatives: tuple[AbstractValue, ...] = ()
    arguments: tuple[AbstractValue, ...] = ()  # the arguments of the call that returned the value
    keywords: dict[str, AbstractValue] = field(default_factory=dict)
    called: str = ""  # the qualified name of the function that returned the value
    node: ast.AST | None = None  # the call that returned the value
    methods_called: set[str] = field(default_factory=set)
    escaped: bool = False  # whether an unknown function has received the value
    wraps: AbstractValue | None = None  # the module inside a DistributedDataParallel
    wrapper: AbstractValue | None = None  # the DistributedDataParallel around a module
    is_alternative: bool = False  # whether the call that returned the value had several possible receivers
    pending: AbstractValue | None = None  # the Work of an asynchronous call that still uses the value

    @property
    def is_known(self) -> bool:
        """Whether the value is a constant."""
        return self.constant is not UNKNOWN

    @property
    def last_name(self) -> str:
        """The last part of a qualified name."""
        return self.text.rpartition(".")[2]

    @property
    def called_name(self) -> str:
        """The last part of the name of the function that returned the value."""
        return self.called.rpartition(".")[2]

    @property
    def is_module(self) -> bool:
        """Whether the value is an imported module or an attribute of a module."""
        return self.called == "import" or (self.receiver is not None and self.receiver.called == "import")

    @property
    def is_plain(self) -> bool:
        """Whether only the text is known; the variable's name may then determine the meaning."""
        structures = (self.function, self.class_object, self.instance_of, self.items, self.wraps)
        unknown = not self.is_known and not self.alternatives and Fact.OPAQUE not in self.facts
        return unknown and all(structure is None for structure in structures)

    def each(self) -> tuple[AbstractValue, ...]:
        """Returns the alternatives, or the value itself if there is only one."""
        return self.alternatives or (self,)

    def truth(self) -> bool | None:
        """Returns the result of `bool(value)`, or None if it is not known."""
        if self.is_known:
            return bool(self.constant)
        if self.alternatives:
            truths = {alternative.truth() for alternative in self.alternatives}
            return truths.pop() if len(truths) == 1 else None
        if self.items is not None:
            return True if self.items else None
        bodies = (self.function, self.class_object, self.instance_of, self.wraps)
        return True if any(body is not None for body in bodies) or self.is_object else None

    @property
    def is_object(self) -> bool:
        """Whether the value's name suggests that a constructor returned the value. Such a value is not None."""
        return self.called_name[:1].isupper()

    @property
    def is_computed_by_a_call(self) -> bool:
        """Whether calls return the value or its operands, so that evaluating it again may give a different result."""
        return bool(self.called) or any(argument.is_computed_by_a_call for argument in self.arguments)

    def is_none(self) -> bool | None:
        """Returns True if the value is None, False if it is not, and None if this is unknown."""
        if self.is_known:
            return self.constant is None
        return False if self.truth() else None

    def inherited(self) -> frozenset[Fact]:
        """Returns the properties that derived values inherit from this value."""
        return self.facts & INHERITED

    def entries(self) -> dict[str, AbstractValue]:
        """Returns the entries of a dict whose keys are strings."""
        found: dict[str, AbstractValue] = {}
        for value in self.each():
            found |= {key[2:-2]: entry for key, entry in value.attributes.items() if key[:2] == "['"}
        return found

    def contents(self) -> Iterator[AbstractValue]:
        """Yields the value, and the items of a list or a dict."""
        for value in self.each():
            yield value
            entries = [entry for key, entry in value.attributes.items() if key[:1] == "["]
            for entry in [*entries, *(value.items or ())]:
                yield from entry.contents()

    def sources(self, depth: int = 4) -> Iterator[AbstractValue]:
        """Yields the value, its alternatives and items, and the arguments and receivers of calls that returned it."""
        yield self
        if depth:
            entries = [value for key, value in self.attributes.items() if key[:1] == "["]
            parts = [*self.alternatives, *self.arguments, *self.keywords.values(), *(self.items or ()), *entries]
            for part in parts if self.receiver is None else [*parts, self.receiver]:
                yield from part.sources(depth - 1)

    def make_equal_on_all_ranks(self, line: int) -> None:
        """Removes all differences between the ranks, because a collective has written the value."""
        for part in self.each():
            part.facts -= INHERITED
            part.text = f"the result of the collective on line {line}"
            part.constant = UNKNOWN
            for item in part.items or ():
                item.make_equal_on_all_ranks(line)


def known(value: object, facts: frozenset[Fact] = frozenset()) -> AbstractValue:
    """Returns the abstract value of a constant."""
    return AbstractValue(shortened(repr(value)), value, facts)


def shortened(text: str) -> str:
    """Shortens a text to a bounded length so that different texts remain different."""
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 24]}...{hash(text)}"


def inherited_facts(values: Iterable[AbstractValue]) -> frozenset[Fact]:
    """Returns the properties that a value inherits if it is derived from these values."""
    return frozenset().union(*(value.inherited() for value in values))


def either(values: Iterable[AbstractValue]) -> AbstractValue:
    """Returns the alternatives as one value, or the common value if all are equal."""
    distinct: dict[object, AbstractValue] = {}
    for value in values:
        for alternative in value.each():
            key = (
                (type(alternative.constant), alternative.text, alternative.facts)
                if alternative.is_known
                else id(alternative)
            )
            distinct.setdefault(key, alternative)
    choices = tuple(distinct.values())[:6]
    if len(choices) == 1:
        return choices[0]
    text = shortened(" or ".join(sorted({choice.text for choice in choices})))
    facts = frozenset().union(*(choice.facts for choice in choices)) - {Fact.OPAQUE}
    sizes = {Fact.WORLD_SIZE, Fact.LOCAL_SIZE, Fact.TIMES_WORLD_SIZE}
    facts -= {fact for fact in sizes if any(fact not in choice.facts for choice in choices)}
    return AbstractValue(text, facts=facts, alternatives=choices)


@dataclass(frozen=True)
class SimulatedRank:
    """A rank of the simulated job, in which all machines have the same number of ranks."""

    rank: int
    world_size: int
    local_size: int

    def number_named(self, name: str) -> AbstractValue | None:
        """Returns the value of a variable, attribute or function whose name denotes a rank or a number of ranks."""
        name = name.lower().strip("_")
        if name in _RANK_NAMES:
            return known(self.rank, frozenset({Fact.RANK}))
        if name in _LOCAL_RANK_NAMES:
            return known(self.rank % self.local_size, frozenset({Fact.RANK}))
        if name in _NODE_RANK_NAMES:
            return known(self.rank // self.local_size, frozenset({Fact.RANK}))
        if name in _WORLD_SIZE_NAMES:
            return known(self.world_size, frozenset({Fact.WORLD_SIZE, Fact.WORLD_RANGE}))
        if name in _LOCAL_SIZE_NAMES:
            return known(self.local_size, frozenset({Fact.LOCAL_SIZE, Fact.WORLD_RANGE}))
        if name in _NODE_COUNT_NAMES:
            return known(self.world_size // self.local_size, frozenset({Fact.WORLD_RANGE}))
        if _MAIN_NAME.fullmatch(name):
            return known(self.rank == 0, frozenset({Fact.RANK}))
        if _LOCAL_MAIN_NAME.fullmatch(name):
            return known(self.rank % self.local_size == 0, frozenset({Fact.RANK}))
        return known(True) if name in _DISTRIBUTED_NAMES else None


_RANK_NAMES = {
    "rank", "global_rank", "world_rank", "ddp_rank", "dist_rank", "my_rank", "myrank", "rank_id", "worker_rank",
    "slurm_procid", "ompi_comm_world_rank", "get_rank", "process_index", "global_process_index", "get_global_rank",
    "proc_id", "process_id",
}  # fmt: skip
_LOCAL_RANK_NAMES = {
    "local_rank", "ddp_local_rank", "get_local_rank", "get_node_local_rank", "local_process_index", "slurm_localid",
    "localrank", "gpu_id", "ompi_comm_world_local_rank", "gpu", "local_gpu", "get_local_process_index",
}  # fmt: skip
_NODE_RANK_NAMES = {"node_rank", "group_rank", "machine_rank", "noderank"}
_WORLD_SIZE_NAMES = {
    "world_size", "ddp_world_size", "get_world_size", "num_processes", "slurm_ntasks", "ompi_comm_world_size",
    "nranks", "n_ranks", "num_ranks", "worldsize", "dist_world_size", "num_replicas",
}  # fmt: skip
_LOCAL_SIZE_NAMES = {
    "local_world_size", "device_count", "nprocs", "nproc", "ngpus", "n_gpus", "num_gpus", "n_gpu", "num_gpu",
    "ngpus_per_node", "gpus_per_node", "num_gpus_per_node", "nproc_per_node", "local_size",
}  # fmt: skip
_NODE_COUNT_NAMES = {"nnodes", "num_nodes", "n_nodes"}
_DISTRIBUTED_NAMES = {
    "distributed", "ddp", "is_distributed", "use_distributed", "use_ddp", "is_ddp", "ddp_enabled",
    "multiprocessing_distributed", "is_dist_avail_and_initialized", "is_dist", "is_parallel", "ddp_mode",
    "distributed_run", "is_torchelastic_launched",
}  # fmt: skip
_ROLE = r"(main|master|chief|primary|root|leader|rank_?zero|rank_?0|zero_rank|global_zero|world_process_zero|is_?rank0)"
_MAIN_NAME = re.compile(
    rf"(is|am|am_i|i_am|on|if|check)_(the_)?(global_)?{_ROLE}(_?(process|proc|rank|worker|node))?(_only)?"
    rf"|{_ROLE}_?(process|proc|worker)|(is_)?global_(main|zero|master)|is_first_(rank|process|worker)|should_save|should_log|is_zero_rank"
    r"|is_logger|ismaster|ismain|save_on_each_node|is_coordinator|is_saver|is_writer|rank_zero|verbose_rank|is_log_rank"
)
_LOCAL_MAIN_NAME = re.compile(rf"(is_)?local_{_ROLE}(_?(process|proc|rank|worker))?|is_{_ROLE}_?(local|on_node)\w*")


_OPERATORS: dict[type[ast.AST], Callable[..., object]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv, ast.Mod: operator.mod, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b, ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.USub: operator.neg,
    ast.BitXor: operator.xor, ast.UAdd: operator.pos, ast.Not: operator.not_, ast.Is: operator.eq,
    ast.IsNot: operator.ne,
}  # fmt: skip


def arithmetic(op: ast.operator, left: AbstractValue, right: AbstractValue) -> AbstractValue:
    """Returns the result of a binary operator."""
    if left.alternatives or right.alternatives:
        return either(arithmetic(op, a, b) for a in left.each() for b in right.each())
    facts = inherited_facts([left, right])
    sizes = {Fact.WORLD_SIZE, Fact.LOCAL_SIZE}
    if isinstance(op, ast.Mult) and (sizes & left.facts or sizes & right.facts):
        facts |= {Fact.TIMES_WORLD_SIZE}
    elif isinstance(op, (ast.Mult, ast.Add, ast.Sub)):
        facts |= (left.facts | right.facts) & {Fact.TIMES_WORLD_SIZE}
    if left.is_known and right.is_known and type(op) in _OPERATORS:
        with suppress(Exception):
            return known(_OPERATORS[type(op)](left.constant, right.constant), facts)
    text = shortened(f"({left.text} {type(op).__name__} {right.text})")
    return AbstractValue(text, facts=facts | {Fact.OPAQUE}, arguments=(left, right))


def unary(op: ast.unaryop, operand: AbstractValue) -> AbstractValue:
    """Returns the result of a unary operator."""
    if operand.alternatives:
        return either(unary(op, alternative) for alternative in operand.alternatives)
    if isinstance(op, ast.Not) and (truth := operand.truth()) is not None:
        return known(not truth, operand.facts)
    if operand.is_known and type(op) in _OPERATORS:
        with suppress(Exception):
            return known(_OPERATORS[type(op)](operand.constant), operand.inherited())
    text = shortened(f"{type(op).__name__}({operand.text})")
    return AbstractValue(text, facts=operand.inherited() | {Fact.OPAQUE}, arguments=(operand,))


def boolean(op: ast.boolop, values: list[AbstractValue]) -> AbstractValue:
    """Returns the result of `and` or `or` with these operands; further operands do not affect the result."""
    stops_at = isinstance(op, ast.Or)
    decided = next((value for value in values if value.truth() is stops_at), None)
    facts = frozenset().union(*(value.facts for value in values)) - {Fact.OPAQUE}
    unknown = [value for value in values if value.truth() is None]
    if decided is not None and not unknown:
        return decided
    if decided is not None and not stops_at:
        return known(False, facts)
    if not unknown:
        return values[-1]
    if stops_at:
        return either([*unknown, values[-1]] if decided is None else [*unknown, decided])
    if len(unknown) == 1 and len(values) == 1:
        return unknown[0]
    return AbstractValue(shortened(" and ".join(value.text for value in unknown)), facts=facts | {Fact.OPAQUE})


def compare(op: ast.cmpop, left: AbstractValue, right: AbstractValue, identity: SimulatedRank) -> AbstractValue:
    """Returns the result of a comparison. The launcher's environment variables count as set."""
    if left.alternatives or right.alternatives:
        return either(compare(op, a, b, identity) for a in left.each() for b in right.each())
    facts = inherited_facts([left, right])
    if isinstance(op, (ast.Is, ast.IsNot)) and right.is_known and right.constant is None:
        is_none = left.is_none()
        if is_none is not None:
            return known(is_none is isinstance(op, ast.Is), left.facts & {Fact.RANK})
    collection = right.constant if right.is_known else _constants(right.items)
    if isinstance(op, (ast.In, ast.NotIn)) and left.is_known and "environ" in right.text.split("."):
        if identity.number_named(str(left.constant)) is not None:
            return known(isinstance(op, ast.In))
    elif left.is_known and collection is not None and type(op) in _OPERATORS:
        with suppress(Exception):
            return known(bool(_OPERATORS[type(op)](left.constant, collection)), facts)
    text = shortened(f"({left.text} {type(op).__name__} {right.text})")
    return AbstractValue(text, facts=facts | {Fact.OPAQUE}, arguments=(left, right))


def item_of(owner: AbstractValue, index: AbstractValue, identity: SimulatedRank) -> AbstractValue:
    """Returns an item of a list, a dict or the environment."""
    if index.is_known:
        if (stored := owner.attributes.get(f"[{index.text}]")) is not None:
            return stored
        number = index.constant
        if owner.items is not None and isinstance(number, int) and -len(owner.items) <= number < len(owner.items):
            return _selected(owner.items[number], index)
        if isinstance(number, str):
            variable = identity.number_named(number)
            if variable is not None and owner.last_name in ("environ", "environb"):
                variable.constant, variable.text = str(variable.constant), repr(str(variable.constant))
            return variable if variable is not None and not owner.facts else unknown_item(owner, index.text)
    if owner.items:
        return _selected(either(owner.items), index)
    facts = inherited_facts([owner, index])
    return AbstractValue(shortened(f"{owner.text}[{index.text}]"), facts=facts, arguments=(owner, index))


def _selected(value: AbstractValue, index: AbstractValue) -> AbstractValue:
    """Returns an item of a collection; it depends on the rank if the index does."""
    facts = index.inherited() - value.facts
    if not facts:
        return value
    if value.is_known:
        return known(value.constant, value.facts | facts)
    text = shortened(f"{value.text}[{index.text}]")
    return AbstractValue(text, facts=value.inherited() | facts, arguments=(value,))


def dict_of(keys: Sequence[AbstractValue | None], values: Sequence[AbstractValue]) -> AbstractValue:
    """Returns a dict with these entries; the key of an unpacked dict is None."""
    pairs = list(zip(keys, values, strict=False))
    entries = {f"[{key.text}]": value for key, value in pairs if key is not None and key.is_known}
    text = shortened("{" + ", ".join(f"{key.text if key else '**'}: {value.text}" for key, value in pairs) + "}")
    return AbstractValue(text, attributes=entries, arguments=tuple(values), facts=inherited_facts(values))


def text_of_parts(parts: list[AbstractValue]) -> AbstractValue:
    """Returns the value of an f-string with these parts."""
    facts = inherited_facts(parts)
    if all(part.is_known for part in parts):
        return known("".join(str(part.constant) for part in parts), facts)
    return AbstractValue(shortened("f" + "|".join(part.text for part in parts)), facts=facts, arguments=tuple(parts))


def unknown_item(value: AbstractValue, index: str) -> AbstractValue:
    """Returns an item of a collection whose items are not known."""
    facts = value.inherited() | (value.facts & {Fact.OPAQUE})
    return AbstractValue(shortened(f"{value.text}[{index}]"), facts=facts, arguments=(value,))


def unpacked_part(value: AbstractValue, number: int, length: int) -> AbstractValue:
    """Returns the part of a value that tuple unpacking assigns to one target."""
    if value.items is not None and len(value.items) == length:
        return value.items[number]
    return unknown_item(value, str(number))


def _constants(items: list[AbstractValue] | None) -> list[object] | None:
    return [item.constant for item in items] if items is not None and all(item.is_known for item in items) else None
