"""A verification's rule in the sandbox: what it decides, what the answer says it rests on, and what requests it refuses."""

import asyncio
import itertools
import json
import math
import subprocess
import sys

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from sandbox import scheduler as scheduler_module
from sandbox.cli import main
from sandbox.client import AsyncSandboxClient, SandboxRejected
from sandbox.conversation import Call, Conversation
from sandbox.protocol import (
    MAX_LOOKS,
    MAX_PAIRS,
    EvaluationResult,
    Options,
    PairedSpeedups,
    PaperRuleSpec,
    RuleSpec,
    SequentialRuleSpec,
    Span,
    TaskSpec,
    Timing,
    VerificationArm,
    VerificationRequest,
    VerificationResult,
    VerificationTask,
)
from sandbox.records import KeyConflict
from sandbox.verification import Asked, PaperRule, SequentialTest, decided
from tests.sandbox.helpers import ADD_BIAS, GOOD_BODY, ROOT, kernel
from tests.sandbox.test_scheduler import FakeWorker, named, scenario

SPAN = Span(median_ms=1.0, low_ms=1.0, high_ms=1.0, samples=10)
TASK = TaskSpec(reference="none")


def timed(speedup: float) -> Timing:
    return Timing(candidate=SPAN, baselines={"eager": SPAN}, speedup=speedup, noisy=False, bound_by="wall")


def judged(speedup) -> EvaluationResult:
    """The result of a candidate: its speedup, None for one that is wrong, or the name of another outcome."""
    if isinstance(speedup, str):
        return EvaluationResult(id="x", state="done", outcome=speedup)
    if speedup is None:
        return EvaluationResult(id="x", state="done", outcome="incorrect")
    return EvaluationResult(id="x", state="done", stage="timed", outcome="ok", timing=timed(speedup))


def answer(*arms) -> VerificationResult:
    """A verification that is done; an arm is (speedups of control, of treated)."""
    made = [VerificationArm(control=[judged(c) for c in control], treated=[judged(t) for t in treated]) for control, treated in arms]
    return VerificationResult(id="v", state="done", arms=made)


def decide(rule, *arms, earlier=()) -> VerificationResult:
    """What a request with such a rule, and candidates judged so, is answered."""
    made = [VerificationTask(task=TASK, control=[named("c")] * len(c), treated=[named("t")] * len(t)) for c, t in arms]
    request = VerificationRequest(arms=made, rule=rule, earlier=earlier)
    sent = VerificationRequest.model_validate_json(request.model_dump_json())
    return VerificationResult.model_validate_json(decided(answer(*arms), Asked.of(sent)).model_dump_json())


def draw(rng, n, ratio=1.0, failures=0.2):
    return [None if rng.random() < failures else float(np.exp(rng.normal(math.log(ratio), 0.3))) for _ in range(n)]


@pytest.mark.parametrize("statistic", ["differences", "ranks"])
def test_a_test_over_two_requests_counts_all_pairs_as_one_that_had_them_at_once(statistic):
    rng = np.random.default_rng(0)
    spec = SequentialRuleSpec(looks=(6, 12), alpha=0.01, min_ratio=1.05, bar=0.5, statistic=statistic, futility=1.0)
    rule = SequentialTest(looks=(6, 12), alpha=0.01, min_ratio=1.05, bar=0.5, statistic=statistic, futility=1.0)
    seen = set()
    for ratio in (1.0, 1.6, 1.6, 3.0):
        looks = [[(draw(rng, n), draw(rng, n, ratio)) for n in (2, 4)] for _ in range(2)]
        control, treated = ([x for look in looks for arm in look for x in arm[side]] for side in (0, 1))
        tasks = ["a", "a", "b", "b", "b", "b"] * 2
        first = decide(spec, *looks[0])
        second = decide(spec, *looks[1], earlier=first.samples)
        for result, n in ((first, 6), (second, 12)):
            want = rule.decide(control[:n], treated[:n], tasks[:n])
            assert {name: getattr(want, name) for name in type(result.decision).model_fields} == result.decision.model_dump()
        assert [len(first.samples), len(second.samples)] == [1, 2]
        assert [(arm.control, arm.treated) for look in second.samples for arm in look] == [arm for look in looks for arm in look]
        seen.add((first.decision.status, second.decision.status))
    assert len(seen) > 1, "the cases must lie on both sides"


