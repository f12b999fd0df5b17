"""Faults that occur in a simulated job, and checks of the coordinator's decisions."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from elastic_model.members import NO_STATE, Member, Site, Violation
from paceline.train.elastic.coordinator.coordinator import Coordinator
from paceline.train.elastic.protocol import EndOrder, View

if TYPE_CHECKING:
    from elastic_model.world import World

STALLED_S = 2.0  # time until a launcher reports an unresponsive worker
SILENT_S = 2.5  # time until the coordinator's launcher considers a machine lost
KINDS = (
    *("kill", "kill", "kill", "kill newest", "kill newest", "storm", "freeze", "leave", "cut", "unplug"),
    *("grow", "grow", "depart", "crash", "shrink", "reset", "reset", "curse", "evacuate"),
)  # fmt: skip
GENTLE = {"grow", "leave", "shrink"}  # faults that do not break connections


def strike(world: World, kind: str) -> None:
    """Injects one fault."""
    living = [each for each in world.members.values() if each.state != "dead"]
    away = [each for each in world.sites.values() if each.name != "0" and not each.is_cut and not each.is_gone]
    random = world.random
    if kind == "kill" and living:
        random.choice(living).exit(-9)
    elif kind == "kill newest" and living:
        living[-1].exit(-9)
    elif kind == "reset" and world.groups:
        world.groups[max(world.groups)].fail()
    elif kind == "curse":
        world.is_cursed |= world.chance() < 0.1
    elif kind == "evacuate" and world.chance() < 0.3:
        for site in world.sites.values():
            site.replaces = False
        for each in living:
            each.asked_to_leave()
    elif kind == "storm":
        for each in living:
            if world.chance() < 0.6:
                world.later(0.002, None, each.exit, -9)
    elif kind == "freeze" and living:
        freeze(world, random.choice(living), random.choice((0.5, 3.0, 8.0)))
    elif kind == "leave" and living:
        random.choice(living).asked_to_leave()
    elif kind in ("cut", "unplug") and away:
        cut(world, random.choice(away), random.choice((0.3, 4.0, 20.0)), isolated=kind == "unplug")
    elif kind == "crash" and away:
        crash(world, random.choice(away))
    elif kind == "depart" and away:
        depart(world, random.choice(away))
    elif kind == "grow":
        world.later(1.0, None, world.site_joins, world.new_site(world.new_name(), random.randint(1, 2), 3))
    elif kind == "shrink":
        random.choice([*world.sites.values()]).attempts = 0


def freeze(world: World, member: Member, for_s: float) -> None:
    """Sends SIGSTOP to a worker, and SIGCONT later."""
    if member.is_frozen:
        return
    member.is_frozen = True
    world.after(for_s, None, thaw, world, member)
    if for_s > STALLED_S:
        world.after(STALLED_S, None, stall, world, member)


def stall(world: World, member: Member) -> None:
    """The launcher detects that a worker is unresponsive."""
    if member.is_frozen and member.state != "dead":
        member.was_stalled = True
        world.report(member, "stalled")


def thaw(world: World, member: Member) -> None:
    """Sends SIGCONT: the worker then handles the events that it has missed."""
    member.is_frozen = False
    if member.state == "dead":
        return
    if member.was_stalled:
        member.was_stalled = False
        world.report(member, "started")
    backlog, member.backlog = member.backlog, []
    for call, args in backlog:
        world.after(0.0, member, call, *args)


def current_of(coordinator: Coordinator) -> set[str]:
    """Returns the workers that a coordinator counts as members."""
    return {each.uid for each in coordinator._job.views.concerned}


def fenced(member: Member, current: Collection[str]) -> None:
    """The launcher kills a worker that is still stopped; the worker must not be among the holders of the state."""
    if member.state == "dead" or not member.was_stalled:
        return
    world = member.world
    is_over = any(other.has_finished for other in world.members.values())
    is_needed = member.round == world.rounds if is_over else member.round != NO_STATE
    is_needed = is_needed and not all(world.members[uid].is_leaving for uid in current)  # all are leaving
    if member.uid in current and is_needed:
        raise Violation(
            f"{member.uid} is killed, and is one of {sorted(current)}, who hold the state; {world.history()}"
        )
    member.is_frozen = False
    member.exit(-9)


def cut(world: World, site: Site, for_s: float, *, isolated: bool) -> None:
    """Cuts the coordinator's connection to a machine, or with `isolated` all connections of the machine."""
    site.is_cut = True
    site.cuts += 1
    if isolated:
        site.is_isolated = True
        for group in world.groups.values():
            if not world.connects(group.arrived):
                group.fail()
    world.after(SILENT_S, None, lose, world, site, site.cuts)
    world.after(for_s, None, come_back, world, site)


def lose(world: World, site: Site, cuts: int) -> None:
    """The coordinator's launcher considers a machine lost."""
    if site.is_cut and site.cuts == cuts:
        site.is_known_lost = True
        world.obey(world.coordinator.machine_lost(site.name, "silence", world.now_s))


