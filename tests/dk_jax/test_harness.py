"""The evaluation harness: right answers score as they should, holes count, and interrupted work is done once.

The sandbox's client knows the generators' kernels; journal, judge, episodes, files and scores are the real ones.
"""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

from configs.demo import get_config
from dk_jax.agents.text import trimmed
from dk_jax.evaluation import harness, policies, results
from dk_jax.evaluation.harness import Plan, SettingsError, VerdictJournal, evaluate, remember_settings, settings_of, summary_of
from dk_jax.evaluation.kernel_folder import KernelFolder
from dk_jax.evaluation.policies import OUT_OF_BUDGET, Policy, PolicyError
from dk_jax.evaluation.results import RESULTS, ResultsFile
from dk_jax.evaluation.results_table import table
from dk_jax.evaluation.scripted_policy import KINDS, ScriptedPolicy, ScriptedPolicyError, kernels_of
from dk_jax.generation.tokenizer import train_codec
from dk_jax.interop.endpoint import EndpointConfig, EndpointRefused
from dk_jax.rollout.episode import task_view
from dk_jax.rollout.judge import SandboxJudge
from dk_jax.rollout.trajectory import Trajectory
from dk_jax.skills.record import Skill
from dk_jax.tasks.builtin import builtin_suite
from dk_jax.tasks.task import Task
from dk_jax.train import model as models
from dk_jax.train import setup
from dk_jax.train.state import Checkpoints, TrainState
from sandbox.protocol import Admission, EvaluationResult, Finding, Options, Reward, Span, TaskFacts, Timing
from tests.dk_jax.fake_endpoint import FakeEndpoint, chat, refusal
from tests.end_to_end.scripted import Killed, tiny_config

TASKS = tuple(t for t in builtin_suite("cpu").held_out if t.spec.kind == "map")[:5]

VARIANTS, _ = setup.kernel_variants("cpp")

INTENTS = {(task.name, trimmed(v.source)): v.intent for task in TASKS for v in VARIANTS(task)}

FEW = 20  # resamples
BYTES = ("input_bytes", "output_bytes", "state_bytes", "peak_bytes", "needed_bytes")


def span(ms: float) -> Span:
    return Span(median_ms=ms, low_ms=0.98 * ms, high_ms=1.02 * ms, samples=5)


class KnowingClient:
    """Judges by what the generator meant: good kernels are twice as fast as eager and 1.25 times as fast as torch.compile, slow ones half
    as fast, wrong ones are caught. Raises Killed instead of the `kill_at`-th verdict."""

    def __init__(self, kill_at: int | None = None):
        self.judged: list[tuple[str, str]] = []
        self.kill_at = kill_at

    def abort(self):
        """Nothing is ever waited for."""

    def evaluate(self, task, candidates, options=None, client_key=None, on_result=None):
        found = []
        for i, candidate in enumerate(candidates):
            if len(self.judged) == self.kill_at:
                raise Killed
            self.judged.append((task.name, candidate.source))
            found.append(self._result(INTENTS.get((task.name, candidate.source), "wrong")))
            on_result(i, found[-1])
        return found

    def examine(self, task, options, timing):
        if "random" in task.reference:
            return Admission(problem="its output is random")
        return Admission(facts=TaskFacts(trivial=("zeros",), **dict.fromkeys(BYTES, 1), total_bytes=9, trial_s=0.1, judging_s=1.0))

    def _result(self, intent: str) -> EvaluationResult:
        if intent == "broken":
            return EvaluationResult(id="x", state="done", stage="queued", outcome="build_failed", feedback="error")
        if intent == "wrong":
            caught = [Finding(rule="reads_reference", evidence="it does")]
            return EvaluationResult(id="x", state="done", stage="built", outcome="integrity", feedback="caught", integrity=caught)
        speedup = 2.0 if intent == "good" else 0.5
        times = {"eager": span(2.0), "torch.compile": span(1.25)}
        timing = Timing(
            candidate=span(2.0 / speedup), baselines=times, speedup=speedup, speedup_low=0.9 * speedup, speedup_high=1.1 * speedup,
            noisy=False, bound_by="wall",
        )  # fmt: skip
        return EvaluationResult(id="x", state="done", stage="timed", outcome="ok", timing=timing, feedback="ok", reward=Reward(total=1.0))