@pytest.mark.parametrize("statistic", ["differences", "ranks"])
def test_effect_and_p_follow_from_the_samples(statistic):
    spec = SequentialRuleSpec(statistic=statistic, alpha=0.3, min_ratio=1.1, fail_speedup=0.5, futility=1.0)
    result = decide(spec, ([1.0, None, 1.2], [1.5, 1.4, None]), ([9.0, 8.0], [14.0, 7.0]))
    arms = [arm for look in result.samples for arm in look]
    assert [(arm.control, arm.treated) for arm in arms] == [([1.0, None, 1.2], [1.5, 1.4, None]), ([9.0, 8.0], [14.0, 7.0])]
    differences, evidence = ([x for arm in arms for x in getattr(arm, name)] for name in ("differences", "evidence"))
    assert differences == pytest.approx([math.log(x) for x in (1.5, 1.4 / 0.5, 0.5 / 1.2, 14 / 9, 7 / 8)])
    assert result.decision.effect == pytest.approx(math.exp(np.mean(differences)))
    sums = [np.dot(signs, evidence) for signs in itertools.product([1, -1], repeat=5)]
    assert result.decision.p == np.mean([total >= sums[0] - 1e-9 for total in sums])
    if statistic == "differences":
        assert evidence == pytest.approx([math.log(1.5 / 1.1), math.log(1.4), -math.log(1.4), math.log(14 / 9.9), math.log(7 / 8.8)])


def test_the_interval_is_students():
    low_high = decide(SequentialRuleSpec(alpha=0.3), ([1.0, 1.0], [2.0, 3.0])).decision
    middle, half = math.log(6) / 2, 12.706204736 * (math.log(1.5) / math.sqrt(2)) / math.sqrt(2)  # t of one degree of freedom
    assert (low_high.low, low_high.high) == pytest.approx((math.exp(middle - half), math.exp(middle + half)), rel=1e-8)


def test_pairs_after_those_that_decided_are_shown_and_have_not_counted():
    result = decide(SequentialRuleSpec(looks=(4, 8), alpha=0.2), ([1.0] * 6, [2.0] * 4 + [0.1] * 2))
    assert (result.decision.status, result.decision.n) == ("accept", 4)
    [[arm]] = result.samples
    assert arm.treated[4:] == [0.1, 0.1] and arm.differences[4:] == arm.evidence[4:] == [None, None]
    assert None not in arm.differences[:4] + arm.evidence[:4]


def test_without_looks_the_rule_looks_once_at_all_pairs():
    decision = decide(SequentialRuleSpec(), ([1.0] * 3, [2.0] * 3), ([1.0] * 2, [2.0] * 2)).decision
    assert (decision.status, decision.n, decision.p, decision.spent) == ("accept", 5, 1 / 32, 0.1)
    assert decide(SequentialRuleSpec(), ([2.0] * 4, [1.0] * 4)).decision.status == "reject"


def test_a_speed_that_does_not_count_is_none():
    result = answer(([1.0, 1.0, 1.0, 1.0], [9.0, 9.0, 9.0, 9.0]))
    unearned = [one.model_copy(update={"speed_rewarded": False}) for one in result.arms[0].treated]
    result = result.model_copy(update={"arms": [result.arms[0].model_copy(update={"treated": unearned})]})
    found = decided(result, Asked(rule=SequentialTest(looks=(4,))))
    assert found.samples[0][0].treated == [None] * 4 and found.decision.status == "reject" and found.decision.best == 0.0


