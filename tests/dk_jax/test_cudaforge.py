"""CudaForge: a kernel gets better by what the Judge says of it and by nothing else, and what can't be read or does not fit is told."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.cudaforge import get_config
from dk_jax.agents import policy
from dk_jax.evaluation.asked_speaker import AskedSpeaker, Listening
from dk_jax.evaluation.harness import Plan, evaluate
from dk_jax.evaluation.policies import Policy
from dk_jax.evaluation.results import RESULTS, ResultsFile
from dk_jax.generation import Sample
from dk_jax.interop.endpoint import UNASKED, AnswerJournal, Endpoint, EndpointConfig, estimate_tokens
from dk_jax.rollout.episode import task_view
from dk_jax.rollout.speaker import Speaker
from dk_jax.search import cudaforge, cudaforge_judge, strategy
from dk_jax.search.cudaforge import CudaForge
from dk_jax.search.cudaforge_cards import CARDS
from dk_jax.search.cudaforge_judge import BOTTLENECK, FAULT
from dk_jax.train.checks import check_config
from tests.dk_jax.fake_endpoint import FakeEndpoint, chat
from tests.dk_jax.scripted_search import CONFIG, OTHER, SKILL, TASK, ScriptedJudge, ScriptedSpeaker, message, right, spend, wrong

FORGE = CudaForge(card="h200", judge_tokens=400)
VIEW = task_view(TASK, language="cuda", form="module")
STAGES = ("class ModelNew: unmasked", "class ModelNew: scalar_loads", "class ModelNew: wide_loads")
VERDICTS = {
    STAGES[0]: wrong("max abs err 3.0 in the last block"),
    STAGES[1]: right(1.2, "correct; 1.20x faster than eager", profile="coverage 99 %; dram throughput 31 %, registers 32"),
    STAGES[2]: right(2.5, "correct; 2.50x faster than eager"),
}
SAID = {
    STAGES[0]: {"issue": "the tail is not masked", "reason": "it reads past the end", "fix": "compare the index with n"},
    STAGES[1]: {"bottleneck": "narrow loads", "evidence": ["dram throughput 31 %"], "method": "load float4", "expected": "twice the bandwidth"},
    STAGES[2]: {"bottleneck": "nothing much", "method": "leave it", "expected": "no gain at all"},
}
FOLLOWED = {"compare the index with n": STAGES[1], "load float4": STAGES[2], "leave it": STAGES[2]}


def judging(prompt: str) -> bool:
    return cudaforge_judge.CALL in prompt


def coder(prompt: str) -> str:
    """Does what the review says; without one it hands in what it sees, at first the wrong kernel."""
    review = prompt.partition("## Review")[2]
    advised = [source for advice, source in FOLLOWED.items() if advice in review]
    shown = [source for source in STAGES if source in prompt]
    return (advised or shown or [STAGES[0]])[0]


def judge_says(prompt: str) -> str:
    (source,) = [source for source in STAGES if source in prompt]
    return "<think>hm</think>" + cudaforge_judge.format(SAID[source])


def says(trajectory, prompt, seed):
    return judge_says(prompt) if judging(prompt) else message(coder(prompt))


def sandbox() -> ScriptedJudge:
    return ScriptedJudge(VERDICTS.__getitem__)


def sources(trajectory):
    return [turn.source for turn in trajectory.turns]


def test_the_judges_one_instruction_repairs_a_kernel_and_then_makes_it_faster():
    speaker, judge, seen = ScriptedSpeaker(says), sandbox(), []
    trajectories, judged = spend(FORGE, speaker, judge, samples=2, tasks=(TASK, OTHER), turns=4, progress=seen.append)
    for t in trajectories:
        assert sources(t) == [*STAGES, STAGES[2]] and t.rewards == [0.0, 2.2, 3.5, 3.5] and t.best is t.turns[2]
    assert [len(call) for call in speaker.calls] == [4] * 7, "all samples of all tasks together: four rounds, three judgements"
    assert [(phase, len(asked), timed) for phase, asked, timed in judge.calls] == [(f"eval/turn{i}", 4, True) for i in range(4)] and sum(seen) == 16
    assert [(t.task, t.member, t.agent, len(t.turns)) for t in judged] == [(t.task, t.member, "policy", 3) for t in trajectories]
    assert all(turn.form == "json_in_tags" and not turn.error and turn.verdict is None for t in judged for turn in t.turns)
    assert not any(t.rewards for t in judged) and not any(t.group in {o.group for o in trajectories} for t in judged)


def test_no_prompt_remembers_an_earlier_round():
    speaker = ScriptedSpeaker(says)
    spend(FORGE, speaker, sandbox(), turns=4)
    first, *rest = speaker.prompts
    assert first == policy.render_first(VIEW, style="chat"), "the first round is the policy's own first turn"
    kernels = [STAGES[0], STAGES[0], STAGES[1], STAGES[1], STAGES[2], STAGES[2]]
    for prompt, kernel in zip(rest, kernels, strict=True):
        assert [source for source in STAGES if source in prompt] == [kernel] and "secret" not in prompt and TASK.reference.strip() in prompt
        others = [f for source, fields in SAID.items() if source != kernel for f in fields.values() if isinstance(f, str)]
        assert judging(prompt) or not any(text in prompt for text in others)
    repair, faster = rest[1], rest[3]
    assert all(text in repair for text in (*SAID[STAGES[0]].values(), "Mend that", "max abs err 3.0", "corrected version"))
    assert all(text in faster for text in ("Seen in: dram throughput 31 %", "load float4", "twice the bandwidth", "Change that alone"))


def test_the_judge_is_told_what_fits_the_kernels_state():
    fault = cudaforge_judge.render(VIEW, STAGES[0], VERDICTS[STAGES[0]], sheet=CARDS["h200"].sheet())
    assert "exactly one fault" in fault and "## Card" not in fault and "## Profile" not in fault and "Incorrect" not in fault
    assert all(f'"{key}"' in fault for key in FAULT) and not any(f'"{key}"' in fault for key in BOTTLENECK) and "max abs err 3.0" in fault
    slow = cudaforge_judge.render(VIEW, STAGES[1], VERDICTS[STAGES[1]], sheet=CARDS["h200"].sheet())
    assert all(f'"{key}"' in slow for key in (*BOTTLENECK, "evidence")) and not any(f'"{key}"' in slow for key in FAULT)
    for said in ("Correct, 1.20x the speed", "dram throughput 31 %", "three or four measurements", "132 multiprocessors", "141 GB at 4,800 GB/s"):
        assert said in slow
    assert "Correct, not timed." in cudaforge_judge.render(VIEW, STAGES[1], right(0.0)) and len({card.sheet() for card in CARDS.values()}) == 4


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("I think the mask is wrong.", "the message holds 0 calls"),
        (cudaforge_judge.format(SAID[STAGES[0]]) * 2, "2 calls"),
        (cudaforge_judge.format(SAID[STAGES[1]]), "'issue' is missing"),
        (cudaforge_judge.format(SAID[STAGES[0]] | {"issue": ["one", "two"]}), "'issue' is not one text"),
        (cudaforge_judge.format(SAID[STAGES[0]] | {"fix": "  "}), "'fix' is not one text"),
        ((cudaforge_judge.format(SAID[STAGES[0]]), "length"), "the judgement was cut at 400 tokens"),
        ("<think>never ends", "0 calls"),
    ],
)
def test_a_judgement_that_cant_be_read_is_counted_and_the_coder_gets_the_verdict_alone(answer, reason):
    speaker = ScriptedSpeaker(lambda t, prompt, seed: answer if judging(prompt) else message(coder(prompt)))
    (trajectory,), (judged,) = spend(FORGE, speaker, sandbox(), turns=3)
    assert sources(trajectory) == [STAGES[0]] * 3 and [turn.reward for turn in trajectory.turns] == [0.0] * 3
    assert len(judged.turns) == 2 and all(reason in turn.error and turn.form == "" for turn in judged.turns)
    bare = policy.render_first(VIEW, style="chat", attempts=[policy.Attempt(source=STAGES[0], summary="", verdict=VERDICTS[STAGES[0]])])
    assert [prompt for prompt in speaker.prompts[1:] if not judging(prompt)] == [bare, bare]


def test_evidence_is_a_few_measurements_or_none():
    fields, attempt = SAID[STAGES[1]], policy.Attempt(source="k", summary="", verdict=right(1.0))
    without = cudaforge_judge.parse(cudaforge_judge.format(SAID[STAGES[2]]), correct=True)
    assert not without.error and "Seen in" not in cudaforge_judge.render_coder(VIEW, (), attempt, without)
    for given_, told in (("dram 31 %", "dram 31 %"), (["a 1", " ", "b 2"], "a 1; b 2"), ([], None), (None, None), ("", None)):
        judgement = cudaforge_judge.parse(cudaforge_judge.format(fields | {"evidence": given_}), correct=True)
        assert not judgement.error and judgement.fields.get("evidence") == told
    for bad, reason in (([1, 2], "not a list of texts"), ({"a": 1}, "not a list of texts"), (list("abcde"), "5 measurements; at most 4")):
        assert reason in cudaforge_judge.parse(cudaforge_judge.format(fields | {"evidence": bad}), correct=True).error


@given(correct=st.booleans(), texts=st.lists(st.text(min_size=1, max_size=80).filter(str.strip), min_size=3, max_size=3))
def test_what_is_written_is_read(correct, texts):
    fields = dict(zip(BOTTLENECK if correct else FAULT, texts, strict=True))
    bare = json.dumps(fields)
    for written in (cudaforge_judge.format(fields), f"So:\n```json\n{bare}\n```", bare):
        judgement = cudaforge_judge.parse(written, correct=correct)
        assert not judgement.error and judgement.fields == {key: text.strip() for key, text in fields.items()}


@given(st.text(max_size=300), st.booleans())
def test_reading_never_raises(text, correct):
    judgement = cudaforge_judge.parse(text, correct=correct)
    assert bool(judgement.error) != bool(judgement.fields)


def test_long_fields_are_bounded():
    judgement = cudaforge_judge.parse(cudaforge_judge.format(dict.fromkeys(FAULT, "x" * 20_000)), correct=False)
    assert all(len(text) <= cudaforge_judge.MAX_FIELD_CHARS for text in judgement.fields.values())


def test_a_right_kernel_that_becomes_wrong_is_corrected_and_the_best_turn_stays():
    path = {None: STAGES[1], STAGES[1]: STAGES[0], STAGES[0]: STAGES[0]}

    def falls(trajectory, prompt, seed):
        return judge_says(prompt) if judging(prompt) else message(path[next((s for s in STAGES if s in prompt), None)])

    speaker = ScriptedSpeaker(falls)
    (trajectory,), _ = spend(FORGE, speaker, sandbox(), turns=3)
    assert sources(trajectory) == [STAGES[1], STAGES[0], STAGES[0]] and trajectory.best is trajectory.turns[0]
    assert "exactly one fault" in speaker.prompts[3] and STAGES[0] in speaker.prompts[3] and STAGES[1] not in speaker.prompts[4]


def test_a_message_without_a_kernel_changes_nothing_but_says_why():
    spoken = iter(["no code at all", message(STAGES[0]), ("```python\nclass Mod", "length"), message(STAGES[1])])
    speaker = ScriptedSpeaker(lambda t, prompt, seed: judge_says(prompt) if judging(prompt) else next(spoken))
    done = []
    (trajectory,), (judged,) = spend(FORGE, speaker, sandbox(), turns=4, progress=done.append)
    assert sources(trajectory) == [None, STAGES[0], None, STAGES[1]] and sum(done) == 4
    assert [t.verdict.outcome for t in trajectory.turns] == ["no_kernel", "incorrect", "no_kernel", "ok"] and trajectory.rewards == [0, 0, 0, 2.2]
    first, second, judgement, third, fourth = speaker.prompts
    assert "(no kernel)" in second and "holds no code block" in second and not judging(second), "there is nothing to judge yet"
    assert judging(judgement) and len(judged.turns) == 1, "a kernel is judged once"
    told = third + "\n\n## Your last message\nIt held no kernel: the message was cut at 1000 tokens. Attempt 1 above is from before it."
    assert sorted(fourth.split("\n\n")) == sorted(told.split("\n\n")) and fourth != third


def test_skills_are_in_every_prompt_of_the_coder_and_in_none_of_the_judge():
    speaker = ScriptedSpeaker(says)
    spend(FORGE, speaker, sandbox(), turns=3, skills=(SKILL,))
    assert [f"### Skill {SKILL.name}" in prompt for prompt in speaker.prompts] == [not judging(prompt) for prompt in speaker.prompts]
    assert speaker.prompts[0] == policy.render_first(VIEW, [SKILL], style="chat")


def test_equal_seeds_and_answers_give_equal_rounds_and_candidates_may_go_untimed():
    judges = [sandbox(), sandbox()]
    runs = [spend(FORGE, ScriptedSpeaker(says), judge, samples=2, turns=3, timed=False) for judge in judges]
    assert runs[0] == runs[1] and judges[0].calls == judges[1].calls and not any(timed for *_, timed in judges[0].calls)
    seeds = []
    spend(FORGE, ScriptedSpeaker(lambda t, prompt, seed: seeds.append(seed) or says(t, prompt, seed)), sandbox(), samples=2, turns=3)
    assert len(set(seeds)) == len(seeds) == 10, "judgements have seeds of their own"


# --- what does not fit ----------------------------------------------------------------------------------------------------------------


def test_where_the_judges_prompt_does_not_fit_card_and_profile_go_first_and_then_the_judge(caplog):
    long = STAGES[1] + "\n# a line more" * 500
    verdict, sheet = VERDICTS[STAGES[1]], CARDS["h200"].sheet()
    forms = [cudaforge_judge.render(VIEW, long, verdict, **told) for told in ({"sheet": sheet}, {}, {"profile": False})]
    assert len(forms[0]) > len(forms[1]) > len(forms[2]) > len(policy.render_first(VIEW, style="chat"))
    for form in (*forms, None):
        room = (len(form) if form else len(forms[2]) - 1) + CONFIG.max_policy_tokens
        speaker = ScriptedSpeaker(lambda t, prompt, seed: judge_says(prompt) if judging(prompt) else message(long), room=room)
        _, judged = spend(dataclasses.replace(FORGE, judge_tokens=0), speaker, ScriptedJudge(lambda source: verdict), turns=2)
        assert [prompt for prompt in speaker.prompts if judging(prompt)] == ([form] if form else [])
        assert [[turn.error for turn in t.turns] for t in judged] == ([[""]] if form else []), "what was not asked is no message"
        assert ("sample 0: a kernel is not judged: the Judge's prompt and 1000 new tokens pass" in caplog.text) == (form is None)


def test_where_the_coders_prompt_does_not_fit_skills_go_first_then_feedback_and_then_the_rounds_end():
    verdict = VERDICTS[STAGES[0]]
    judgement = cudaforge_judge.parse(cudaforge_judge.format(SAID[STAGES[0]]), correct=False)
    bare = dataclasses.replace(verdict, feedback="")
    forms = [
        cudaforge_judge.render_coder(VIEW, skills, policy.Attempt(source=STAGES[0], summary="", verdict=v), judgement)
        for skills, v in (((SKILL,), verdict), ((), verdict), ((), bare))
    ]
    assert len(forms[0]) > len(forms[1]) > len(forms[2])
    for form in (*forms, None):
        room = (len(form) if form else len(forms[2]) - 1) + CONFIG.max_policy_tokens
        speaker = ScriptedSpeaker(says, room=room)
        (trajectory,), _ = spend(dataclasses.replace(FORGE, judge_tokens=1), speaker, sandbox(), turns=2, skills=(SKILL,))
        coded = [prompt for prompt in speaker.prompts[1:] if not judging(prompt)]
        assert coded == ([form] if form else []) and len(trajectory.turns) == (2 if form else 1)
    nothing, _ = spend(FORGE, ScriptedSpeaker(says, room=1100), sandbox(), turns=2)
    assert nothing[0].turns == [], "not even the task fits: a hole, not an error that ends the others' work"


# --- real speakers --------------------------------------------------------------------------------------------------------------------


class Codec:
    """A token a character."""

    eos_id = 0

    def open_turn(self, text, first):
        return [1 if first else 2, *map(ord, text)]

    def decode(self, tokens):
        return "".join(chr(t) for t in tokens if t > 2)


def test_a_model_speaks_both_parts_and_both_parts_tokens_are_there_to_count():
    def sample(params, prompts, agents, keys, *, max_new_tokens, temperature, conversations, keep):
        assert not keep and set(agents) == {1} and max_new_tokens in (400, 1000)
        texts = [says(None, Codec().decode(prompt), key) for prompt, key in zip(prompts, keys, strict=True)]
        tokens = [[*map(ord, text), 0] for text in texts]
        return [Sample(tokens=t, logp_sample=[-0.5] * len(t), logp_model=[-0.5] * len(t), stop="eos") for t in tokens]

    sampler = SimpleNamespace(sample=sample, rest=lambda: None)
    speaker = Speaker(sampler=sampler, params=None, codec=Codec(), max_context_tokens=20_000)
    (trajectory, _), (judged, _) = spend(FORGE, speaker, sandbox(), samples=2, turns=3)
    assert sources(trajectory) == list(STAGES) and len(trajectory.sequences) == 3 and len(judged.sequences) == 2
    used = Policy(speaker=speaker).usage(judged)
    assert used.answer_tokens == sum(len(turn.text) + 1 for turn in judged.turns) and used.prompt_tokens > 2 * len(TASK.reference)


@contextlib.contextmanager
def asked(fake, path, **limits):
    config = EndpointConfig(base_url=fake.base_url, model="m", api_key_env="", parallel=1, retries=0, price_in=1.0, price_out=2.0, **limits)
    with contextlib.closing(AnswerJournal(path)) as answers, Endpoint(config, answers) as endpoint:
        yield AskedSpeaker(endpoint=Listening(endpoint), max_tokens=1000, max_context_tokens=30_000)


def test_a_budget_that_ends_at_the_judge_leaves_the_sample_unfinished_and_a_larger_one_goes_on(tmp_path):
    config = dataclasses.replace(CONFIG, max_context_tokens=30_000)

    def work(speaker):
        trajectories, judged = spend(FORGE, speaker, sandbox(), turns=3, config=config)
        reasons = [Policy(speaker=speaker).unfinished(t) for t in trajectories]
        return [sources(t) for t in trajectories], reasons, [Policy(speaker=speaker).usage(t) for t in judged]

    with FakeEndpoint(lambda body, n: chat(says(None, body["messages"][-1]["content"], 0), usage=(900, 100))) as fake:
        with asked(fake, tmp_path / "whole.jsonl") as speaker:
            whole = work(speaker)
        assert whole[:2] == ([list(STAGES)], [""]) and len(fake.asked) == 5
        assert (whole[2][0].prompt_tokens, whole[2][0].answer_tokens, whole[2][0].cost) == (1800, 200, pytest.approx(2 * 1100 / 1e6))
        lengths = [len(body["messages"]) for body in fake.asked]
        assert lengths == [1] * 5, "every prompt is a conversation of its own"
        before, enough = len(fake.asked), estimate_tokens(fake.prompts[0]) + 1000 + 50  # for one question, not for two
        with asked(fake, tmp_path / "cut.jsonl", budget_tokens=enough) as speaker:
            found, reasons, _ = work(speaker)
        assert len(fake.asked) - before == 1 and reasons == [UNASKED] and found == [[STAGES[0]]], "the Judge could not be asked"
        with asked(fake, tmp_path / "cut.jsonl") as speaker:
            assert work(speaker) == whole
        assert len(fake.asked) == before + 5, "what was answered is not asked again"


def test_the_evaluation_counts_the_judges_messages_and_none_of_them_as_a_candidate(tmp_path):
    plan = Plan(tasks=(TASK,), samples=2, turns=3, chunk=1, seed=0, config=CONFIG, search=strategy.make(get_config().evaluation.search))
    assert not evaluate(Policy(speaker=ScriptedSpeaker(says)), sandbox(), plan, ResultsFile(tmp_path / RESULTS))
    for result in ResultsFile(tmp_path / RESULTS).results.values():
        assert sources(result.trajectory) == list(STAGES) and result.calls == (1, 2, 2)
        (judged,) = result.further
        assert [turn.form for turn in judged.turns] == ["json_in_tags"] * 2


# --- refusals -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"card": "h20"}, r"evaluation\.search\.card is 'h20': use one of 'h100', 'h200', 'a100', 'rtx4090', or ''"),
        ({"judge_tokens": -1}, r"evaluation\.search\.judge_tokens is -1"),
        ({"judge_tokens": 2.5}, r"evaluation\.search\.judge_tokens is 2\.5"),
        ({"judge_tokens": None}, r"evaluation\.search\.judge_tokens is None"),
    ],
)
def test_wrong_numbers_are_named(changes, reason):
    with pytest.raises(ValueError, match=reason):
        cudaforge.make({"card": "", "judge_tokens": 0} | changes)


def test_what_can_not_work_is_refused_before_anything_is_asked():
    speaker = ScriptedSpeaker(says)
    with pytest.raises(ValueError, match=r"evaluation\.search\.card is missing.*configs/cudaforge\.py"):
        cudaforge.make({"judge_tokens": 0})
    with pytest.raises(ValueError, match=r"'cudaforge' with style='compact'.*--config\.style=chat"):
        spend(FORGE, speaker, sandbox(), turns=1, config=dataclasses.replace(CONFIG, style="compact"))
    with pytest.raises(ValueError, match=r"judge_tokens=400 is more than rollout\.max_policy_tokens=100"):
        spend(FORGE, speaker, sandbox(), turns=1, config=dataclasses.replace(CONFIG, max_policy_tokens=100))
    assert not speaker.calls


def test_the_recipe_is_whole():
    cfg = get_config()
    check_config(cfg)
    search = strategy.make(cfg.evaluation.search)
    assert (search.name, search.spend, cfg.evaluation.turns, cfg.style) == ("cudaforge", CudaForge(card="h100", judge_tokens=0), 10, "chat")