@pytest.fixture(scope="module")
def cfg():
    c = get_config()
    c.evaluation.update(dict(samples=2, turns=2))
    c.sandbox.baselines = ("eager", "torch.compile")
    return c


def plan_of(cfg, **fields) -> Plan:
    values = dict(tasks=TASKS, samples=2, turns=2, chunk=2, seed=0, config=setup.rollout_config(cfg))
    return Plan(**(values | fields))


def views_of(tasks, form="kernel"):
    return {task.name: task_view(task, language="cpp", form=form) for task in tasks}


def scripted(kind, tasks=TASKS) -> Policy:
    return Policy(speaker=ScriptedPolicy(kind, tasks, views_of(tasks), VARIANTS, style="compact"))


def work(cfg, folder, policy, client, *, plan=None, facts=None, refused=None, **fields):
    """One start of the command, with a client in the sandbox's place."""
    plan = plan or plan_of(cfg)
    folder.mkdir(exist_ok=True)
    remember_settings(folder, settings_of(cfg, plan, policy=facts or {"policy": "test"}, split="held_out", library={}))
    journal = VerdictJournal(folder / harness.VERDICTS)
    judge = SandboxJudge(
        client=client, device="cpu", language="cpp", form="kernel", options=Options(), verify_options=Options(), journal=journal, max_parallel=1
    )
    refused = harness.refusals(judge, plan.tasks, folder / harness.ADMISSION) if refused is None else refused
    try:
        return evaluate(policy, judge, plan, ResultsFile(folder / RESULTS), refused=refused, **fields)
    finally:
        journal.close()


def value(summary, *path, which="last_turn", baseline="eager"):
    found = summary["scores"][which][baseline]["all"]
    for name in path:
        found = found[name]
    return found["value"]


# --- the right answer is known --------------------------------------------------------------------------------------------------------


def test_the_generators_kernels_score_what_the_judge_knows_of_them(cfg, tmp_path):
    client = KnowingClient()
    assert not work(cfg, tmp_path / "expert", scripted("expert"), client)
    best = summary_of(tmp_path / "expert", resamples=FEW)
    assert (value(best, "compiled"), value(best, "fast", "0"), value(best, "fast", "1.5"), value(best, "fast", "2")) == (1, 1, 1, 0)
    assert value(best, "geomean") == pytest.approx(2.0)
    assert value(best, "geomean", baseline="torch.compile") == pytest.approx(1.25)
    assert value(best, "fast", "1.2", baseline="torch.compile") == 1.0 > value(best, "fast", "1.5", baseline="torch.compile")
    assert not best["partial"] and best["samples"] == {"there": 10, "of": 10} and best["integrity"] == {}
    assert best["candidates"] == {"handed_in": 20, "distinct": 10, "turns": 20} and len(client.judged) == 10, "a kernel is judged once"
    assert {name: group["tasks"] for name, group in best["scores"]["last_turn"]["eager"].items()} == {"all": 5, "level 1": 2, "level 2": 3}

    work(cfg, tmp_path / "naive", scripted("naive"), KnowingClient())
    slow = summary_of(tmp_path / "naive", resamples=FEW)
    assert (value(slow, "fast", "0"), value(slow, "fast", "1"), value(slow, "geomean")) == (1.0, 0.0, pytest.approx(0.5))

    work(cfg, tmp_path / "wrong", scripted("wrong"), KnowingClient())
    bad = summary_of(tmp_path / "wrong", resamples=FEW)
    assert (value(bad, "fast", "0"), value(bad, "mean"), value(bad, "geomean")) == (0.0, 0.0, None)
    assert value(bad, "compiled") == 1.0 and bad["integrity"] == {"reads_reference": 20} and bad["outcomes"] == {"integrity": 10}
    json.dumps(bad, allow_nan=False)