@pytest.mark.parametrize("outcome", ["infra_error", "cancelled"])
@pytest.mark.parametrize("rule", [SequentialRuleSpec(), PaperRuleSpec()], ids=lambda rule: rule.kind)
def test_nothing_is_decided_where_the_judge_owes_a_verdict(rule, outcome):
    n = 1 if rule.kind == "paper" else 4
    result = decide(rule, ([1.0] * n, [9.0] * (n - 1) + [outcome]))
    assert (result.decision.status, result.decision.n, result.decision.effect, result.samples) == ("continue", 0, 1.0, [])
    assert f"1 of {2 * n} candidates" in result.decision.reason and f"arms.0.treated.{n - 1}: {outcome}" in result.decision.reason


def test_a_look_that_was_not_judged_leaves_the_earlier_ones_as_they_were():
    spec = SequentialRuleSpec(looks=(4, 8), alpha=0.01)
    first = decide(spec, ([1.0] * 4, [1.5, 1.7, None, 1.6]))
    second = decide(spec, ([1.0] * 4, [9.0, 9.0, 9.0, "infra_error"]), earlier=first.samples)
    assert second.samples == first.samples and second.decision.reason != first.decision.reason
    assert second.decision == first.decision.model_copy(update={"reason": second.decision.reason})
    again = decide(spec, ([1.0] * 4, [9.0] * 4), earlier=second.samples)
    assert (again.decision.status, again.decision.n) == ("accept", 8)


@pytest.mark.parametrize(("first", "treated", "status"), [(1.0, 1.25, "accept"), (1.5, 1.7, "reject"), (None, 1.2, "accept"), (1.0, None, "reject")])
def test_the_papers_rule_compares_one_pair(first, treated, status):
    result = decide(PaperRuleSpec(), ([first], [treated]))
    want = PaperRule().decide(first, treated)
    assert (result.decision.status, result.decision.effect, result.decision.reason) == (status, want.effect, want.reason)
    [[arm]] = result.samples
    assert (arm.control, arm.treated, arm.evidence) == ([first], [treated], [None])
    assert arm.differences == pytest.approx([math.log(want.effect)])


def test_a_rule_that_is_sent_without_numbers_is_the_rules_own():
    assert Asked.of(VerificationRequest(arms=[ARM], rule=PaperRuleSpec())).rule == PaperRule()
    own = SequentialTest()
    assert SequentialTest(**SequentialRuleSpec(looks=own.looks).model_dump(exclude={"kind"})) == own


SPEEDUPS = st.one_of(st.none(), st.floats(min_value=1e-300, max_value=1e15))
RULES = st.fixed_dictionaries(
    {"kind": st.just("sequential"), "looks": st.lists(st.integers(1, 10), min_size=1, max_size=4)},
    optional={
        "alpha": st.floats(0, 1), "min_ratio": st.floats(0, 1000), "bar": st.floats(0, 1000), "fail_speedup": st.floats(1e-6, 1000),
        "mixed_ratio": st.floats(1, 1000), "futility": st.floats(0, 1), "spend_power": st.floats(0, 100),
        "statistic": st.sampled_from(["differences", "ranks"]),
    },
)  # fmt: skip


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(RULES, st.lists(st.tuples(SPEEDUPS, SPEEDUPS), min_size=1, max_size=10))
def test_every_rule_that_is_taken_decides_with_finite_numbers(fields, pairs):
    try:
        rule = TypeAdapter(RuleSpec).validate_python(fields)
    except ValidationError as error:
        assert error.errors()[0]["loc"][1] in ("looks", "alpha", "min_ratio", "spend_power")
        return
    control, treated = (list(side) for side in zip(*pairs[: rule.looks[-1]], strict=True))
    result = decide(rule, (control, treated))
    assert result.decision.status in (("accept", "reject") if len(control) >= rule.looks[-1] else ("accept", "reject", "continue"))
    numbers = [x for name in ("effect", "low", "high", "p", "spent", "best") if (x := getattr(result.decision, name)) is not None]
    assert all(map(math.isfinite, numbers)) and result.decision.effect > 0
    if result.decision.low is not None:
        assert result.decision.low <= result.decision.effect * (1 + 1e-9) and result.decision.effect <= result.decision.high * (1 + 1e-9)


