"""No honest kernel is flagged on a GPU: each is correct, timed, and covered by its own work."""

import pytest

from tests.gpu.redteam.ported import honest_work


def text_of(result):
    return f"{result.outcome}: {result.feedback} {result.notes} {[f.evidence for f in result.integrity]}"


@pytest.mark.parametrize("case", honest_work(), ids=lambda case: case.name)
def test_honest_work_passes(server, case):
    [result] = server.evaluate(case.task, [case.candidate], case.options)
    print(text_of(result), result.timing and round(result.timing.speedup, 3), result.stage_s)
    assert result.outcome == "ok" and not result.integrity, text_of(result)
    assert result.coverage > 0.3 and result.timing is not None
    assert result.reward.total > 0