def come_back(world: World, site: Site) -> None:
    """The machine reconnects, and reports the events that the coordinator has missed."""
    if site.is_gone:
        return
    site.is_cut = site.is_isolated = site.is_known_lost = False
    coordinator, now_s = world.coordinator, world.now_s
    here = [each for each in world.members.values() if each.site is site]
    unheard = [(each.uid, f"exit code {each.code}", each.code) for each in here if world.is_unheard(each)]
    world.obey(coordinator.machine_joined(site.name, f"host-{site.name}", site.slots, now_s))
    for each in here:
        if each.state != "dead" or each.uid in [uid for uid, _, _ in unheard]:
            world.obey(coordinator.worker_started(each.uid, site.name, now_s, tuple(each.standing.messages)))
            if each.was_stalled:
                world.report(each, "stalled")
    for uid, how, code in unheard:
        world.reported_dead.add(uid)
        world.obey(coordinator.worker_ended(uid, how, code, now_s))
    world.obey(coordinator.machine_listed(site.name, now_s))


def crash(world: World, site: Site) -> None:
    """A machine loses power: the death of its workers is never confirmed. Another machine may replace it."""
    site.is_gone = True
    for each in world.members.values():
        if each.site is site:
            each.exit(-9)
    cut(world, site, 0.0, isolated=True)
    if world.chance() < 0.7:
        world.later(5.0, None, world.site_joins, world.new_site(world.new_name(), site.slots, 3))


def depart(world: World, site: Site) -> None:
    """A launcher is asked to exit: its workers leave first."""
    site.replaces = False
    for each in world.members.values():
        if each.site is site:
            each.asked_to_leave()
    depart_when_empty(world, site)


def depart_when_empty(world: World, site: Site, tries: int = 100) -> None:
    """Removes the machine when all its workers have exited, or after some time."""
    if site.is_gone or any(each.site is site and each.state != "dead" for each in world.members.values()):
        if not site.is_gone and tries:
            world.after(0.2, None, depart_when_empty, world, site, tries - 1)
            return
        for each in world.members.values():
            if each.site is site:
                each.exit(-9)
    if not site.is_gone and not site.is_cut:
        last_up_s = max((each.last_up_s for each in world.members.values() if each.site is site), default=0.0)
        world.at(max(last_up_s, world.now_s) + 0.001, None, gone, world, site)


def gone(world: World, site: Site) -> None:
    """The launcher has exited."""
    if not site.is_cut and not site.is_gone:
        site.is_gone = True
        world.obey(world.coordinator.machine_left(site.name, "SIGTERM", world.now_s))


def check_view(world: World, view: View) -> None:
    """Checks a view that the coordinator announces."""
    known = world.views.get(view.generation)
    if known is not None:
        if known != view:
            raise Violation(f"two views have the number {view.generation}: {known} and {view}; {world.history()}")
        return
    if world.views and view.generation <= max(world.views):
        raise Violation(f"the view {view} is not newer than {max(world.views)}; {world.history()}")
    world.views[view.generation] = view
    used = world.last_formed
    if used is None or len(world.results) == world.rounds:
        return
    left = [uid for uid in used.members if uid not in world.reported_dead]
    here = [uid for uid in left if not world.members[uid].site.is_known_lost]
    if left and (2 * len(here) < len(left) or (2 * len(here) == len(left) and min(left) not in here)):
        raise Violation(f"{here} go on without the majority of {left} in {view}; {world.history()}")


def check_end(world: World, end: EndOrder) -> None:
    """Checks that the job ended for a valid reason."""
    finished = [each for each in world.members.values() if each.has_finished]
    if end.code == 0:
        if not finished or len(world.results) < world.rounds:
            raise Violation(f"the job ends with 0 after {len(world.results)} rounds: {world.history()}")
        return
    text = end.reason
    sound = [each for each in world.members.values() if each.state != "dead" and not each.is_frozen]
    holders = [each for each in sound if each.round != NO_STATE and not each.site.is_cut]
    if "state is lost" in text:
        if [each for each in holders if each.uid in world.current()]:
            raise Violation(f"{end} while {[each.uid for each in holders]} have it; {world.history()}")
    elif "Waited" in text:
        is_away = any(each.is_cut for each in world.sites.values()) or any(m.is_frozen for m in world.members.values())
        if not is_away:
            raise Violation(f"{end} though nobody was away; {world.history()}")
    elif "asked to leave" in text:
        if any(each.round != NO_STATE and not each.is_leaving for each in sound):
            raise Violation(f"{end}; {world.history()}")
    elif "no other worker finished" in text:
        if any(each.state == "dead" and each.code == 0 for each in finished):
            raise Violation(f"{end}; {world.history()}")
    elif "After its last round" in text:
        if not any(each.state == "dead" and each.code > 0 for each in finished):
            raise Violation(f"{end}; {world.history()}")
    elif "are left" in text or "are ready" in text:
        if sum(each.slots for each in world.sites.values() if not each.is_gone) >= world.policy.min_workers and not (
            any(not each.replaces or each.is_cut for each in world.sites.values())
        ):
            raise Violation(f"{end}; {world.history()}")
    elif "without a round in between" not in text or not world.is_cursed:
        raise Violation(f"{end}; {world.history()}")