ARM = VerificationTask(task=TASK, control=[named("c")], treated=[named("t")])
CANDIDATE = {"source": "", "language": "cpp", "form": "kernel"}
BODY = {"arms": [{"task": {"reference": ADD_BIAS}, "control": [CANDIDATE] * 4, "treated": [CANDIDATE] * 4}]}
UNEQUAL = [{**BODY["arms"][0], "treated": [CANDIDATE] * 3}]
LOOK = [{"control": [1.0], "treated": [None]}]
PAPER = {"kind": "paper"}


def sequential(**fields):
    return {"kind": "sequential", **fields}


REFUSED = [
    ({"rule": sequential(looks=[8, 4])}, "rule.looks", "ascending numbers of pairs, got [8, 4]"),
    ({"rule": sequential(looks=[4, 4])}, "rule.looks", "ascending"),
    ({"rule": sequential(looks=[])}, "rule.looks", "ascending"),
    ({"rule": sequential(looks=list(range(4, 5 + MAX_LOOKS)))}, "rule.looks", "1 to 32 ascending"),
    ({"rule": sequential(looks=[4, 1 + MAX_PAIRS])}, "rule.looks.1", "256"),
    ({"rule": sequential(looks=[0, 4])}, "rule.looks.0", "greater"),
    ({"rule": sequential(looks=[4], alpha=0.05)}, "rule.looks", "4 pairs can't show an error rate of 0.05: the smallest p-value is 0.062"),
    ({"rule": sequential(looks=[99], alpha=1e-5)}, "rule.looks", "Raise alpha"),
    ({"rule": sequential(looks=[2, 3], alpha=0.2)}, "rule.looks", "4 pairs, earlier ones included, and the last look is after 3"),
    ({"rule": sequential(looks=[4]), "earlier": [LOOK]}, "rule.looks", "5 pairs"),
    ({"rule": sequential(), "earlier": [LOOK]}, "rule.looks", "must be given"),
    ({"rule": sequential(alpha=0.05)}, "rule.alpha", "Add pairs or raise alpha"),
    ({"rule": sequential(alpha=0)}, "rule.alpha", "greater than 0"),
    ({"rule": sequential(alpha=1)}, "rule.alpha", "less than 1"),
    ({"rule": sequential(min_ratio=0)}, "rule.min_ratio", "greater than 0"),
    ({"rule": sequential(fail_speedup=0)}, "rule.fail_speedup", "greater than"),
    ({"rule": sequential(mixed_ratio=0.9)}, "rule.mixed_ratio", "greater than or equal to 1"),
    ({"rule": sequential(statistic="means")}, "rule.statistic", "'differences' or 'ranks'"),
    ({"rule": sequential(looks="4")}, "rule.looks", "tuple"),
    ({"rule": {**PAPER, "alpha": 0.1}}, "rule.alpha", "not permitted"),
    ({"rule": {"kind": "guess"}}, "rule", "'sequential', 'paper'"),
    ({"rule": {"alpha": 0.1}}, "rule", "kind"),
    ({"rule": PAPER}, "arms", "got 4 pairs"),
    ({"rule": PAPER, "earlier": [LOOK]}, "earlier", "looks once"),
    ({"rule": sequential(), "arms": UNEQUAL}, "arms.0.treated", "4 control and 3 treated candidates do not form pairs"),
    ({"rule": sequential(), "options": {"timing": "none"}}, "options.timing", "decides by speeds"),
    ({"earlier": [LOOK]}, "earlier", "send `rule` too"),
    ({"rule": sequential(looks=[8]), "earlier": [LOOK, LOOK * 2]}, "earlier.1", "2 arms and the request 1"),
    ({"rule": sequential(looks=[8]), "earlier": [[]]}, "earlier.0", "0 arms and the request 1"),
    ({"rule": sequential(looks=[8]), "earlier": [[{"control": [1.0], "treated": [1.0, 2.0]}]]}, "earlier.0.0.treated", "1 control and 2 treated"),
    ({"rule": sequential(looks=[8]), "earlier": [[{"control": [], "treated": []}]]}, "earlier.0.0.control", "at least 1"),
    ({"rule": sequential(looks=[8]), "earlier": [[{"control": [0.0], "treated": [1.0]}]]}, "earlier.0.0.control.0", "greater than 0"),
    ({"rule": sequential(looks=[8]), "earlier": [[{"treated": [1.0]}]]}, "earlier.0.0.control", "required"),
]