def test_samples_of_scripted_policies_are_the_kernels_in_their_order():
    variants = VARIANTS(TASKS[0])
    expert = kernels_of("expert", variants)
    techniques = {v.source: len(v.techniques) for v in variants}
    assert [techniques[source] for source in expert] == sorted((techniques[s] for s in expert), reverse=True) and len(expert) > 2
    for kind, intents in KINDS.items():
        own = [INTENTS[TASKS[0].name, trimmed(source)] for source in kernels_of(kind, variants)]
        assert set(own) == set(intents) and own == sorted(own, key=intents.index)
    from_file = Task(name="level1_1_x", level=1, family="x", split="held_out", reference="#")
    with pytest.raises(ScriptedPolicyError, match="none are generated for tasks from files, such as level1_1_x"):
        ScriptedPolicy("expert", [from_file], {}, VARIANTS, style="compact")
    nothing = ScriptedPolicy("naive", TASKS[:1], views_of(TASKS), lambda task: [], style="compact")
    hole = Trajectory(agent="policy", task=TASKS[0].name, group="g")
    assert nothing.speak([hole], ["?"], [0], max_new=1) == [True] and "no kernel of kind 'naive'" in hole.turns[0].error
    assert nothing.speak([hole], ["?"], [0], max_new=1) == [False]


def test_holes_refused_tasks_and_prompts_that_do_not_fit_count_and_say_why(cfg, tmp_path):
    folder = tmp_path / "kernels"
    (folder / TASKS[0].name).mkdir(parents=True)
    (folder / TASKS[0].name / "0.cpp").write_text(kernels_of("expert", VARIANTS(TASKS[0]))[0])
    reference = "class Model:  # {}\n    def forward(self, x):\n        return x"
    random, zeros = (
        Task(name=f"level1_{i}_{name}", level=1, family="z", split="held_out", reference=reference.format(name))
        for i, name in enumerate(("random", "zeros"))
    )
    tasks = (TASKS[0], TASKS[1], random, zeros)
    views = views_of(tasks, form="module")
    (folder / zeros.name).mkdir()
    (folder / zeros.name / "0.cpp").write_text(kernels_of("expert", VARIANTS(TASKS[0]))[0])

    class Narrow(KernelFolder):
        def fits(self, prompt, max_new):
            return TASKS[1].compact.strip() not in prompt

    policy, client = Policy(speaker=Narrow(folder, views, style="compact")), KnowingClient()
    config = dataclasses.replace(setup.rollout_config(cfg), form="module")
    assert not work(cfg, tmp_path / "out", policy, client, plan=plan_of(cfg, tasks=tasks, turns=1, config=config))
    found = summary_of(tmp_path / "out", resamples=FEW)
    assert found["samples"]["there"] == 8 and value(found, "fast", "1") == pytest.approx(1 / 8)
    assert {name for name, _ in client.judged} == {TASKS[0].name, zeros.name}, "what trivial answers pass is evaluated all the same"
    assert found["tasks_refused"] == {random.name: "its output is random"} and list(found["tasks_that_do_not_fit"]) == [TASKS[1].name]
    assert found["tasks_marked"] == {zeros.name: ["not admitted to training: zeros would pass as the answer"]}
    assert found["missing"] == {"samples": 6, "reasons": {results.UNFIT: 2, results.REFUSED: 2, "missing": 2}}
    text = table(found)
    for words in (
        "REFUSED: 1 tasks", f"refused by the sandbox: {random.name}: its output is random", f"does not fit: {TASKS[1].name}: its prompt",
        "TRIVIAL: 1 tasks", f"marked: {zeros.name}: not admitted to training: zeros would pass", "without a kernel: 6 samples",
    ):  # fmt: skip
        assert words in text


# --- going on -------------------------------------------------------------------------------------------------------------------------


def bare(folder):
    return {key: part for key, part in summary_of(folder, resamples=FEW).items() if key not in ("wall_s", "sessions")}


