"""The errors of `monitored_barrier` in gloo's words, which programs of torch.distributed look for."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.durations import Timeout, to_seconds
from paceline.errors import CollectiveError, CollectiveTimeoutError, PeerLostError


def put_into_gloos_words(
    error: CollectiveError, group_rank: int, ranks: Sequence[int], timeout: Timeout, wait_all_ranks: bool
) -> None:
    """Puts what gloo says on this rank in front of the error's message; leaves it as it is if gloo could not say it.

    With gloo, rank 0 names the first rank that did not come, or all of them, and the other ranks refer to rank 0.

    Args:
        error: what the barrier failed with.
        group_rank: this process's rank in the group.
        ranks: the group's ranks in the default group, by which `error` names them.
        timeout: how long rank 0 waited.
        wait_all_ranks: whether all ranks that did not come are named.
    """
    if group_rank:
        text = _refers_to_rank_0(error, group_rank)
    else:
        text = _names_the_absent(error, ranks, timeout, wait_all_ranks)
    if text:
        error.args = (f"{text}\n Original exception: \n{error}", *error.args[1:])


def _refers_to_rank_0(error: CollectiveError, group_rank: int) -> str:
    if not isinstance(error, (CollectiveTimeoutError, PeerLostError)):
        return ""
    return (
        f"Rank {group_rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
        "from rank 0. Please check rank 0 logs for faulty rank."
    )


def _names_the_absent(error: CollectiveError, ranks: Sequence[int], timeout: Timeout, wait_all_ranks: bool) -> str:
    if isinstance(error, CollectiveTimeoutError):
        lost = error.missing
    elif isinstance(error, PeerLostError):
        lost = (error.rank,)
    else:
        return ""
    absent = sorted(ranks.index(rank) for rank in lost if rank in ranks)
    waited_ms = int(to_seconds(timeout) * 1000)
    if wait_all_ranks and absent:
        return f"[Rank 0]: Ranks {', '.join(map(str, absent))} failed to pass monitoredBarrier in {waited_ms} ms"
    if waited_ms > 0 and absent:
        return f"[Rank 0]: Rank {absent[0]} failed to pass monitoredBarrier in {waited_ms} ms"
    return f"Rank 0 timed out in monitoredBarrier after {waited_ms} ms."
