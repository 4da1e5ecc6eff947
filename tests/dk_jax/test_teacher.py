"""The teacher: it gets the policy's prompts, only what was proved is imitated, and interrupted work is done once.

The endpoint is a server on localhost, the sandbox's client follows a script: a kernel says in a comment how it is to be judged.
"""

from __future__ import annotations

import collections
import json
import re
import threading
from pathlib import Path

import pytest

from dk_jax.agents import policy, selection, summary
from dk_jax.interop.endpoint import Answer, AnswerJournal, Endpoint, EndpointConfig, EndpointRefused
from dk_jax.rollout.episode import RolloutConfig, task_view
from dk_jax.rollout.judge import Journal, SandboxJudge
from dk_jax.rollout.trajectory import Trajectory, Turn, Verdict
from dk_jax.sft.samples import Sample
from dk_jax.sft.teacher import Teacher, TeacherConfig
from dk_jax.sft.teacher_report import statistics, table
from dk_jax.sft.teacher_samples import (
    answer_form,
    imitated,
    policy_samples,
)
from dk_jax.sft.teacher_speaker import Exchange
from dk_jax.skills.record import Skill, SkillDraft
from dk_jax.tasks.builtin import builtin_suite
from sandbox.protocol import EvaluationResult, Options, Reward, Span, Timing
from tests.dk_jax.fake_endpoint import FakeClock, FakeEndpoint, chat, refusal

KEY = "sk-very-secret-0123456789"

TASKS = builtin_suite("gpu").train[:4]

SPAN = Span(median_ms=1.0, low_ms=0.9, high_ms=1.1, samples=5)


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("TEST_KEY", KEY)


def kernel(mark: str) -> str:
    """A module whose comment says how it is judged: "ok 1.5", or an outcome; what follows a semicolon tells it from others."""
    return f"import torch\n\n\nclass ModelNew(torch.nn.Module):  # {mark}\n    def forward(self, x):\n        return x"


def message(mark: str, said: str = "") -> str:
    return f"<think>hm</think>Here it is:\n```python\n{kernel(mark)}\n```\n{said}".strip()


class ScriptedClient:
    """Judges by what the candidate says of itself; with `dies_at` the work is interrupted at that candidate."""

    def __init__(self, dies_at: int | None = None):
        self.judged, self.dies_at = [], dies_at
        self.timings = []

    def abort(self):
        """Nothing is ever waited for."""

    def evaluate(self, task, candidates, options=None, client_key=None, on_result=None):
        for i, candidate in enumerate(candidates):
            if self.dies_at is not None and len(self.judged) >= self.dies_at:
                raise KeyboardInterrupt
            self.judged.append((task.name, candidate.source))
            self.timings.append(options.timing)
            on_result(i, self._result(candidate.source, options.timing))

    def _result(self, source, timing) -> EvaluationResult:
        outcome, _, speed = re.search(r"# ([a-z_]+)( ([0-9.]+))?", source).group(1, 2, 3)
        if outcome != "ok":
            return EvaluationResult(id="x", state="done", stage="built", outcome=outcome, feedback=f"{outcome}: max err 1.0")
        if timing == "none":
            return EvaluationResult(id="x", state="done", stage="correct", outcome="ok", reward=Reward(total=0.5))
        timed = Timing(candidate=SPAN, baselines={"eager": SPAN}, speedup=float(speed), noisy=False, bound_by="wall")
        return EvaluationResult(
            id="x", state="done", stage="timed", outcome="ok", timing=timed, feedback="correct", reward=Reward(total=0.5 + float(speed) / 2)
        )


def judge_of(client: ScriptedClient, path: Path | None = None) -> SandboxJudge:
    return SandboxJudge(
        client=client, device="cpu", language="triton", form="module", options=Options(), verify_options=Options(),
        journal=Journal(path) if path else None, max_parallel=1,
    )  # fmt: skip


def draft(name: str, idea: str = "hold the row in registers", example: str = "acc = tl.zeros((BLOCK,))") -> SkillDraft:
    return SkillDraft(
        name=name, description=f"{idea} at once", scope="general", tags=("row", "registers", "loop"),
        content=f"Motivation: memory is slow ({name}).\nKey Idea: {idea}.\nExample:\n{example} # {name}",
    )  # fmt: skip


def kind_of(body: dict) -> str:
    last = body["messages"][-1]["content"]
    starts = {"You are an expert": "first", "Verdict on": "later", "Choose the": "selection", "A Triton kernel": "summary"}
    return next(kind for start, kind in starts.items() if last.startswith(start))