@pytest.mark.parametrize("kill_at", [0, 3, 4, 9])
def test_killed_anywhere_the_same_command_ends_the_same_and_judges_nothing_twice(cfg, tmp_path, kill_at):
    work(cfg, tmp_path / "whole", scripted("expert"), whole := KnowingClient())
    first = KnowingClient(kill_at)
    with pytest.raises(Killed):
        work(cfg, tmp_path / "killed", scripted("expert"), first)
    there = ResultsFile(tmp_path / "killed" / RESULTS).results
    assert len(there) == kill_at // 4 * 4, "a chunk of two tasks with two samples is there as a whole"
    if there:
        found = summary_of(tmp_path / "killed", resamples=FEW)
        assert found["partial"] and "PARTIAL" in table(found) and len(found["tasks_not_finished"]) == 5 - len(there) // 2
    second, steps = KnowingClient(), []
    assert not work(cfg, tmp_path / "killed", scripted("expert"), second, chunk_done=lambda: steps.append(1))
    assert first.judged + second.judged == whole.judged and len(steps) == 3 - len(there) // 4
    assert bare(tmp_path / "killed") == bare(tmp_path / "whole")
    third = KnowingClient()
    work(cfg, tmp_path / "killed", scripted("expert"), third)
    assert third.judged == []


def test_a_line_cut_short_is_made_again_and_a_damaged_one_is_named(cfg, tmp_path, caplog):
    work(cfg, tmp_path / "e", scripted("expert"), KnowingClient())
    path, before = tmp_path / "e" / RESULTS, bare(tmp_path / "e")
    text = path.read_text()
    path.write_text(text[:-40])
    assert len(ResultsFile(path, read_only=True).results) == 9 and path.read_text() == text[:-40]
    assert "cut short" in caplog.text
    work(cfg, tmp_path / "e", scripted("expert"), again := KnowingClient())
    assert again.judged == [] and path.read_text() == text and bare(tmp_path / "e") == before
    lines = text.splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[1][:30] + "\n", *lines[2:]]))
    with pytest.raises(ValueError, match=rf"{RESULTS}:2: not a result .*Delete that line"):
        ResultsFile(path)


def test_other_settings_in_the_same_folder_are_refused_with_the_difference(cfg, tmp_path):
    (tmp_path / "e").mkdir()
    remember_settings(tmp_path / "e", settings_of(cfg, plan_of(cfg), policy={"policy": "never ran"}, split="all", library={}))
    work(cfg, tmp_path / "e", scripted("expert"), KnowingClient(), facts={"policy": "expert", "kernels": "aa"})
    changed = dataclasses.replace(TASKS[0], reference="# other")
    for said, fields in {
        r"samples: 2 -> 3": dict(plan=plan_of(cfg, samples=3)),
        r"chunk: 2 -> 1": dict(plan=plan_of(cfg, chunk=1)),
        rf"tasks: now without {TASKS[4].name}": dict(plan=plan_of(cfg, tasks=TASKS[:4])),
        rf"tasks: now of other content {TASKS[0].name}": dict(plan=plan_of(cfg, tasks=(changed, *TASKS[1:]))),
        r"tasks: in another order": dict(plan=plan_of(cfg, tasks=TASKS[::-1])),
        r"policy.kernels: aa -> bb": dict(facts={"policy": "expert", "kernels": "bb"}),
        r"episode.max_policy_tokens: 256 -> 9": dict(plan=plan_of(cfg, config=dataclasses.replace(setup.rollout_config(cfg), max_policy_tokens=9))),
        r"skills: now with s": dict(plan=plan_of(cfg, skills=(Skill(name="s", description="d", scope="general", tags=("a",), content="c"),))),
    }.items():
        with pytest.raises(SettingsError, match=said):
            work(cfg, tmp_path / "e", scripted("expert"), KnowingClient(), **({"facts": {"policy": "expert", "kernels": "aa"}} | fields))
    with pytest.raises(SettingsError, match="holds no evaluation"):
        summary_of(tmp_path)
    (tmp_path / "config.json").touch()
    with pytest.raises(SettingsError, match="holds a run"):
        remember_settings(tmp_path, {})


# --- an endpoint ----------------------------------------------------------------------------------------------------------------------


