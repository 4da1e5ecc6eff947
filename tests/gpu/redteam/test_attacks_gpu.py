"""No attack on a GPU gains anything, and the honest evaluation after each is untouched."""

import pytest

from tests.gpu.redteam import attacks, attacks_audit
from tests.gpu.redteam.ported import CASES as PORTED
from tests.gpu.redteam.ported import GpuRedTeam, as_case
from tests.redteam.attacks_channel import plant_secret, remove_secret
from tests.redteam.case import problems, text_of

CASES = [*map(as_case, (*attacks.CASES, *attacks_audit.CASES)), *PORTED]


@pytest.fixture(scope="module")
def red_team(server):
    plant_secret()
    try:
        yield GpuRedTeam(server)
    finally:
        remove_secret()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.number:02}-{case.name}")
def test_an_attack_gains_nothing(red_team, case):
    report = red_team.attack(case)
    canary = red_team.canary()
    assert not problems(case, report), "\n".join(problems(case, report))
    assert canary.outcome == "ok", f"the honest evaluation after {case.name}: {text_of(canary)}"
