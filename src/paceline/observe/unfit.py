"""Words how one rank's calls differ from those of the others."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.observe.evidence import Scene
from paceline.observe.histories import Difference, Slip
from paceline.observe.sentences import beginning, line_of, named
from paceline.observe.verdict import Cause, Verdict

_CAUSES = {
    Slip.SKIPPED: Cause.SKIPPED,
    Slip.ORDER: Cause.ORDER,
    Slip.TWICE: Cause.TWICE,
    Slip.SKIPPED_OR_TWICE: Cause.SKIPPED_OR_TWICE,
    Slip.OTHER_SHAPE: Cause.OTHER_SHAPE,
    Slip.OTHER_CALL: Cause.OTHER_CALL,
}


def of_difference(scene: Scene, found: Difference) -> Verdict:
    """Returns the verdict on ranks whose calls differ from the others'."""
    strays = named(found.strays, scene.word)
    where, there = _where(scene, found.strays), _where(scene, found.regular)
    start = beginning(scene, found.strays) if found.step is None else f"step {found.step}: "
    if found.is_guess:
        sentence = (
            f"{start}call {found.sequence} differs: {named(found.strays[:1], scene.word)} and the others called "
            f"{found.expected} and {found.theirs}, and nothing says which is right"
        )
        return Verdict(_CAUSES[found.slip], found.strays, sentence)
    due = f"where {named(found.regular, scene.word)} called {found.expected}{there}"
    does = {
        Slip.SKIPPED: f"it skipped {found.expected}, or makes it later",
        Slip.ORDER: "it makes its calls in another order",
        Slip.TWICE: f"it made {found.theirs} twice",
        Slip.SKIPPED_OR_TWICE: f"it skipped {found.expected}, or made {found.theirs} twice",
        Slip.OTHER_SHAPE: "the number or type of its elements differs",
        Slip.OTHER_CALL: "it went another way through the program",
    }[found.slip]
    sentence = f"{start}{strays} called {found.theirs} as call {found.sequence}{where}, {due}: {does}"
    return Verdict(_CAUSES[found.slip], found.strays, sentence)


def _where(scene: Scene, ranks: Sequence[int]) -> str:
    """Returns the user's line in which these ranks made the call, if it is known and the same for all."""
    lines = {line_of(rank) for rank in scene.ranks if rank.rank in ranks} - {""}
    return f" ({lines.pop()})" if len(lines) == 1 else ""