def test_a_wrong_rule_is_refused_with_the_field_named(server):
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(server.socket)), base_url="http://sandbox") as http:
        for change, field, said in REFUSED:
            response = http.post("/v1/verifications", json={**BODY, **change})
            assert response.status_code == 422 and response.json()["field"] == field and said in response.json()["error"], (change, response.text)
        untimed = {"source": "", "language": "triton"}
        arms = [{**BODY["arms"][0], "treated": [CANDIDATE] * 3 + [untimed]}]
        response = http.post("/v1/verifications", json={"arms": arms, "rule": sequential()}).json()
        assert response["field"] == "arms.0.treated.3.language" and "not timed on cpu" in response["error"]
        nan = json.dumps({**BODY, "rule": sequential(looks=[8]), "earlier": [[{"control": [math.nan], "treated": [1.0]}]]})
        assert http.post("/v1/verifications", content=nan, headers={"content-type": "application/json"}).json()["field"] == "earlier.0.0.control.0"


@pytest.fixture
def fake_workers(monkeypatch):
    monkeypatch.setattr(scheduler_module, "Worker", FakeWorker)


def asked(*, n=4, rule=None, key=None, earlier=(), name=""):
    arm = VerificationTask(task=TASK, control=[named(f"{name}c{i}") for i in range(n)], treated=[named(f"{name}t{i}") for i in range(n)])
    return VerificationRequest(arms=[arm], rule=rule or SequentialRuleSpec(), client_key=key, earlier=earlier)


def test_the_scheduler_decides_when_the_last_candidate_is_judged_and_once(fake_workers, monkeypatch):
    decisions = []
    monkeypatch.setattr(scheduler_module, "decided", lambda *arguments: decisions.append(arguments) or decided(*arguments))

    async def test(scheduler, worker):
        request = asked(key="k")
        one = scheduler.submit_verification(request)
        for i in range(8):
            before = await scheduler.wait_verification(one, 0)
            assert (before.decision, before.samples) == (None, []) and before.state != "done"
            worker.answer(timing=timed(3.0 if i % 2 else 1.0))
        result, again = await asyncio.gather(scheduler.wait_verification(one, 5), scheduler.wait_verification(one, 0))
        assert result == again == await scheduler.wait_verification(one, 0)
        assert (result.decision.status, result.decision.p, result.decision.effect) == ("accept", 1 / 16, pytest.approx(3.0))
        assert len(decisions) <= 2 and scheduler.submit_verification(request) == one
        other = request.model_copy(update={"rule": SequentialRuleSpec(alpha=0.2)})
        with pytest.raises(KeyConflict, match="another request"):
            scheduler.submit_verification(other)
        plain = scheduler.submit_verification(request.model_copy(update={"rule": None, "client_key": None}))
        assert (await scheduler.wait_verification(plain, 0)).decision is None, "answered from what was judged, and undecided"

    scenario(test)


def test_a_candidate_that_is_cancelled_or_breaks_the_judge_leaves_the_verification_undecided(fake_workers):
    async def test(scheduler, worker):
        spec, look = SequentialRuleSpec(looks=(4, 8), alpha=0.01), [[PairedSpeedups(control=[1.0] * 4, treated=[2.0] * 4)]]
        for place, name in enumerate(("cancelled", "infra_error")):
            one = scheduler.submit_verification(asked(rule=spec, earlier=look, name=name))
            last = (await scheduler.wait_verification(one, 0)).arms[0].treated[3].id
            if name == "cancelled":
                scheduler.cancel(last)
            for _ in range(7):
                worker.answer(timing=timed(1.0))
            for _ in range(3 * place):
                worker.answer("infra_error")
            result = await scheduler.wait_verification(one, 0)
            assert (result.state, result.decision.status, result.decision.n) == ("done", "continue", 4)
            assert f"arms.0.treated.3: {name}" in result.decision.reason and [len(side) for side in result.samples] == [1]

    scenario(test)


