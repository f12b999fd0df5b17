"""Decides which ranks the workers of each node get."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.launch.nodes.messages import Join, Start


def ranked(
    joins: Sequence[Join], generation: int, restart_count: int, max_restarts: int, run_id: str, port: int | None
) -> list[Start]:
    """Returns the order to start for each node; the ranks of its workers follow those of the nodes before it.

    Args:
        joins: what the nodes have said about themselves, in the order of their ranks.
        generation: the number of the generation of workers.
        restart_count: how often the workers were restarted.
        max_restarts: how often they may be.
        run_id: the name of the job.
        port: the port of torch's store, where the user chose it; if None, the first node's.
    """
    sizes = [join.workers for join in joins]
    starts = []
    for at, join in enumerate(joins):
        role_sizes = [each.workers if each.role == join.role else 0 for each in joins]
        start = Start(
            generation=generation,
            restart_count=restart_count,
            max_restarts=max_restarts,
            run_id=run_id,
            group_rank=at,
            group_world_size=len(joins),
            first_rank=sum(sizes[:at]),
            world_size=sum(sizes),
            role_first_rank=sum(role_sizes[:at]),
            role_world_size=sum(role_sizes),
            master_addr=joins[0].address,
            master_port=port or joins[0].port,
            hosts=tuple(each.host for each in joins),
            store_port=joins[0].store_port,
        )
        starts.append(start)
    return starts
