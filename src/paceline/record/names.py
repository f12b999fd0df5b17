"""What the numbers in a recording mean; those of the core are in native/reduce/reduce.hpp and native/call/call.hpp."""

from __future__ import annotations

from enum import IntEnum

DTYPES = (
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "complex32",
)

REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")

SEND = 32
RECEIVE = 33
OPERATIONS = {
    1: "all_reduce",
    2: "broadcast",
    3: "reduce",
    4: "all_gather",
    5: "reduce_scatter",
    6: "gather",
    7: "scatter",
    8: "all_to_all",
    9: "barrier",
    SEND: "send",
    RECEIVE: "recv",
}

OUTCOMES = {
    0: "ok",
    1: "mismatch",
    2: "timed_out",
    3: "peer_lost",
    4: "interrupted",
    5: "schedule_unfit",
    6: "refused",
    7: "starved",
    8: "too_many_offers",
    9: "aborted",
}


class EventKind(IntEnum):
    """What an event is of; `first` and `second` are its two integers.

    | kind | name | first | second |
    | --- | --- | --- | --- |
    | SPAN | the user's | | |
    | VALUE | the user's | the bits of a double | |
    | STEP | of what makes the steps: `ddp`, `elastic`, ... | the step's number | |
    | FORWARD, BACKWARD | likewise | the shard, of logical shards | |
    | BUCKET | of what averages: `ddp`, `zero` | the bucket's number | its bytes |
    | OPTIMIZER | the optimizer's class | | |
    | DATA_WAIT | the loader's class | the batch's number | |
    | VIEW_CHANGE | what happened | the new view's generation | its number of workers |
    | RECOMPUTE | | how many runs of shards are computed for members that were lost | |
    | NOT_FINITE | of a gradient, or of a logged number | the step | how many gradients |
    | DIFFERENCE | of what differs first between replicas | the step | the first rank that differs |
    | CHECKPOINT | `send` or `receive`: an elastic job's state | | |

    A bucket starts when its last gradient is ready, is sent at `Event.sent_ns`, and ends when the average is there.
    """

    SPAN = 1
    VALUE = 2
    STEP = 3
    FORWARD = 4
    BACKWARD = 5
    BUCKET = 6
    OPTIMIZER = 7
    DATA_WAIT = 8
    VIEW_CHANGE = 9
    RECOMPUTE = 10
    CHECKPOINT = 11
    NOT_FINITE = 12
    DIFFERENCE = 13
