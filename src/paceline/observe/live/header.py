"""The state of the job in one sentence, with the time that is left."""

from __future__ import annotations

from paceline.observe.live.picture import Header
from paceline.observe.live.sample import Facts, RankSample, State, Verdict
from paceline.observe.live.spans import about

_QUIET_S = 10.0  # so long without any record, all ranks are said to make no progress
_AWAY = (State.STARTING, State.DEAD, State.ENDED)


def header_of(
    facts: Facts, ranks: tuple[RankSample, ...], verdict: Verdict | None, now_s: float, step_s: float | None
) -> Header:
    """Returns the header.

    Args:
        facts: the job.
        ranks: the latest sample of each rank.
        verdict: why the job does not get on, if it does not.
        now_s: now, on the job's clock.
        step_s: what a step takes now; None while no two are finished.
    """
    step = max((each.step for each in ranks if each.step is not None), default=None)
    here = sum(each.state not in _AWAY for each in ranks)
    total = facts.total_steps
    left_s = None
    if step is not None and total is not None and step_s is not None and not facts.outcome and verdict is None:
        left_s = max(0, total - step) * step_s
    quiet_s = now_s - max((each.heard_s for each in ranks), default=now_s)
    mood = _mood(facts, ranks, verdict, quiet_s)
    words = [_doing(facts, ranks, verdict, quiet_s, now_s)]
    if step is not None:
        words.append(f"step {step:,}" if total is None else f"step {step:,} of {total:,}")
    if not facts.outcome:
        words.append(f"{here} of {facts.world_size} {'rank' if facts.world_size == 1 else 'ranks'}")
    if facts.restarts:
        words.append("1 restart" if facts.restarts == 1 else f"{facts.restarts} restarts")
    if left_s is not None:
        words.append(f"about {about(left_s)} left" if left_s >= 1 else "nearly done")
    return Header(
        sentence=", ".join(words),
        mood=mood,
        run_id=facts.run_id,
        command=facts.command,
        security=facts.security,
        step=step,
        total_steps=total,
        share=min(1.0, step / total) if step is not None and total else None,
        ranks_here=here,
        world_size=facts.world_size,
        restarts=facts.restarts,
        elapsed_s=round(now_s - facts.started_s, 1),
        left_s=left_s,
    )


def _mood(facts: Facts, ranks: tuple[RankSample, ...], verdict: Verdict | None, quiet_s: float) -> str:
    if facts.outcome:
        return "over" if facts.outcome in ("finished", "stopped") else "bad"
    if verdict is not None or any(each.state is State.DEAD for each in ranks):
        return "bad"
    if quiet_s > _QUIET_S or not any(each.step is not None or each.state is State.RUNNING for each in ranks):
        return "waiting"
    return "good"


def _doing(facts: Facts, ranks: tuple[RankSample, ...], verdict: Verdict | None, quiet_s: float, now_s: float) -> str:
    if facts.outcome:
        return f"{facts.outcome} after {about(now_s - facts.started_s)}"
    if verdict is not None:
        return f"stuck for {about(max(quiet_s, now_s - verdict.at_s))}"
    if not any(each.step is not None for each in ranks):
        return "starting" if all(each.state is State.STARTING for each in ranks) else "running"
    return f"no progress for {about(quiet_s)}" if quiet_s > _QUIET_S else "training"
