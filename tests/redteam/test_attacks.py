"""No attack gains anything, each verdict says why, and the evaluation after it is untouched."""

import pytest

from tests.redteam import suite
from tests.redteam.case import problems, text_of


@pytest.mark.parametrize("case", suite.CASES, ids=lambda case: f"{case.number:02}-{case.name}")
def test_an_attack_gains_nothing(red_team, case):
    report = red_team.attack(case)
    canary = red_team.canary()
    assert not problems(case, report), "\n".join(problems(case, report))
    assert canary.outcome == "ok", f"the honest evaluation after {case.name}: {text_of(canary)}"


def test_names_are_unique():
    names = [case.name for case in suite.CASES]
    assert len(names) == len(set(names))