def test_slow_and_fast_kernels_are_judged_and_decided(server, sandbox, task):
    slow = kernel("for (int again = 0; again < 40; ++again) " + GOOD_BODY.replace("long i", "volatile long i"), "// slow")
    fast = kernel(GOOD_BODY, "// fast")
    arms = [VerificationTask(task=task, control=[slow] * 4, treated=[fast] * 4)]
    spec = SequentialRuleSpec(looks=(4, 8), bar=0.0, fail_speedup=1e-6)
    result = sandbox.verify(arms, Options(), client_key="slow and fast", rule=spec)
    assert result.state == "done" and {one.outcome for arm in result.arms for one in (*arm.control, *arm.treated)} == {"ok"}
    control, treated = result.arms[0].control[0].speedup, result.arms[0].treated[0].speedup
    assert (result.decision.status, result.decision.n, result.decision.p) == ("continue", 4, 1 / 16), result.decision
    assert result.decision.effect == pytest.approx(treated / control) and result.decision.effect > 2
    assert (result.samples[0][0].control, result.samples[0][0].treated) == ([control] * 4, [treated] * 4)

    async def on():
        async with AsyncSandboxClient(server.socket, retry_for_s=60) as client:
            return await client.verify(arms, Options(), rule=spec, earlier=result.samples)

    second = asyncio.run(on())
    assert (second.decision.status, second.decision.n, second.decision.p) == ("accept", 8, 1 / 256)
    assert len(second.samples) == 2 and second.samples[0] == result.samples[0]
    with pytest.raises(SandboxRejected) as refused:
        sandbox.verify([arms[0].model_copy(update={"control": [slow]})], Options(), client_key="slow and fast")
    assert refused.value.status == 409


def test_the_rules_need_neither_torch_nor_the_learner():
    code = "import sys\nfor name in ('torch', 'jax', 'dk_jax'): sys.modules[name] = None\nimport sandbox.verification, sandbox.client\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_command_says_what_it_decided(server, tmp_path, capsys):
    (tmp_path / "task.py").write_text(ADD_BIAS)
    for name, source in (("fast", kernel(GOOD_BODY, "// fast").source), ("wrong", kernel("out[0] = 0;", "// wrong").source)):
        (tmp_path / f"{name}.cpp").write_text(source)
    fast, wrong = ([str(tmp_path / f"{name}.cpp")] * 4 for name in ("fast", "wrong"))
    command = ["verify", "--task", str(tmp_path / "task.py"), "--socket", str(server.socket), "--timing", "quick"]
    assert main([*command, "--control", *wrong, "--treated", *fast, "--bar", "0", "--fail-speedup", "0.000001"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("ACCEPT: ") and "over 4 pairs" in said and "control incorrect, no speed" in said
    assert main([*command, "--control", *fast, "--treated", *wrong, "--json"]) == 0
    assert VerificationResult.model_validate_json(capsys.readouterr().out).decision.status == "reject"
    assert main([*command, "--control", *wrong[:2], "--treated", *fast[:2]]) == 2
    assert "rule.alpha: 2 pairs can't show an error rate of 0.1" in capsys.readouterr().err


def test_a_client_that_has_no_rule_sends_what_servers_before_rules_take():
    arm = VerificationTask(task=TaskSpec(reference="x"), control=[kernel("a")], treated=[kernel("b")])
    for rule, wanted in ((None, set()), (PaperRuleSpec(), {"rule", "earlier"})):
        call = next(Conversation(socket="", timeout_s=1.0, retry_for_s=0.0, name="me").verify([arm], None, "k", rule, []))
        assert isinstance(call, Call)
        assert {"rule", "earlier"} & set(json.loads(call.body)) == wanted
