"""An abstract interpreter that runs a script as one rank of a simulated job, and records its trace.

The interpreter tracks values through variables, attributes, functions and methods, as in abstract interpretation
(Cousot and Cousot 1977). A test whose result is known selects a branch. If the result is unknown, both branches are
interpreted and their results are merged. The body of a loop is interpreted once, unless the number of iterations
depends on the rank or on the number of ranks. The script is never executed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

from paceline.cli.doctor.script import library, library_call, training_calls
from paceline.cli.doctor.script.library_call import ExitError, LibraryCall
from paceline.cli.doctor.script.trace import ExecutionPath, PathCondition, Phase, RankTrace
from paceline.cli.doctor.script.value import (
    AbstractValue,
    AssignmentLog,
    Assignments,
    ClassObject,
    Fact,
    FunctionObject,
    SimulatedRank,
    arithmetic,
    compare,
    either,
    inherited_facts,
    item_of,
    known,
    shortened,
    text_of_parts,
    unary,
    unknown_item,
    unpacked_part,
)

Flow = set[str]
"""The possible ways to leave a block: `next`, `break`, `continue`, `return`, or `stop` (an exception or an exit)."""

_MOST_STEPS = 30_000
_MOST_UNCALLED_STEPS = 10_000
_DEEPEST_CALL = 30
_TRY = (ast.Try, getattr(ast, "TryStar", ast.Try))  # Python 3.10 has no except*
_RUN_ONCE = {
    "rank_zero_only", "main_process_only", "master_only", "run_on_rank_zero", "rank0_only", "on_main_process",
    "master_process_only", "only_on_rank_zero", "rank_zero", "run_once",
}  # fmt: skip


class RankInterpreter:
    """Interprets a script as one rank; `run` returns the trace.

    Args:
        tree: The syntax tree of the script.
        identity: The simulated rank.
        module_name: The value of `__name__`, which is `__main__` unless the script is imported.
        has_init: Whether the script itself initializes communication. If not, other code is assumed to initialize it.
    """

    def __init__(self, tree: ast.Module, identity: SimulatedRank, module_name: str = "__main__", has_init: bool = True):
        self.identity = identity
        self.initialized = not has_init
        self.seeded = False  # whether all ranks draw the same random numbers
        self.seeded_by_rank = False  # whether each rank draws different random numbers
        self.start_method: object = None  # the multiprocessing start method, such as "spawn"
        self.process_count: int | None = None  # number of started processes, if it is a constant
        self.trace = RankTrace(identity.rank)
        self.path = ExecutionPath(self.trace)
        self._tree = tree
        self._module: dict[str, AbstractValue] = {"__name__": known(module_name)}
        self._builtins: dict[str, AbstractValue] = {}
        self._scopes: tuple[dict[str, AbstractValue], ...] = (self._module,)
        self._globals: set[str] = set()
        self._log = AssignmentLog()
        self._returns: list[AbstractValue] = []
        self._calls: list[ast.AST] = []
        self.entered: set[ast.AST] = set()
        self._functions: list[FunctionObject] = []
        self._conditions_of_starter: list[PathCondition] = []  # the path to the call that started this process
        self._steps = 0

    def run(self) -> RankTrace:
        """Interprets the script."""
        with suppress(ExitError, RecursionError):
            self._block(self._tree.body)
        return self.trace

    def run_uncalled(self, called: set[ast.AST]) -> None:
        """Interprets the functions that the script never calls, and the functions defined inside them."""
        self.path.phase = "uncalled"
        self.initialized = True
        self._steps = 0
        for function in self._functions:  # the list grows during the loop
            if function.node not in called | self.entered:
                self.path.conditions, self.path.loops, self._scopes = [], [], (self._module,)
                this = [AbstractValue("self", instance_of=function.owner)] if function.owner else []
                with suppress(ExitError, RecursionError):
                    self.invoke(function, this, {}, function.node)

    # Variables

    def store(self, target: dict[str, AbstractValue], key: str, value: AbstractValue) -> None:
        """Assigns a variable or an attribute."""
        self._log.store(target, key, value)

    def lookup(self, name: str) -> AbstractValue:
        """Returns the value of a variable."""
        for scope in reversed(self._scopes):
            if name in scope:
                return self._named(name, scope[name])
        return self._named(name, self._builtins.setdefault(name, AbstractValue(name)))

    def attribute(self, owner: AbstractValue, name: str) -> AbstractValue:
        """Returns the value of an attribute."""
        if owner.alternatives:
            return either(self.attribute(each, name) for each in owner.alternatives)
        if name in owner.attributes:
            return self._named(name, owner.attributes[name])
        body = owner.instance_of or owner.class_object
        member = body.lookup(name) if body else None
        if member is not None and member.function is not None:
            return self._bind(owner, member)
        if member is not None:
            return self._named(name, member)
        if owner.wraps is not None and name == "module":
            return owner.wraps
        if name in ("sampler", "batch_sampler", "dataset") and name in owner.keywords:
            return owner.keywords[name]
        if name == "dataset" and library_call.is_loader(owner) and owner.arguments:
            return owner.arguments[0]
        facts = owner.inherited()
        if name in ("shape", "dtype", "device", "ndim", "__class__"):
            facts -= {Fact.PER_RANK}
        value = AbstractValue(f"{shortened(owner.text)}.{name}", receiver=owner, facts=facts)
        owner.attributes[name] = value
        return self._named(name, value)

    def _bind(self, owner: AbstractValue, method: AbstractValue) -> AbstractValue:
        function = method.function
        assert function is not None
        if "staticmethod" in function.decorators:
            return method
        if owner.instance_of and any(name.endswith("property") for name in function.decorators):
            return self.invoke(function, [owner], {}, function.node)
        return AbstractValue(method.text, function=function, receiver=owner if owner.instance_of else None)

    def _named(self, name: str, value: AbstractValue) -> AbstractValue:
        """Infers an unknown value from the name of its variable, such as `local_rank`."""
        if not value.is_plain or "lora" in value.text:
            return value
        number = self.identity.number_named(name)
        if number is None or (number.constant is True and not number.facts and library_call.is_module(value)):
            return value
        number.called = value.text
        return number

    def assign(self, target: ast.expr, value: AbstractValue) -> None:
        """Assigns a value to a target, which may be a tuple of targets."""
        match target:
            case ast.Name(id=name):
                scope = self._module if name in self._globals else self._scopes[-1]
                self.store(scope, name, value)
            case ast.Attribute(value=owner_node, attr=name):
                for owner in self.evaluate(owner_node).each():
                    training_calls.note_assignment(self, owner, value, target)
                    self.store(owner.attributes, name, value)
            case ast.Subscript(value=owner_node, slice=index):
                owner, key = self.evaluate(owner_node), self.evaluate(index)
                training_calls.note_assignment(self, owner, value, target)
                training_calls.note_environment(self, owner, key, value, target)
                if key.is_known:
                    self.store(owner.attributes, f"[{key.text}]", value)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                for number, part in enumerate(parts):
                    self.assign(part, either(unpacked_part(each, number, len(parts)) for each in value.each()))
            case ast.Starred(value=part):
                self.assign(part, value)

    # Statements

    def _block(self, statements: Sequence[ast.stmt]) -> Flow:
        flow: Flow = set()
        outer = len(self.path.conditions)
        for statement in statements:
            outcome, condition = self._statement(statement)
            flow |= outcome - {"next"}
            if "next" not in outcome:
                break
            if condition is not None:
                self.path.conditions.append(condition)
        else:
            flow.add("next")
        del self.path.conditions[outer:]
        return flow

    def _statement(self, node: ast.stmt) -> tuple[Flow, PathCondition | None]:
        """Interprets a statement; returns the ways to leave it, and the condition for reaching the next statement."""
        match node:
            case ast.If():
                test = self.evaluate(node.test)
                flow, condition = self.branch(
                    node, test, lambda: self._block(node.body), lambda: self._block(node.orelse)
                )
                if condition is None and Fact.RANK in test.facts and test.is_known and _leaves(node, not test.truth()):
                    condition = self._condition(node, test, bool(test.truth()))
                return flow, condition
            case ast.Expr(value=expression):
                self.evaluate(expression)
            case ast.Assign(targets=targets, value=value_node):
                value = self.evaluate(value_node)
                for target in targets:
                    self.assign(target, value)
            case ast.AnnAssign(target=target, value=value_node) if value_node is not None:
                self.assign(target, self.evaluate(value_node))
            case ast.AugAssign(target=target, op=op, value=value_node):
                left, right = self.evaluate(target), self.evaluate(value_node)
                result = self._operation(node, op, left, right)
                self.assign(target, self._changed_by_every_iteration(target, result))
            case ast.For() | ast.AsyncFor():
                return self._for(node), None
            case ast.While():
                return self._while(node), None
            case ast.With() | ast.AsyncWith():
                return self._with(node), None
            case ast.stmt() if isinstance(node, _TRY):
                return self._try(node), None
            case ast.Return(value=result):
                self._returns.append(self.evaluate(result) if result else known(None))
                if self.path.is_in_loop:
                    self.path.record_leave("return", node, self.path.outer_loops)
                return {"return"}, None
            case ast.Break() | ast.Continue():
                name = "break" if isinstance(node, ast.Break) else "continue"
                if self.path.is_in_loop:
                    self.path.record_leave(name, node, len(self.path.loops) - 1)
                return {name}, None
            case ast.Raise():
                if node.exc is not None:
                    self.evaluate(node.exc)
                return {"stop"}, None
            case ast.Assert(test=test_node):
                test = self.evaluate(test_node)
                self._narrow(test_node)
                # A test of the rank is assumed to succeed, because the real job may have fewer ranks.
                fails = test.is_known and not test.truth() and Fact.RANK not in test.facts
                return ({"stop"} if fails else {"next"}), None
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._define(node, None)
            case ast.ClassDef():
                self._define_class(node)
            case ast.Import(names=names):
                for alias in names:
                    path = alias.name if alias.asname else alias.name.partition(".")[0]
                    self.store(self._scopes[-1], alias.asname or path, AbstractValue(path, called="import"))
            case ast.ImportFrom(module=module, names=names):
                for alias in names:
                    value = AbstractValue(f"{module or ''}.{alias.name}", called="import")
                    self.store(self._scopes[-1], alias.asname or alias.name, value)
            case ast.Global(names=global_names):
                self._globals |= set(global_names)
            case ast.Match(subject=subject_node, cases=cases):
                self.evaluate(subject_node)
                for case in cases:
                    self.branch(node, AbstractValue("match"), partial(self._block, case.body), lambda: {"next"})
        return {"next"}, None

    def _changed_by_every_iteration(self, target: ast.expr, result: AbstractValue) -> AbstractValue:
        """Returns the unknown value of a counter, because the body of the loop is interpreted only once."""
        is_number = any(isinstance(each.constant, (int, float)) for each in result.each())
        if not self.path.loops or not is_number or result.facts & {Fact.RANK, Fact.WORLD_RANGE}:
            return result
        text = shortened(f"{ast.unparse(target)} after some iterations")
        return AbstractValue(text, facts=result.inherited() | {Fact.OPAQUE}, arguments=(result,))

    def _narrow(self, test: ast.expr) -> None:
        """Records that a value is false after `assert not value`."""
        match test:
            case ast.BoolOp(op=ast.And(), values=parts):
                for part in parts:
                    self._narrow(part)
            case ast.UnaryOp(op=ast.Not(), operand=ast.Name() | ast.Attribute() as operand):
                if self.evaluate(operand).truth() is None:
                    self.assign(operand, known(False))

    def _narrow_wrapped(self, test: ast.expr, outcome: bool) -> None:
        """Narrows a possibly wrapped model to the alternatives that a `hasattr` or `isinstance` test leaves."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self._narrow_wrapped(operand, not outcome)
            case ast.Call(func=ast.Name(id="hasattr"), args=[ast.Name() as model, ast.Constant(value="module")]):
                self._keep(model, outcome)
            case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name() as model, kind]):
                if library_call.qualified_name(kind).rpartition(".")[2] in training_calls.WRAPPERS:
                    self._keep(model, outcome)

    def _keep(self, model: ast.Name, is_wrapped: bool) -> None:
        kept = [each for each in self.lookup(model.id).alternatives if (each.wraps is not None) is is_wrapped]
        if kept:
            self.assign(model, either(kept))

    def _condition(self, node: ast.AST, test: AbstractValue, outcome: bool) -> PathCondition:
        return PathCondition(node, test.text, outcome, test.facts, test.is_known)

    def branch(
        self, node: ast.AST, test: AbstractValue, then: Callable[[], Flow], otherwise: Callable[[], Flow]
    ) -> tuple[Flow, PathCondition | None]:
        """Interprets one branch if the result of the test is known, otherwise both; merges the assignments.

        Returns the ways to leave the branches. If only one of two branches continues, also returns the condition of
        that branch.
        """
        truth = test.truth()
        if truth is None and not test.is_computed_by_a_call:  # an enclosing test may have decided it
            truth = next((each.outcome for each in self._decided() if each.text == test.text), None)
        if truth is not None:
            return self._arm(self._condition(node, test, truth), then if truth else otherwise), None
        flows: list[Flow] = []
        assignments: list[Assignments] = []
        for outcome, arm in ((True, then), (False, otherwise)):
            self._log.begin()
            flow = self._arm(self._condition(node, test, outcome), arm)
            assigned = self._log.undo()
            flows.append(flow)
            if flow & {"next", "continue", "break"}:
                assignments.append(assigned)
        self._log.merge(assignments, test.facts & {Fact.PER_RANK, Fact.CLOCK})
        continuing = ["next" in flow for flow in flows]
        condition = self._condition(node, test, continuing[0]) if sum(continuing) == 1 else None
        return flows[0] | flows[1], condition

    def _decided(self) -> Iterator[PathCondition]:
        """Yields the tests on the current path, and the operands of `and` and `or` that their outcomes determine."""
        for condition in [*self._conditions_of_starter, *self.path.conditions]:
            yield condition
            test = getattr(condition.node, "test", None)
            if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) is condition.outcome:
                word = " and " if condition.outcome else " or "
                yield from (replace(condition, text=part) for part in condition.text.split(word))

    def _arm(self, condition: PathCondition, run: Callable[[], Flow]) -> Flow:
        depth = len(self.path.conditions)
        self.path.conditions.append(condition)
        if isinstance(condition.node, (ast.If, ast.IfExp)):
            self._narrow_wrapped(condition.node.test, condition.outcome)
        try:
            return run()
        except ExitError:
            return {"stop"}
        finally:
            del self.path.conditions[depth:]

    def _for(self, node: ast.For | ast.AsyncFor) -> Flow:
        iterable = self.evaluate(node.iter)
        flow: Flow = set()
        self.path.loops.append((node, len(self.path.conditions)))
        self.path.record("iterate", "for", node, iterable)
        for item in self._items(iterable, node.body):
            self.assign(node.target, item)
            outcome = self._block(node.body)
            flow |= outcome
            if not outcome & {"next", "continue"}:
                break
        self.path.loops.pop()
        if node.orelse:
            self._block(node.orelse)
        return (flow - {"break", "continue"}) | {"next"}

    def _items(self, iterable: AbstractValue, body: Sequence[ast.stmt]) -> list[AbstractValue]:
        """Returns the values of a loop variable: all values if their number depends on the ranks, otherwise one."""
        if iterable.is_known and isinstance(iterable.constant, range):
            if library_call.starts_processes(body):
                self.process_count = len(iterable.constant) if not iterable.facts else None
                number = self.identity.number_named("rank")
                return [number] if number else []
            if iterable.facts & {Fact.WORLD_RANGE} and len(iterable.constant) <= 8:
                return [known(number, iterable.facts & {Fact.RANK}) for number in iterable.constant]
        if iterable.items is not None and 0 < len(iterable.items) <= 4:
            return [either(iterable.items)]
        if iterable.called in ("enumerate", "zip") and iterable.arguments:
            parts = [either(self._items(each, body)) for each in iterable.arguments]
            counter = [AbstractValue("index", facts=frozenset({Fact.OPAQUE}))] if iterable.called == "enumerate" else []
            return [
                AbstractValue(
                    shortened(f"item of {iterable.text}"), items=[*counter, *(parts[:1] if counter else parts)]
                )
            ]
        facts = iterable.inherited() | {Fact.OPAQUE}
        if library_call.is_different_on_each_rank(iterable):
            facts |= {Fact.PER_RANK}
        return [AbstractValue(shortened(f"item of {iterable.text}"), facts=facts, arguments=(iterable,))]

    def _while(self, node: ast.While) -> Flow:
        test = self.evaluate(node.test)
        if test.is_known and not test.truth():
            return self._block(node.orelse) if node.orelse else {"next"}
        self.path.loops.append((node, len(self.path.conditions)))
        flow = self._arm(self._condition(node, test, True), lambda: self._block(node.body))
        again = self.evaluate(node.test)
        if not again.is_known:
            self.path.record_leave("while", node, len(self.path.loops) - 1, self._condition(node, again, False))
        self.path.loops.pop()
        endless = test.truth() is True and isinstance(node.test, ast.Constant) and "break" not in flow
        return (flow - {"break", "continue", "next"}) | (set() if endless else {"next"})

    def _with(self, node: ast.With | ast.AsyncWith) -> Flow:
        contexts = self.path.without_gradients, self.path.without_averages, self.path.locks
        for item in node.items:
            value = self.evaluate(item.context_expr)
            self.path.without_gradients += library_call.disables_gradients(value)
            self.path.without_averages += library_call.skips_averages(value)
            self.path.locks += library_call.orders_ranks(value)
            if value.instance_of is not None:
                self.call(self.attribute(value, "__enter__"), [], {}, node)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, value)
        flow = self._block(node.body)
        self.path.without_gradients, self.path.without_averages, self.path.locks = contexts
        return flow

    def _try(self, node: ast.Try) -> Flow:
        try:
            flow = self._block(node.body)
        except ExitError:
            flow = {"stop"}
        continues = flow - {"stop"}
        for handler in node.handlers:
            caught = AbstractValue("an exception is raised")
            if continues:
                handled, _ = self.branch(handler, caught, partial(self._block, handler.body), lambda: {"next"})
                continues |= handled - ({"next"} if "next" not in flow else set())
            else:
                continues |= self._block(handler.body)
        if not node.handlers:
            continues |= flow & {"stop"}
        if node.orelse and "next" in flow:
            continues = (continues - {"next"}) | self._block(node.orelse)
        if node.finalbody:
            final = self._block(node.finalbody)
            continues |= final - {"next"}
        return continues or {"stop"}

    # Definitions and calls

    def _define(self, node: ast.FunctionDef | ast.AsyncFunctionDef, owner: ClassObject | None) -> AbstractValue:
        decorators = tuple(map(library_call.qualified_name, node.decorator_list))
        function = self._function(node, owner, decorators)
        value = AbstractValue(node.name, function=function)
        if owner is None:
            self.store(self._scopes[-1], node.name, value)
        return value

    def _function(
        self,
        node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda,
        owner: ClassObject | None = None,
        decorators: tuple[str, ...] = (),
    ) -> FunctionObject:
        positional = [*node.args.posonlyargs, *node.args.args]
        defaults = dict(
            zip(
                (each.arg for each in reversed(positional)),
                map(self.evaluate, reversed(node.args.defaults)),
                strict=False,
            )
        )
        for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=False):
            if default is not None:
                defaults[argument.arg] = self.evaluate(default)
        function = FunctionObject(node, self._scopes, defaults, owner, decorators)
        if not isinstance(node, ast.Lambda):
            self._functions.append(function)
        return function

    def _define_class(self, node: ast.ClassDef) -> None:
        body = ClassObject(node, {}, tuple(map(self.evaluate, node.bases)))
        for statement in node.body:
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body.members[statement.name] = self._define(statement, body)
            elif isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
                value = self.evaluate(statement.value)
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                body.members |= {target.id: value for target in targets if isinstance(target, ast.Name)}
        self.store(self._scopes[-1], node.name, AbstractValue(node.name, class_object=body))

    def call(
        self,
        callee: AbstractValue,
        arguments: list[AbstractValue],
        keywords: dict[str, AbstractValue],
        node: ast.AST,
    ) -> AbstractValue:
        """Calls a value, which may be a function of the script or of a library."""
        if callee.alternatives:
            results: list[AbstractValue] = []
            for each in callee.alternatives:
                # the contents of the alternatives do not influence which alternative is called
                condition = PathCondition(node, callee.text, True, frozenset(), False)
                self._arm(condition, _append(results, partial(self.call, each, arguments, keywords, node)))
            return either(results) if results else AbstractValue(callee.text)
        if callee.function is not None:
            this = [callee.receiver] if callee.receiver is not None else []
            return self.invoke(callee.function, [*this, *arguments], keywords, node)
        if callee.class_object is not None:
            return self._instantiate(callee, arguments, keywords, node)
        if callee.instance_of is not None:
            for name in ("__call__", "forward"):
                if callee.instance_of.lookup(name) is not None:
                    result = self.call(self.attribute(callee, name), arguments, keywords, node)
                    return library_call.output_of(callee, result, arguments)
        return library.perform(LibraryCall(self, callee, arguments, keywords, node))

    def _instantiate(
        self,
        callee: AbstractValue,
        arguments: list[AbstractValue],
        keywords: dict[str, AbstractValue],
        node: ast.AST,
    ) -> AbstractValue:
        body = callee.class_object
        instance = AbstractValue(
            f"{callee.text} on line {getattr(node, 'lineno', 0)}", instance_of=body, arguments=tuple(arguments),
            keywords=dict(keywords), called=callee.text, node=node,
        )  # fmt: skip
        initializer = body.lookup("__init__") if body is not None else None
        if initializer is not None and initializer.function is not None:
            self.invoke(initializer.function, [instance, *arguments], keywords, node)
        elif body is not None:
            for name, value in keywords.items():  # a dataclass
                self.store(instance.attributes, name, value)
        return instance

    def invoke(
        self,
        function: FunctionObject,
        arguments: Sequence[AbstractValue],
        keywords: dict[str, AbstractValue],
        node: ast.AST,
    ) -> AbstractValue:
        """Interprets a call to a function of the script."""
        is_repeated = function.node in self.entered
        self.entered.add(function.node)
        name = getattr(function.node, "name", "lambda")
        result = AbstractValue(f"{name}()", facts=inherited_facts([*arguments, *keywords.values()]))
        if self._calls.count(function.node) > 1 or len(self._calls) >= _DEEPEST_CALL or self.trace.truncated:
            return result
        names = {each.rpartition(".")[2] for each in function.decorators}
        if is_repeated and names & {"cache", "lru_cache"}:
            return result  # a cached function might not run again
        once = bool(names & _RUN_ONCE)
        if once and self.identity.rank != 0:
            return known(None, frozenset({Fact.RANK}))
        frame = self._scopes, self._globals, self._returns, self.path.outer_loops, self.path.without_gradients
        conditions = len(self.path.conditions)
        if once:
            self.path.conditions.append(PathCondition(function.node, name, True, frozenset({Fact.RANK}), True))
        self._scopes = (*function.scopes, function.bind(arguments, keywords))
        self._globals, self._returns, self.path.outer_loops = set(), [], len(self.path.loops)
        self.path.without_gradients += any(
            "no_grad" in each or "inference_mode" in each for each in function.decorators
        )
        self._calls.append(function.node)
        try:
            if isinstance(function.node, ast.Lambda):
                return self.evaluate(function.node.body)
            flow = self._block(function.node.body)
            returns = self._returns
        finally:
            self._calls.pop()
            del self.path.conditions[conditions:]
            self._scopes, self._globals, self._returns, self.path.outer_loops, self.path.without_gradients = frame
        if flow == {"stop"}:
            raise ExitError
        if not returns and library_call.is_generator(function.node):
            return result
        return either([*returns, *([known(None)] if "next" in flow else [])])

    # Expressions

    def evaluate(self, node: ast.expr) -> AbstractValue:
        """Returns the value of an expression, and records the calls in it."""
        self._steps += 1
        if self._steps > (_MOST_UNCALLED_STEPS if self.path.phase == "uncalled" else _MOST_STEPS):
            self.trace.truncated |= self.path.phase != "uncalled"
            raise ExitError
        match node:
            case ast.Constant(value=constant):
                return known(constant)
            case ast.Name(id=name):
                return self.lookup(name)
            case ast.Attribute(value=owner, attr=name):
                return self.attribute(self.evaluate(owner), name)
            case ast.Call():
                return self._call(node)
            case ast.BinOp(left=left, op=op, right=right):
                return self._operation(node, op, self.evaluate(left), self.evaluate(right))
            case ast.UnaryOp(op=op, operand=operand):
                return unary(op, self.evaluate(operand))
            case ast.BoolOp():
                return self._boolean(node)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return compare(op, self.evaluate(left), self.evaluate(right), self.identity)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                results: list[AbstractValue] = []
                self.branch(
                    node,
                    self.evaluate(test),
                    _append(results, partial(self.evaluate, body)),
                    _append(results, partial(self.evaluate, orelse)),
                )
                return either(results) if results else AbstractValue("conditional")
            case ast.Subscript(value=owner, slice=index):
                return item_of(self.evaluate(owner), self.evaluate(index), self.identity)
            case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
                items = list(map(self.evaluate, parts))
                text = shortened(f"[{', '.join(item.text for item in items)}]")
                return AbstractValue(text, items=items, facts=inherited_facts(items))
            case ast.Dict(keys=keys, values=values):
                return self._dict(keys, list(map(self.evaluate, values)))
            case ast.JoinedStr(values=parts):
                return text_of_parts(list(map(self.evaluate, parts)))
            case ast.FormattedValue(value=part):
                return self.evaluate(part)
            case ast.Lambda():
                return AbstractValue("lambda", function=self._function(node), node=node)
            case ast.NamedExpr(target=target, value=part):
                value = self.evaluate(part)
                self.assign(target, value)
                return value
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._comprehension(node)
            case ast.Starred(value=part) | ast.Await(value=part):
                return self.evaluate(part)
        operands = [self.evaluate(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        text = shortened(f"{type(node).__name__}({', '.join(operand.text for operand in operands)})")
        return AbstractValue(text, facts=inherited_facts(operands), arguments=tuple(operands))

    def _call(self, node: ast.Call) -> AbstractValue:
        if isinstance(node.func, ast.Name) and node.func.id == "super":
            return self._super()
        callee = self.evaluate(node.func)
        arguments: list[AbstractValue] = []
        for argument in node.args:
            value = self.evaluate(argument)
            arguments += value.items if isinstance(argument, ast.Starred) and value.items is not None else [value]
        keywords: dict[str, AbstractValue] = {}
        for keyword in node.keywords:
            value = self.evaluate(keyword.value)
            if keyword.arg is not None:
                keywords[keyword.arg] = value
            elif entries := value.entries():
                keywords |= entries
            else:
                keywords["**"] = value
        return self.call(callee, arguments, keywords, node)

    def _super(self) -> AbstractValue:
        for scope in reversed(self._scopes):
            this = scope.get("self")
            if this is not None and this.instance_of is not None:
                bases = [base.class_object for base in this.instance_of.bases if base.class_object is not None]
                parent = ClassObject(
                    this.instance_of.node, {}, tuple(AbstractValue("", class_object=each) for each in bases)
                )
                return AbstractValue("super()", instance_of=parent, attributes=this.attributes)
        return AbstractValue("super()")

    def _operation(self, node: ast.AST, op: ast.operator, left: AbstractValue, right: AbstractValue) -> AbstractValue:
        for operand in (left, right):
            training_calls.note_use(self, operand, node)
        if isinstance(op, ast.Div) and right.text.startswith("len("):
            self.path.record("ratio", "/", node, right)
        result = arithmetic(op, left, right)
        for items in (left.items, right.items):
            if isinstance(op, ast.Mult) and items is not None and len(items) == 1 and not items[0].is_known:
                result.called = "repeated list"
        return result

    def _boolean(self, node: ast.BoolOp) -> AbstractValue:
        """Evaluates `and` or `or`. Later operands are interpreted only if the earlier ones do not decide the result."""
        stops_at = isinstance(node.op, ast.Or)
        values: list[AbstractValue] = []

        def rest(position: int) -> Flow:
            value = self.evaluate(node.values[position])
            values.append(value)
            if position + 1 < len(node.values) and value.truth() is not stops_at:
                go, stop = (lambda: rest(position + 1)), (lambda: {"next"})
                self.branch(node, value, stop if stops_at else go, go if stops_at else stop)
            return {"next"}

        rest(0)
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
        return AbstractValue(shortened(" and ".join(each.text for each in unknown)), facts=facts | {Fact.OPAQUE})

    def _dict(self, keys: Sequence[ast.expr | None], values: list[AbstractValue]) -> AbstractValue:
        names = [self.evaluate(key) if key is not None else None for key in keys]
        entries = {
            f"[{name.text}]": value
            for name, value in zip(names, values, strict=False)
            if name is not None and name.is_known
        }
        parts = [f"{name.text if name else '**'}: {value.text}" for name, value in zip(names, values, strict=False)]
        text = shortened("{" + ", ".join(parts) + "}")
        return AbstractValue(text, attributes=entries, arguments=tuple(values), facts=inherited_facts(values))

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> AbstractValue:
        outer = self._scopes
        self._scopes = (*outer, {})
        iterables = []
        for generator in node.generators:
            iterable = self.evaluate(generator.iter)
            iterables.append(iterable)
            items = self._items(iterable, [])
            self.assign(generator.target, items[0] if len(items) == 1 else unknown_item(iterable, "i"))
            for test in generator.ifs:
                self.evaluate(test)
        elements = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        values = list(map(self.evaluate, elements))
        self._scopes = outer
        text = shortened(f"[{', '.join(value.text for value in [*values, *iterables])}]")
        facts = inherited_facts([*values, *iterables])
        return AbstractValue(text, facts=facts, arguments=(*values, *iterables))

    @contextmanager
    def process(self, phase: Phase) -> Iterator[None]:
        """Interprets the code in the `with` block as the code of another process."""
        outer = self.path.phase, self.initialized, self.path.conditions, self.path.loops, self.path.outer_loops
        starter, self._conditions_of_starter = self._conditions_of_starter, self.path.conditions
        if self.path.phase != "uncalled":
            self.path.phase = phase
            self.initialized = False
        self.path.conditions, self.path.loops, self.path.outer_loops = [], [], 0
        try:
            yield
        except ExitError:
            pass
        finally:
            self.path.phase, self.initialized, self.path.conditions, self.path.loops, self.path.outer_loops = outer
            self._conditions_of_starter = starter


def _append(results: list[AbstractValue], value_of: Callable[[], AbstractValue]) -> Callable[[], Flow]:
    """Returns a branch that appends a value to `results`."""

    def arm() -> Flow:
        results.append(value_of())
        return {"next"}

    return arm


def _leaves(node: ast.If, outcome: bool) -> bool:
    body = node.body if outcome else node.orelse
    return bool(body) and isinstance(body[-1], (ast.Return, ast.Continue, ast.Break, ast.Raise))