def ask(cfg, folder, fake, client, *, budget_tokens=None, plan=None):
    own = cfg.copy_and_resolve_references()
    own.style = "chat"
    config = dataclasses.replace(setup.rollout_config(own), max_context_tokens=8192)
    plan = dataclasses.replace(plan or plan_of(cfg, samples=1, chunk=2), config=config)
    endpoint = EndpointConfig(
        base_url=fake.base_url, model="m", api_key_env="", parallel=1, retries=0, budget_tokens=budget_tokens, price_in=1.0, price_out=2.0
    )
    views = views_of(plan.tasks)
    described = policies.describe("endpoint", own, plan.tasks, views, endpoint=endpoint)
    folder.mkdir(exist_ok=True)
    with policies.opened(described, own, plan.tasks, views, config=config, workdir=folder) as policy:
        return work(own, folder, policy, client, plan=plan, facts=described.facts)


def good_answer(body, number):
    prompt = "\n".join(m["content"] for m in body["messages"])
    task = next(task for task in TASKS if f"## Task {task.name}\n" in prompt)
    return chat(f"```cpp\n{kernels_of('expert', VARIANTS(task))[0]}\n```", usage=(100, 20))


def test_an_endpoint_that_stops_and_a_budget_that_ends_are_gone_on_from_and_nothing_is_asked_twice(cfg, tmp_path):
    with FakeEndpoint(lambda body, n: refusal(401, "no") if n == 6 else good_answer(body, n)) as fake:
        with pytest.raises(EndpointRefused):
            ask(cfg, tmp_path / "e", fake, KnowingClient())
        assert len(ResultsFile(tmp_path / "e" / RESULTS).results) == 2
        spent = ask(cfg, tmp_path / "e", fake, KnowingClient(), budget_tokens=7 * 120 + 900)
        assert spent[OUT_OF_BUDGET] and len(ResultsFile(tmp_path / "e" / RESULTS).results) < 5, "what was not asked is no result"
        assert summary_of(tmp_path / "e", resamples=FEW)["partial"]
        assert not ask(cfg, tmp_path / "e", fake, client := KnowingClient())
        asked = [json.dumps(body["messages"]) for n, body in enumerate(fake.asked) if n != 6]
        assert len(asked) == len(set(asked)) == 10 and fake.asked[0]["temperature"] == 1.0
    found = summary_of(tmp_path / "e", resamples=FEW)
    assert not found["partial"] and value(found, "fast", "1.5") == 1.0 and len(client.judged) <= 1
    assert found["tokens"] == {"prompt": 1000, "answers": 200}
    assert found["cost"]["of_results"] == pytest.approx(10 * (100 + 40) / 1e6) and found["cost"]["tokens"] == 1200
    assert "spent: 0.0014 for 1,200 tokens" in table(found)


def test_answers_that_are_cut_or_empty_are_turns_without_a_kernel(cfg, tmp_path):
    def respond(body, number):
        if len(body["messages"]) == 1:
            return chat("half a", finish="length") if TASKS[0].name in body["messages"][0]["content"] else good_answer(body, number)
        return chat("") if TASKS[1].name in body["messages"][0]["content"] else good_answer(body, number)

    with FakeEndpoint(respond) as fake:
        assert not ask(cfg, tmp_path / "e", fake, KnowingClient(), plan=plan_of(cfg, samples=1, chunk=3, tasks=TASKS[:3]))
    by_task = {r.trajectory.task: r.trajectory for r in ResultsFile(tmp_path / "e" / RESULTS).results.values()}
    assert [[t.verdict.outcome for t in by_task[task.name].turns] for task in TASKS[:3]] == [["no_kernel", "ok"], ["ok", "no_kernel"], ["ok", "ok"]]
    found = summary_of(tmp_path / "e", resamples=FEW)
    assert value(found, "fast", "0") == pytest.approx(2 / 3) and value(found, "fast", "0", which="best_turn") == 1.0
    assert found["missing"] == {"samples": 1, "reasons": {"empty": 1}}


# --- a run ----------------------------------------------------------------------------------------------------------------------------


