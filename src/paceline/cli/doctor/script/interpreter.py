"""An abstract interpreter that runs a script as one rank of a simulated job, and records its trace.

The interpreter tracks values through variables, attributes, functions and methods, as in abstract interpretation
(Cousot and Cousot 1977). A test whose result is known selects a branch. If the result is unknown, both branches are
interpreted and their results are merged. The body of a loop is interpreted once, unless the number of iterations
depends on the rank or on the number of ranks. The script is never executed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from paceline.cli.doctor.script import library, library_call, training_calls
from paceline.cli.doctor.script.execution_state import ExecutionState, ExitError, Flow
from paceline.cli.doctor.script.library_call import LibraryCall
from paceline.cli.doctor.script.trace import PathCondition, RankTrace
from paceline.cli.doctor.script.value import (
    AbstractValue,
    ClassObject,
    Fact,
    FunctionObject,
    SimulatedRank,
    arithmetic,
    boolean,
    compare,
    dict_of,
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
        self.state = ExecutionState(identity, module_name, initialized=not has_init)
        self.path = self.state.path
        self._tree = tree
        self._calls: list[ast.AST] = []
        self.entered: set[ast.AST] = set()
        self._functions: list[FunctionObject] = []
        self._steps = 0

    def run(self) -> RankTrace:
        """Interprets the script."""
        with suppress(ExitError, RecursionError):
            self._block(self._tree.body)
        return self.path.trace

    def run_uncalled(self, called: set[ast.AST]) -> None:
        """Interprets the functions that the script never calls, and the functions defined inside them."""
        self.path.phase = "uncalled"
        self.state.initialized = True
        self._steps = 0
        for function in self._functions:  # the list grows during the loop
            if function.node not in called | self.entered:
                self.state.restart()
                this = [AbstractValue("self", instance_of=function.owner)] if function.owner else []
                with suppress(ExitError, RecursionError):
                    self.invoke(function, this, {}, function.node)

    # Attributes

    def attribute(self, owner: AbstractValue, name: str) -> AbstractValue:
        """Returns the value of an attribute."""
        if owner.alternatives:
            return either(self.attribute(alternative, name) for alternative in owner.alternatives)
        if name in owner.attributes:
            return self.state.named(name, owner.attributes[name])
        body = owner.instance_of or owner.class_object
        member = body.lookup(name) if body else None
        if member is not None and member.function is not None:
            return self._bind(owner, member)
        if member is not None:
            return self.state.named(name, member)
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
        return self.state.named(name, value)

    def _bind(self, owner: AbstractValue, method: AbstractValue) -> AbstractValue:
        function = method.function
        assert function is not None
        if "staticmethod" in function.decorators:
            return method
        if owner.instance_of and any(name.endswith("property") for name in function.decorators):
            return self.invoke(function, [owner], {}, function.node)
        return AbstractValue(method.text, function=function, receiver=owner if owner.instance_of else None)

    def assign(self, target: ast.expr, value: AbstractValue) -> None:
        """Assigns a value to a target, which may be a tuple of targets."""
        match target:
            case ast.Name(id=name):
                self.state.assign(name, value)
            case ast.Attribute(value=owner_node, attr=name):
                for owner in self.evaluate(owner_node).each():
                    training_calls.note_assignment(self.path, owner, value, target)
                    self.state.store(owner.attributes, name, value)
            case ast.Subscript(value=owner_node, slice=index):
                owner, key = self.evaluate(owner_node), self.evaluate(index)
                training_calls.note_assignment(self.path, owner, value, target)
                training_calls.note_environment(self.path, owner, key, value, target)
                if key.is_known:
                    self.state.store(owner.attributes, f"[{key.text}]", value)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                for number, part in enumerate(parts):
                    self.assign(
                        part, either(unpacked_part(alternative, number, len(parts)) for alternative in value.each())
                    )
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
        """Interprets a statement; returns the ways in which it can end, and the condition for reaching the next one."""
        match node:
            case ast.If():
                test = self.evaluate(node.test)
                flow, condition = self.state.branch(
                    node,
                    test,
                    self._narrowed(node.test, True, partial(self._block, node.body)),
                    self._narrowed(node.test, False, partial(self._block, node.orelse)),
                )
                if condition is None and Fact.RANK in test.facts and test.is_known and _leaves(node, not test.truth()):
                    condition = PathCondition.of(node, test, bool(test.truth()))
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
                self.state.returns.append(self.evaluate(result) if result else known(None))
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
                    self.state.define(alias.asname or path, AbstractValue(path, called="import"))
            case ast.ImportFrom(module=module, names=names):
                for alias in names:
                    value = AbstractValue(f"{module or ''}.{alias.name}", called="import")
                    self.state.define(alias.asname or alias.name, value)
            case ast.Global(names=global_names):
                self.state.declare_global(global_names)
            case ast.Match(subject=subject_node, cases=cases):
                self.evaluate(subject_node)
                for case in cases:
                    self.state.branch(node, AbstractValue("match"), partial(self._block, case.body), lambda: {"next"})
        return {"next"}, None

    def _changed_by_every_iteration(self, target: ast.expr, result: AbstractValue) -> AbstractValue:
        """Returns an unknown value for a loop counter, because the body of the loop is interpreted only once."""
        is_number = any(isinstance(alternative.constant, (int, float)) for alternative in result.each())
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

    def _narrowed(self, test: ast.expr, outcome: bool, run: Callable[[], Flow]) -> Callable[[], Flow]:
        """Returns a branch that assumes that the test has this outcome."""

        def narrowed() -> Flow:
            training_calls.narrow_wrapped(self.state, test, outcome)
            return run()

        return narrowed

    def _for(self, node: ast.For | ast.AsyncFor) -> Flow:
        iterable = self.evaluate(node.iter)
        flow: Flow = set()
        self.path.loops.append((node, len(self.path.conditions)))
        self.path.record("iterate", "for", node, iterable)
        for item in library.items_in_loop(self.state, iterable, node.body):
            self.assign(node.target, item)
            outcome = self._block(node.body)
            flow |= outcome
            if not outcome & {"next", "continue"}:
                break
        self.path.loops.pop()
        if node.orelse:
            self._block(node.orelse)
        return (flow - {"break", "continue"}) | {"next"}

    def _while(self, node: ast.While) -> Flow:
        test = self.evaluate(node.test)
        if test.is_known and not test.truth():
            return self._block(node.orelse) if node.orelse else {"next"}
        self.path.loops.append((node, len(self.path.conditions)))
        flow = self.state.run_if(PathCondition.of(node, test, True), lambda: self._block(node.body))
        again = self.evaluate(node.test)
        if not again.is_known:
            self.path.record_leave("while", node, len(self.path.loops) - 1, PathCondition.of(node, again, False))
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
                handled, _ = self.state.branch(handler, caught, partial(self._block, handler.body), lambda: {"next"})
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
            self.state.define(node.name, value)
        return value

    def _function(
        self,
        node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda,
        owner: ClassObject | None = None,
        decorators: tuple[str, ...] = (),
    ) -> FunctionObject:
        positional = [parameter.arg for parameter in [*node.args.posonlyargs, *node.args.args]]
        values = map(self.evaluate, reversed(node.args.defaults))
        defaults = dict(zip(reversed(positional), values, strict=False))
        for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=False):
            if default is not None:
                defaults[argument.arg] = self.evaluate(default)
        function = FunctionObject(node, self.state.scopes, defaults, owner, decorators)
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
        self.state.define(node.name, AbstractValue(node.name, class_object=body))

    def call(
        self,
        callee: AbstractValue,
        arguments: list[AbstractValue],
        keywords: dict[str, AbstractValue],
        node: ast.AST,
    ) -> AbstractValue:
        """Calls a value, which may be a function defined in the script or in a library."""
        if callee.alternatives:
            results: list[AbstractValue] = []
            for alternative in callee.alternatives:
                # the contents of the alternatives do not influence which alternative is called
                condition = PathCondition(node, callee.text, True, frozenset(), False)
                self.state.run_if(
                    condition, _append(results, partial(self.call, alternative, arguments, keywords, node))
                )
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
        if callee.text == "getattr" and len(arguments) > 1 and isinstance(arguments[1].constant, str):
            return self.attribute(arguments[0], arguments[1].constant)
        return library.perform(LibraryCall(self.state, callee, arguments, keywords, node, self.call))

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
                self.state.store(instance.attributes, name, value)
        return instance

    def invoke(
        self,
        function: FunctionObject,
        arguments: Sequence[AbstractValue],
        keywords: dict[str, AbstractValue],
        node: ast.AST,
    ) -> AbstractValue:
        """Interprets a call to a function defined in the script."""
        is_repeated = function.node in self.entered
        self.entered.add(function.node)
        name = getattr(function.node, "name", "lambda")
        result = AbstractValue(f"{name}()", facts=inherited_facts([*arguments, *keywords.values()]))
        if self._calls.count(function.node) > 1 or len(self._calls) >= _DEEPEST_CALL or self.path.trace.truncated:
            return result
        names = {decorator.rpartition(".")[2] for decorator in function.decorators}
        if is_repeated and names & {"cache", "lru_cache"}:
            return result  # a cached function might not run again
        once = bool(names & _RUN_ONCE)
        if once and self.state.identity.rank != 0:
            return known(None, frozenset({Fact.RANK}))
        with self.state.frame(*function.scopes, function.bind(arguments, keywords)):
            if once:
                self.path.conditions.append(PathCondition(function.node, name, True, frozenset({Fact.RANK}), True))
            self.path.without_gradients += any(
                "no_grad" in decorator or "inference_mode" in decorator for decorator in function.decorators
            )
            self._calls.append(function.node)
            try:
                if isinstance(function.node, ast.Lambda):
                    return self.evaluate(function.node.body)
                flow = self._block(function.node.body)
            finally:
                self._calls.pop()
            returns = self.state.returns
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
            self.path.trace.truncated |= self.path.phase != "uncalled"
            raise ExitError
        match node:
            case ast.Constant(value=constant):
                return known(constant)
            case ast.Name(id=name):
                return self.state.lookup(name)
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
                return compare(op, self.evaluate(left), self.evaluate(right), self.state.identity)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                results: list[AbstractValue] = []
                self.state.branch(
                    node,
                    self.evaluate(test),
                    self._narrowed(test, True, _append(results, partial(self.evaluate, body))),
                    self._narrowed(test, False, _append(results, partial(self.evaluate, orelse))),
                )
                return either(results) if results else AbstractValue("conditional")
            case ast.Subscript(value=owner, slice=index):
                return item_of(self.evaluate(owner), self.evaluate(index), self.state.identity)
            case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
                items = list(map(self.evaluate, parts))
                text = shortened(f"[{', '.join(item.text for item in items)}]")
                return AbstractValue(text, items=items, facts=inherited_facts(items))
            case ast.Dict(keys=keys, values=values):
                entries = list(map(self.evaluate, values))
                return dict_of([self.evaluate(key) if key is not None else None for key in keys], entries)
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
        for scope in reversed(self.state.scopes):
            this = scope.get("self")
            if this is not None and this.instance_of is not None:
                return AbstractValue("super()", instance_of=this.instance_of.parent(), attributes=this.attributes)
        return AbstractValue("super()")

    def _operation(self, node: ast.AST, op: ast.operator, left: AbstractValue, right: AbstractValue) -> AbstractValue:
        for operand in (left, right):
            training_calls.note_use(self.path, operand, node)
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
                proceed, stop = (lambda: rest(position + 1)), (lambda: {"next"})
                self.state.branch(node, value, stop if stops_at else proceed, proceed if stops_at else stop)
            return {"next"}

        rest(0)
        return boolean(node.op, values)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> AbstractValue:
        iterables = []
        with self.state.inner_scope():
            for generator in node.generators:
                iterable = self.evaluate(generator.iter)
                iterables.append(iterable)
                items = library.items_in_loop(self.state, iterable, [])
                self.assign(generator.target, items[0] if len(items) == 1 else unknown_item(iterable, "i"))
                for test in generator.ifs:
                    self.evaluate(test)
            elements = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            values = list(map(self.evaluate, elements))
        text = shortened(f"[{', '.join(value.text for value in [*values, *iterables])}]")
        facts = inherited_facts([*values, *iterables])
        return AbstractValue(text, facts=facts, arguments=(*values, *iterables))


def _append(results: list[AbstractValue], value_of: Callable[[], AbstractValue]) -> Callable[[], Flow]:
    """Returns a branch that appends a value to `results`."""

    def arm() -> Flow:
        results.append(value_of())
        return {"next"}

    return arm


def _leaves(node: ast.If, outcome: bool) -> bool:
    body = node.body if outcome else node.orelse
    return bool(body) and isinstance(body[-1], (ast.Return, ast.Continue, ast.Break, ast.Raise))