def scripted(**answers):
    """Answers by the kind of prompt (`kind_of`): a text, several in turn for equal prompts, or a function of the request's body."""
    seen, lock = collections.Counter(), threading.Lock()

    def respond(body, number):
        answer = answers[kind_of(body)]
        if callable(answer):
            return answer(body)
        if isinstance(answer, str):
            return chat(answer)
        with lock:
            count = seen[json.dumps(body["messages"])]
            seen[json.dumps(body["messages"])] += 1
        return chat(answer[min(count, len(answer) - 1)])

    return respond


def config(**rollout) -> TeacherConfig:
    fields = dict(
        selections=2, rollouts=1, turns=2, summaries=1, style="chat", language="triton", form="module", max_policy_tokens=500,
        max_selection_tokens=100, max_summary_tokens=200, max_context_tokens=8000, headers=8, max_skills=2, max_triggers=9,
    )  # fmt: skip
    own = {name: rollout.pop(name) for name in ("form_", "round_tasks", "grow", "workers") if name in rollout}
    own = {"workers": 4} | {name.rstrip("_"): value for name, value in own.items()}
    return TeacherConfig(rollout=RolloutConfig(**(fields | rollout)), max_tokens=2000, **own)


def teacher_of(fake, client, folder: Path, cfg: TeacherConfig | None = None, library=(), **endpoint) -> Teacher:
    settings = EndpointConfig(base_url=fake.base_url, model="big", api_key_env="TEST_KEY", **endpoint)
    return Teacher(
        endpoint=Endpoint(settings, AnswerJournal(folder / "answers.jsonl"), clock=FakeClock()),
        judge=judge_of(client, folder / "verdicts.jsonl"),
        config=cfg or config(),
        library=library,
    )


def teach(teacher: Teacher, tasks=TASKS, **fields) -> list[Sample]:
    with teacher.endpoint:
        teacher.teach(tasks, **fields)
        return [one.sample for one in teacher.samples()]


def view(task):
    return task_view(task, language="triton", form="module")


# --- conversations ------------------------------------------------------------------------------------------------------------------------


def test_the_teacher_gets_the_policys_prompts_and_samples_are_what_it_saw(tmp_path):
    client = ScriptedClient()
    with FakeEndpoint(scripted(first=message("incorrect"), later=message("ok 2.0"))) as fake:
        [sample] = teach(teacher_of(fake, client, tmp_path, config(summaries=0)), TASKS[:1])
    first, later = (body["messages"] for body in sorted(fake.asked, key=lambda body: len(body["messages"]))[:2])
    verdict = Verdict.from_result(client._result(kernel("incorrect"), "quick"))
    assert [m["content"] for m in first] == [policy.render_first(view(TASKS[0]), (), style="chat")]
    assert [m["role"] for m in later] == ["user", "assistant", "user"]
    assert [m["content"] for m in later] == [
        first[0]["content"],
        policy.format(kernel("incorrect"), view(TASKS[0]), style="chat"),
        policy.render_feedback(verdict, view(TASKS[0]), style="chat"),
    ]
    assert sample.turns == (
        (later[0]["content"], later[1]["content"], False),
        (later[2]["content"], policy.format(kernel("ok 2.0"), view(TASKS[0]), style="chat"), True),
    ), "a wrong turn is shown and not imitated"
    assert (sample.agent, sample.kind, sample.task) == ("policy", "policy", TASKS[0].name)
    assert client.judged == [(TASKS[0].name, kernel("incorrect")), (TASKS[0].name, kernel("ok 2.0"))]


