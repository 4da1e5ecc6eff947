"""G. Faults that other judges were reported for, where no other test reproduces them."""

from sandbox.protocol import Options
from tests.redteam.case import CHECKED, text_of
from tests.redteam.tasks import LINEAR, module


def test_waiting_in_the_queue_is_not_counted_against_a_deadline(red_team):
    """Behind a candidate that uses up nine seconds an honest one is judged whose deadlines are shorter."""
    short = CHECKED.model_copy(update={"load_s": 6.0, "check_s": 6.0, "build_s": 6.0})
    first = module("while True:\n    pass  # the head of the queue")
    behind = module("return self.honest(x)  # behind it")
    busy = red_team.submit(first, LINEAR, CHECKED.model_copy(update={"check_s": 9.0}))
    result = red_team.judge(behind, LINEAR, short)
    assert result.outcome == "ok", text_of(result)
    assert red_team.wait(busy).outcome == "timeout"


def test_an_exception_that_cannot_be_told_is_reported_all_the_same(red_team):
    """Its text raises, its attributes cannot be pickled, its name is no text, its cause is itself."""
    untellable = module(
        """
        error = Untellable(lambda: 0, open("/dev/null"), x, "\\ud800" * 10000)
        raise error from error
        """,
        before="""
class Untellable(Exception):
    def __str__(self):
        raise RuntimeError("no text")
    __repr__ = __str__
    def __reduce__(self):
        raise TypeError("cannot be pickled")
""",
    )
    result = red_team.judge(untellable, LINEAR, CHECKED)
    assert (result.outcome, result.reward.total) == ("runtime_error", 0.0), text_of(result)
    assert "Untellable: (an exception that cannot be told)" in result.feedback and len(result.feedback.encode()) < 4000
    assert red_team.canary().outcome == "ok"


def test_no_trial_is_no_pass(red_team):
    """Every result that is ok has passed as many trials as were asked for, also where nothing is timed."""
    for trials in (1, 2, 5):
        options = Options(correctness_trials=trials, timing="none", check_s=8)
        result = red_team.judge(module("return self.honest(x)"), LINEAR, options)
        assert result.outcome == "ok" and [trial.ok for trial in result.trials] == [True] * trials
