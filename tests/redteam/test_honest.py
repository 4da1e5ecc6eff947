"""Honest candidates of every kind are ok and nothing is held against them."""

import pytest

from tests.redteam import honest
from tests.redteam.case import text_of


@pytest.mark.parametrize("case", honest.CASES, ids=lambda case: case.name)
def test_honest_work_passes(red_team, case):
    result = red_team.judge(case.candidate, case.task, case.options)
    assert (result.outcome, result.integrity) == ("ok", []), text_of(result)
    assert all(trial.ok for trial in result.trials) and result.trials
    assert result.reward.total > 0
    if case.options.timing != "none":
        assert result.timing is not None and result.speedup is not None
        assert result.coverage == 1.0 if case.candidate.form == "kernel" else result.coverage > 0.3


def test_there_are_many():
    assert len(honest.CASES) >= 30