def test_kernels_that_fail_are_never_imitated(tmp_path):
    said = [("build_failed", "incorrect"), ("ok 1.0", "incorrect"), ("integrity", "ok 1.0")]
    marks = {task.name: marks for task, marks in zip(TASKS[:3], said, strict=True)}

    def answer(body):
        name = re.search(r"## Task (\S+)", body["messages"][0]["content"]).group(1)
        return chat(message(marks[name][len(body["messages"]) // 2]))

    with FakeEndpoint(scripted(first=answer, later=answer, summary="no call")) as fake:
        teacher = teacher_of(fake, ScriptedClient(), tmp_path)
        samples = teach(teacher, TASKS[:3])
    kept = {s.task: [(re.search(r"# (\w+)", a).group(1), keep) for _, a, keep in s.turns] for s in samples}
    assert kept == {TASKS[1].name: [("ok", True)], TASKS[2].name: [("integrity", False), ("ok", True)]}, "what follows the last good one is left out"
    assert statistics(teacher)["judged"] == {"build_failed": 1, "incorrect": 2, "ok": 2, "integrity": 1}


def test_messages_without_a_kernel_are_told_so_and_not_judged(tmp_path):
    client = ScriptedClient()
    with FakeEndpoint(scripted(first="I would rather not.", later=message("ok 1.0"))) as fake:
        [sample] = teach(teacher_of(fake, client, tmp_path), TASKS[:1])
    assert [(answer[:20], keep) for _, answer, keep in sample.turns] == [("I would rather not.", False), ("```python\nimport tor", True)]
    assert "no kernel found" in sample.turns[1][0] and len(client.judged) == 1


@pytest.mark.parametrize("problem", ["length", "content_filter"])
def test_an_answer_that_is_not_whole_ends_its_conversation(tmp_path, problem):
    def later(body):
        return chat("```python\nimport", finish=problem)

    with FakeEndpoint(scripted(first=message("ok 1.0"), later=later)) as fake:
        teacher = teacher_of(fake, ScriptedClient(), tmp_path, config(turns=3))
        [sample] = teach(teacher, TASKS[:1])
    assert len(sample.turns) == 1 and len(fake.asked) == 2
    assert teacher.endpoint.tally.problems == {problem: 1}


def test_a_fresh_context_gives_a_sample_a_turn_with_the_short_summary(tmp_path):
    def first(body):
        mark = "ok 2.0" if "## Your attempts so far" in body["messages"][0]["content"] else "incorrect"
        return chat(message(mark, "I fused it."))

    with FakeEndpoint(scripted(first=first, summary="no call")) as fake:
        [sample] = teach(teacher_of(fake, ScriptedClient(), tmp_path, config(context="kernels")), TASKS[:1])
    assert all(len(body["messages"]) == 1 for body in fake.asked)
    [(prompt, answer, keep)] = sample.turns
    assert keep and "### Attempt 1" in prompt and "Here it is" in answer and answer.endswith("I fused it.") and "<think>" not in answer


def test_a_conversation_ends_where_the_learning_model_has_no_room(tmp_path):
    room = 1200
    with FakeEndpoint(scripted(first=message("ok 1.0"), later=message("ok 1.1"))) as fake:
        samples = teach(teacher_of(fake, ScriptedClient(), tmp_path, config(turns=8, max_context_tokens=room, max_policy_tokens=300)), TASKS[:1])
    assert 1 < len(samples[0].turns) < 8
    assert len(fake.asked) == len(samples[0].turns)


@pytest.mark.parametrize(
    ("verdicts", "wanted"),
    [
        ([("ok", 1.0), ("ok", 1.5)], [True, True]),
        ([("ok", 2.0), ("ok", 1.9), ("ok", 1.0)], [True, True, False]),
        ([("incorrect", 0.0), ("ok", 0.3)], [False, True]),
        ([("ok", 0.0), ("ok", 0.0)], [True, True]),
        ([("timeout", 0.0), ("no_kernel", 0.0)], [False, False]),
    ],
)
def test_later_kernels_are_imitated_unless_they_are_slower(verdicts, wanted):
    made = [
        Verdict(outcome=o, stage="timed", reward=0.0, speedup=s, noisy=False, coverage=None, feedback="", speed_rewarded=True) for o, s in verdicts
    ]
    assert imitated(made) == wanted


def test_kernels_that_leave_the_work_to_others_are_not_imitated():
    fields = dict(outcome="ok", stage="timed", reward=0.5, speedup=3.0, noisy=False, feedback="", speed_rewarded=False)
    assert imitated([Verdict(coverage=0.1, **fields)]) == [False]
    assert imitated([Verdict(coverage=None, **fields)]) == [True], "nothing is known of it where no profiler ran"


def test_form_message_takes_what_was_written():
    shown = answer_form(view(TASKS[0]), form="message", summarise=False)
    assert shown(message("ok 1.0")) == message("ok 1.0")


def test_samples_of_a_trajectory_say_which_turns_they_are():
    said = [Exchange(prompt=f"p{i}", shown=f"a{i}", answer=Answer(key="k", model="m")) for i in range(3)]
    trajectory = Trajectory(agent="policy", task="t", group="t", skills=("s",))
    for outcome in ("ok", "incorrect", "ok"):
        verdict = Verdict(outcome=outcome, stage="correct", reward=0.0, speedup=0.0, noisy=False, coverage=None, feedback="")
        trajectory.turns.append(Turn(text="x", stop="eos", verdict=verdict))
    [(whole, part)] = policy_samples(trajectory, said, fresh=False)
    assert whole.turns == (("p0", "a0", True), ("p1", "a1", False), ("p2", "a2", True)) and part == slice(0, 3)
    assert whole.kind == "policy_with_skill"
    assert [(s.turns[0][0], p.start) for s, p in policy_samples(trajectory, said, fresh=True)] == [("p0", 0), ("p2", 2)]


# --- skills -------------------------------------------------------------------------------------------------------------------------------


def skilled(body, *, with_skill: str, without: str) -> str:
    return with_skill if "## Skills" in body["messages"][0]["content"] else without


@pytest.mark.parametrize(("with_skill", "kept"), [("ok 3.0", True), ("ok 1.0", False), ("incorrect", False)])
def test_a_choice_of_skills_is_imitated_if_its_conversations_were_the_better_ones(tmp_path, with_skill, kept):
    library = [Skill.from_draft(draft(name), status="active") for name in ("one_row", "two_rows")]

    def first(body):
        return chat(message(skilled(body, with_skill=with_skill, without="ok 2.0")))

    call = selection.format(["two_rows"], style="chat", think="rows", reasons=["it fits"])
    with FakeEndpoint(scripted(first=first, selection=f"I take this one.\n{call}")) as fake:
        teacher = teacher_of(fake, ScriptedClient(), tmp_path, config(turns=1, selections=1), library)
        samples = teach(teacher, TASKS[:1])
    prompts = [body["messages"][0]["content"] for body in fake.asked]
    assert selection.render(view(TASKS[0]), teacher_headers(library, TASKS[0]), style="chat", max_skills=2) in prompts
    assert policy.render_first(view(TASKS[0]), [library[1]], style="chat") in prompts, "the whole skill is injected"
    chosen = [s for s in samples if s.agent == "selection"]
    assert [s.kind for s in samples if s.agent == "policy"] == ["policy", *(["policy_with_skill"] if with_skill != "incorrect" else [])]
    assert [s.turns[0][1:] for s in chosen] == ([(call, True)] if kept else []), "the call alone, without the prose around it"


def teacher_headers(library, task):
    from dk_jax.skills.retrieval import SkillIndex

    return SkillIndex(library).top(selection.query(view(task)), 8)


@pytest.mark.parametrize("said", ["no call", selection.format(["unheard_of"], style="chat"), selection.format(["a", "a"], style="chat")])
def test_choices_that_cannot_be_read_or_were_not_on_offer_are_neither_used_nor_imitated(tmp_path, said):
    library = [Skill.from_draft(draft("one_row"), status="active")]
    with FakeEndpoint(scripted(first=message("ok 1.0"), selection=said)) as fake:
        teacher = teacher_of(fake, ScriptedClient(), tmp_path, config(turns=1), library)
        samples = teach(teacher, TASKS[:1])
    assert {s.kind for s in samples} == {"policy"}
    assert statistics(teacher)["read"]["selection"] == {"messages": 2, "read": 0}


def improving(body):
    return chat(message(f"ok {1 + 0.5 * (len(body['messages']) // 2)}"))


def test_summaries_of_what_improved_with_and_without_skills(tmp_path):
    library = [Skill.from_draft(draft("one_row"), status="active")]
    proposed = [draft("fuse_all", "fuse everything", "x = x * 2"), draft("Bad Name"), draft("one_row", "again", "y = 1")]

    def summarise(body):
        skilled_prompt = "## Skills its author had" in body["messages"][0]["content"]
        wanted = [draft("use_tiles", "tile both axes", "z = z[None]")] if skilled_prompt else proposed[:2]
        return chat(summary.format(wanted, style="chat", think="why"))

    with FakeEndpoint(scripted(first=improving, later=improving, summary=summarise, selection=selection.format(["one_row"], style="chat"))) as fake:
        teacher = teacher_of(fake, ScriptedClient(), tmp_path, config(), library)
        samples = {s.kind: s for s in teach(teacher, TASKS[:1])}
    assert samples.keys() == {"policy", "policy_with_skill", "summary", "summary_with_skill", "selection"}
    assert samples["summary"].turns[0][1] == summary.format(proposed[:1], style="chat", think="why"), "the draft with a bad name is left out"
    assert "## Skills its author had" in samples["summary_with_skill"].turns[0][0]
    assert [skill.name for skill in teacher.accepted] == ["fuse_all", "use_tiles"]
    assert any("snake_case" in problem for problem in statistics(teacher)["refused"])


@pytest.mark.parametrize("wanted", [[draft("one_row", "something else", "q = 1")], [draft("other", "hold the row in registers")], []])
def test_summaries_that_say_nothing_new_are_not_imitated(tmp_path, wanted):
    known = draft("one_row")
    library = [Skill.from_draft(known, status="active")]
    wanted = [SkillDraft(**{**vars(d), "content": known.content}) if d.name == "other" else d for d in wanted]
    with FakeEndpoint(
        scripted(first=improving, later=improving, summary=summary.format(wanted, style="chat"), selection=selection.format([], style="chat"))
    ) as fake:
        teacher = teacher_of(fake, ScriptedClient(), tmp_path, config(), library)
        samples = teach(teacher, TASKS[:1])
    assert {s.kind for s in samples} == {"policy"} and teacher.accepted == []
    assert statistics(teacher)["refused"]


def test_kernels_that_did_not_improve_enough_are_not_summarised(tmp_path):
    def slightly(body):
        return chat(message(f"ok {1.5 + 0.1 * (len(body['messages']) // 2)}"))

    with FakeEndpoint(scripted(first=slightly, later=slightly)) as fake:
        teach(teacher_of(fake, ScriptedClient(), tmp_path), TASKS[:1])
    assert [kind_of(body) for body in fake.asked] == ["first", "later"]


def test_proposed_skills_are_on_offer_from_the_next_round_on(tmp_path):
    def summarise(body):
        name = re.search(r"## Task (\S+)", body["messages"][0]["content"]).group(1)
        return chat(summary.format([draft(f"from_{name}", f"the way of {name}", f"a = {name}")], style="chat"))

    def choose(body):
        offered = re.findall(r"- (from_\w+) \(", body["messages"][0]["content"])
        return chat(selection.format(offered[:1], style="chat"))

    with FakeEndpoint(scripted(first=improving, later=improving, summary=summarise, selection=choose)) as fake:
        teacher = teacher_of(fake, ScriptedClient(), tmp_path, config(round_tasks=2, selections=1))
        samples = teach(teacher, TASKS)
    for body in fake.asked:
        if kind_of(body) == "selection":
            offered = set(re.findall(r"- (from_\w+) \(", body["messages"][0]["content"]))
            assert offered == {f"from_{task.name}" for task in TASKS[:2]}
    assert sum(kind_of(body) == "selection" for body in fake.asked) == 2, "in the first round there is nothing to choose from"
    assert {s.task for s in samples if s.kind == "policy_with_skill"} == {task.name for task in TASKS[2:]}
    assert [s.provenance.task for s in teacher.accepted[:2]] == [task.name for task in TASKS[:2]]


def test_skills_do_not_join_unless_wanted(tmp_path):
    answers = scripted(first=improving, later=improving, summary=summary.format([draft("fuse_all")], style="chat"))
    with FakeEndpoint(answers) as fake:
        teacher = teacher_of(fake, ScriptedClient(), tmp_path, config(round_tasks=1, grow=False))
        samples = teach(teacher, TASKS[:2])
    assert teacher.accepted == [] and [s.kind for s in samples] == ["policy", "summary"] * 2


def test_tasks_that_are_only_checked_have_no_summaries(tmp_path):
    client = ScriptedClient()
    with FakeEndpoint(scripted(first=improving, later=improving)) as fake:
        samples = teach(teacher_of(fake, client, tmp_path), TASKS[:2], timed=lambda task: False)
    assert {s.kind for s in samples} == {"policy"} and set(client.timings) == {"none"} and "not timed" in samples[0].turns[1][0]


# --- once and for all ---------------------------------------------------------------------------------------------------------------------


def whole(body):
    """Answers that are a function of the question alone."""
    kind, messages = kind_of(body), body["messages"]
    name = re.search(r"## Task (\S+)", messages[0]["content"]).group(1)
    if kind == "summary":
        return chat(summary.format([draft(f"from_{name}", f"the way of {name}", f"a = {name}")], style="chat"))
    if kind == "selection":
        return chat(selection.format(re.findall(r"- (from_\w+) \(", messages[0]["content"])[:1], style="chat"))
    skill = 0.5 if "## Skills" in messages[0]["content"] else 0.0
    return chat(message(f"ok {1 + skill + 0.5 * (len(messages) // 2)} {name}"))


def answers(**changes):
    return scripted(**({"first": whole, "later": whole, "summary": whole, "selection": whole} | changes))


def lines(folder: Path, name: str) -> int:
    return (folder / name).read_bytes().count(b"\n")


def test_interrupted_anywhere_nothing_is_asked_or_judged_twice(tmp_path):
    cfg = config(round_tasks=2, workers=1)  # so nothing is in flight when it is interrupted, which would be asked again
    with FakeEndpoint(answers()) as fake:
        undisturbed, client = tmp_path / "undisturbed", ScriptedClient()
        wanted = teach(teacher_of(fake, client, undisturbed, cfg))
        asked, judged = collections.Counter(json.dumps(b["messages"]) for b in fake.asked), collections.Counter(client.judged)
    assert {s.kind for s in wanted} == {"policy", "policy_with_skill", "summary", "summary_with_skill", "selection"}

    folder, clients = tmp_path / "disturbed", []
    with FakeEndpoint(answers()) as fake:
        for dies_at in (0, 3, 2, 4):
            clients.append(ScriptedClient(dies_at))
            teacher = teacher_of(fake, clients[-1], folder, cfg)
            with teacher.endpoint, pytest.raises(KeyboardInterrupt):
                teacher.teach(TASKS)
            teacher.samples()  # what there is can be kept
            teacher.judge.journal.close()
        clients.append(ScriptedClient())
        teacher = teacher_of(fake, clients[-1], folder, cfg)
        assert teach(teacher) == wanted
        assert collections.Counter(json.dumps(b["messages"]) for b in fake.asked) == asked
        assert sum((collections.Counter(c.judged) for c in clients), collections.Counter()) == judged
        assert lines(folder, "answers.jsonl") == len(fake.asked) and teacher.endpoint.tally.replayed > 0
        before = len(fake.asked)
        assert teach(teacher_of(fake, ScriptedClient(dies_at=0), folder, cfg)) == wanted, "all of it is in the journals"
        assert len(fake.asked) == before


def test_more_tasks_go_on_where_fewer_ended(tmp_path):
    with FakeEndpoint(answers()) as fake:
        cfg = config(round_tasks=1)
        first = teach(teacher_of(fake, ScriptedClient(), tmp_path, cfg), TASKS[:2])
        asked, client = len(fake.asked), ScriptedClient()
        both = teach(teacher_of(fake, client, tmp_path, cfg), TASKS[:3])
        assert both[: len(first)] == first
        assert {task for task, _ in client.judged} == {TASKS[2].name}
        assert all(f"## Task {TASKS[2].name}" in body["messages"][0]["content"] for body in fake.asked[asked:])


def test_the_budget_stops_cleanly_and_a_larger_one_goes_on(tmp_path):
    prices = dict(price_in=1.0, price_out=1000.0)
    with FakeEndpoint(answers()) as fake:
        cfg = config(round_tasks=1, selections=1)
        teacher = teacher_of(fake, ScriptedClient(), tmp_path, cfg, budget=2.1, **prices)
        some = teach(teacher)
        assert teacher.budget_spent and 0 < len(fake.asked) < 12 and some and teacher.tasks_done < len(TASKS)
        assert teacher.endpoint.tally.spent <= 2.1
        assert "budget" in table(teacher, seconds=1.0)
        teacher = teacher_of(fake, ScriptedClient(), tmp_path, cfg, budget=100.0, **prices)
        everything = teach(teacher)
        assert not teacher.budget_spent and teacher.tasks_done == len(TASKS) and len(everything) > len(some)
        assert all(any(one.turns == other.turns[: len(one.turns)] for other in everything) for one in some), "some go on"
        assert max(collections.Counter(json.dumps(b["messages"]) for b in fake.asked).values()) == 1


def test_a_refused_key_ends_the_work_with_what_came_kept(tmp_path):
    def respond(body, number):
        return whole(body) if number < 3 else refusal(401, f"bad key {KEY}")

    with FakeEndpoint(respond) as fake:
        teacher = teacher_of(fake, ScriptedClient(), tmp_path, config(round_tasks=2, turns=1), parallel=1)
        with teacher.endpoint, pytest.raises(EndpointRefused):
            teacher.teach(TASKS)
        assert len(fake.asked) == 4 and lines(tmp_path, "answers.jsonl") == 3
    kept = {one.sample.task for one in teacher.samples()}
    assert len(kept) == 3 and kept >= {task.name for task in TASKS[:2]}
