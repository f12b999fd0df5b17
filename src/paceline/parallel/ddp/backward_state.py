"""The states of a backward that averages gradients.

Note: the life of a backward
    1. `Reducer.before_forward` makes sure that the previous backward's gradients were averaged.
    2. `Reducer.expect` receives what forward returned. Autograd does not announce a backward, so every output gets a
       hook (`output_hooks.py`), and the first hook that runs shows that a backward has begun. Until then the state is
       EXPECTING.
    3. `Reducer._begin` asks the autograd engine to call `Reducer._end` after this backward, which is in the state
       BACKWARD now.
    4. Each parameter in a bucket that may be reduced early has a hook, which counts down its bucket. Full buckets are
       passed to the group's progress thread, strictly in their order, since every rank must make the same calls in the
       same order (`Averager.start_full`).
    5. `Reducer._end` reduces everything else on this thread, waits for the calls in flight, and writes the averages
       that were computed in copies back to the parameters' gradients (`Reducer._average`). The last bucket can only
       become full when backward is about to end, so it always waits for the end, and its parameters need no hooks. The
       state is IDLE again.

    If a gradient is missing when the backward ends, the others cannot be averaged, and the state is INCOMPLETE. Another
    backward may compute the missing gradient (COMPLETING), for example if two losses of one forward have a backward
    each; otherwise the next `Reducer.before_forward` raises an error.

    To average gradients again that have been averaged already does not change them. A backward that follows one whose
    gradients were averaged (of a retained graph, or of the other of two forwards) therefore averages all gradients
    again, and all are right afterwards (REPEATING). For the same reason no bucket starts early in a backward that is
    not the first one: some buckets were averaged before. If the program has cleared the gradients in between, such a
    backward may reach only some parameters; then the ranks first compare which gradients they have, as they do with
    `find_unused_parameters` (`Reducer._average_present`).
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """What became of the gradients that a forward asked to be averaged; see the Note above."""

    IDLE = "no forward asks for averages, or its gradients were averaged"
    EXPECTING = "there was a forward, and no backward of it has begun"
    BACKWARD = "the first backward runs"
    INCOMPLETE = "backward has ended and left parameters without a gradient"
    COMPLETING = "a later backward runs, which may compute the missing gradients"
    REPEATING = "a backward runs although gradients were averaged before"


AFTER_BEGIN = {
    State.IDLE: State.REPEATING,
    State.EXPECTING: State.BACKWARD,
    State.BACKWARD: State.COMPLETING,  # a backward within a backward, or after one that failed
    State.INCOMPLETE: State.COMPLETING,
    State.COMPLETING: State.COMPLETING,
    State.REPEATING: State.REPEATING,
}
