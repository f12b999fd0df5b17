"""Error messages about gradients that could not be averaged, including suggested fixes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from paceline.errors import and_more, ordinal

AFTER_AN_ERROR = (
    "the last backward ended with an error before its gradients were averaged, and other ranks may have averaged "
    "theirs. End the program, or wrap the module again on every rank"
)

_MOST_NAMED = 10  # the maximum number of parameters that a message lists


def missing_gradient_text(
    which: str, missing: Sequence[str], frozen: Collection[str], total: int, static_graph: bool
) -> str:
    """Returns the error message about the parameters in `missing`, which have no gradient.

    `which` describes the backward pass, such as "the last backward pass". `frozen` contains the names of all parameters
    that no longer require a gradient, and `total` is the number of all parameters.
    """
    missing_and_frozen = [name for name in missing if name in frozen]
    if missing_and_frozen:
        return (
            f"{which} produced no gradient for {and_more(missing_and_frozen, _MOST_NAMED)}, which were frozen after "
            "the module was wrapped. Freeze parameters first and wrap the module afterwards (again, if necessary)"
        )
    if static_graph:
        return (
            f"{which} produced no gradient for {and_more(missing, _MOST_NAMED)}, which had one in the first backward; "
            "static_graph=True requires that all backward passes are the same. Wrap with find_unused_parameters=True "
            "instead"
        )
    return (
        f"{which} produced no gradient for {len(missing)} of {total} parameters ({and_more(missing, _MOST_NAMED)}), so "
        "gradients were not averaged over the ranks. Every parameter must be used by forward, and every output of "
        "forward must contribute to the loss; or wrap the module with find_unused_parameters=True"
    )


def late_gradient_text(name: str, static_graph: bool) -> str:
    """Returns the error message about a parameter that received a gradient after its bucket's reduction had started."""
    if static_graph:
        return (
            f"parameter {name!r} got more gradients than in the first backward; static_graph=True requires that all "
            "backward passes are the same. Wrap with find_unused_parameters=True instead"
        )
    return (
        f"parameter {name!r} got another gradient in a backward pass after its reduction had started, because it is "
        "used in several graphs (for example by reentrant activation checkpointing). Wrap the module with "
        "static_graph=True, or use checkpoint(..., use_reentrant=False)"
    )


def averaging_context(module: str, reduction: int, forwards: int) -> str:
    """Returns text to append to the error message of a call that averages gradients."""
    return (
        f"This call averages the gradients of {module} for the {ordinal(reduction)} time, after {forwards} forward "
        "passes of this rank. Every rank must perform the same forward and backward passes: a backward pass that one "
        "rank skips (an empty or bad batch, a shorter loader) leaves the others waiting here. Call backward on such a "
        "rank too, with the loss times 0, or train within model.join()"
    )


def sending_buffers_context(module: str, forward: int, awaits_backward: bool) -> str:
    """Returns text to append to the error message of a call that copies buffers before a forward pass."""
    skipped = (
        " The preceding forward pass had no backward pass on this rank: call backward() on its result, or run it under "
        "torch.no_grad() or model.no_sync() on every rank."
        if awaits_backward
        else " Every rank must perform the same forward and backward passes."
    )
    return f"This call copies buffers before the {ordinal(forward)} forward pass of {module}.{skipped}"


def add_context(error: Exception, context: str) -> None:
    """Appends `context`, a description of the interrupted step in the training loop, to an error's message."""
    message = str(error.args[0]) if error.args else ""
    error.args = (f"{message.rstrip('.')}. {context}", *error.args[1:])