def saved_run(folder, c):
    """A folder as a run leaves it: a cold start of 2 steps whose best is the first, and RL steps 1 to 3 whose best is 2. Parameters of a
    checkpoint are its `mark`."""
    codec = train_codec(["x = x + 1"], 300, ())
    codec.save(folder / "codec")
    (folder / "codec" / "done").touch()
    (folder / "config.json").write_text(json.dumps(c.to_dict()))
    model = models.make_model(c, codec)

    def state(step, mark, **record):
        trainable = jax.tree.map(lambda leaf: jax.numpy.full_like(leaf, mark), model.trainable)
        return TrainState(step=step, trainable=trainable, opt_state={"moment": jax.numpy.zeros(3)}, record=record)

    validated = {"best_validation": {"step": 1, "loss": 0.5}}
    for phase, marks, best, record in (("sft", {1: 11, 2: 12}, 1, validated), ("rl", {1: 21, 2: 22, 3: 23}, 2, {})):
        with Checkpoints(folder / "checkpoints" / phase) as checkpoints:
            for step, mark in marks.items():
                checkpoints.save(state(step, mark, **record))
                checkpoints.wait()
                if step == best:
                    checkpoints.keep_as_best(step)
    return model


def test_a_runs_checkpoints_are_found_read_and_left_as_they_are(tmp_path, monkeypatch, caplog):
    c = tiny_config()
    c.sft.steps, folder = 2, tmp_path / "run"
    (folder / "codec").mkdir(parents=True)
    model = saved_run(folder, c)

    def files():
        return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in folder.rglob("*")}

    def described(which=""):
        return policies.describe(f"run:{folder}{which}", c, [], {})

    before, make, trained = files(), policies._speakers, []
    monkeypatch.setattr(policies, "_speakers", lambda cfg, model, trainable: trained.append(trainable) or make(cfg, model, trainable))
    for which, mark, step in (("", 23, 3), ("@3", 23, 3), ("@best", 22, 2), ("@2", 22, 2), ("@sft", 11, 0)):
        d = described(which)
        with policies.opened(d, c, [], {}, config=setup.rollout_config(c), workdir=tmp_path) as policy:
            assert (d.step, policy.speaker.sampler.config.temperature, policy.greedy.sampler.config.temperature) == (step, 1.0, 0.0)
        assert all((np.asarray(leaf) == mark).all() for leaf in jax.tree.leaves(trained[-1]))
        monkeypatch.setattr(models, "make_model", lambda cfg, codec: model)  # the same again
    assert files() == before
    newest, best, second = (described(which).facts["content"] for which in ("", "@best", "@2"))
    assert newest != best == second
    for which, said in (("@7", r"no such RL checkpoint \(@7\): there are steps 2, 3, of which 2 is the best"), ("x", "has no config.json")):
        with pytest.raises(PolicyError, match=said):
            described(which)
    c.style = "chat"
    assert described().step == 3 and "was trained with style='compact' and is evaluated with 'chat'" in caplog.text
    next((folder / "checkpoints" / "rl" / "3" / "arrays").rglob("d/*")).write_bytes(b"x")
    assert described().step == 2 and "is damaged" in caplog.text, "a damaged one is passed over, and stays where it is"
    with pytest.raises(PolicyError, match="is damaged"):
        described("@3")


def test_names_of_policies_that_mean_nothing_are_refused(cfg, tmp_path):
    for name, said in {
        "expert:x": "--policy=expert:x: give run:RUNDIR",
        "run:": "give run:RUNDIR",
        f"hf:{tmp_path}": "has no config.json",
        f"kernels:{tmp_path}": "no kernel for any of 5 tasks",
        "endpoint": "give --base_url and --model",
    }.items():
        with pytest.raises(ValueError, match=said):
            policies.describe(name, cfg, TASKS, views_of(TASKS))
    with pytest.raises(PolicyError, match="reads prompts of style 'chat' alone"):
        policies.describe("endpoint", cfg, TASKS, {}, endpoint=EndpointConfig(base_url="http://h/v1", model="m", api_key_env=""))
