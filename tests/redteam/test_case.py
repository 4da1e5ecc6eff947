"""An attack that seems to gain is judged again with its honest twin beside it, on a CPU and on a GPU alike."""

from types import SimpleNamespace

import pytest

from tests.gpu.redteam.ported import TWINS, GpuRedTeam
from tests.redteam.case import TRIES, Case, RedTeam
from tests.redteam.tasks import LINEAR, module, stateless

NOW_FAST = stateless(sorted(TWINS)[0], "x", "torch.randn(4)")


def team(kind, speeds):
    """Judges attacks as `speeds` says, one after another, and honest work as 1.0 at first and 2.0 from then on: the machine has changed."""
    found, twins = kind(client=None), []
    speeds = iter(speeds)

    def judge(candidate, task, options):
        if "gains" in candidate.source:
            speedup = next(speeds)
        else:
            twins.append(candidate)
            speedup = 1.0 if len(twins) <= (TRIES if kind is RedTeam else 1) else 2.0
        return SimpleNamespace(outcome="ok", speedup=speedup, timing=SimpleNamespace(credited=speedup), integrity=[])

    found.judge = judge
    return found, twins


@pytest.mark.parametrize(("kind", "task"), [(RedTeam, LINEAR), (GpuRedTeam, NOW_FAST)])
@pytest.mark.parametrize(("speeds", "gained"), [([3.0], False), ([9.0, 9.0, 9.0], True), ([9.0, 1.0], False)])
def test_what_gains_once_is_held_against_its_twin_of_now(kind, task, speeds, gained):
    attacker, twins = team(kind, speeds)
    report = attacker.attack(Case(name="x", why="", candidate=module("return gains"), task=task, outcomes=("ok",)))
    assert report.gained is gained and report.twin == 2.0 and len(twins) > 1
