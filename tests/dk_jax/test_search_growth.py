"""A library that grows while it is evaluated with: what a chunk teaches is on offer to the next, once, wherever the command is killed."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from configs.demo import get_config
from dk_jax.evaluation import harness, policies
from dk_jax.evaluation.harness import Plan, VerdictJournal, evaluate, remember_settings, settings_of, summary_of
from dk_jax.evaluation.policies import OUT_OF_BUDGET, Policy
from dk_jax.evaluation.results import RESULTS, ResultsFile
from dk_jax.evaluation.results_table import table
from dk_jax.interop.endpoint import EndpointConfig
from dk_jax.rollout.episode import task_view
from dk_jax.rollout.verify import Verifier
from dk_jax.search import strategy
from dk_jax.search.growth import LIBRARY, Growth
from dk_jax.skills.library import SkillLibrary
from dk_jax.skills.record import Skill
from dk_jax.tasks.builtin import builtin_suite
from dk_jax.train import setup
from tests.dk_jax.fake_endpoint import FakeEndpoint, chat
from tests.dk_jax.spoken_kernels import BelievingClient, SayingSpeaker, believing_judge, kernel
from tests.end_to_end.scripted import Killed

TASKS = tuple(builtin_suite("cpu").held_out[:3])
OLD = Skill(name="old_skill", description="about rows", scope="general", tags=("a", "b", "c"), content="Key Idea: old_skill", status="candidate")
FEW = 20


def draft(name: str, idea: str) -> dict:
    return {
        "name": name, "description": f"about {idea}", "scope": "general", "tags": ["threads", idea, "loops"],
        "content": f"Motivation: slow {idea}.\nKey Idea: {idea} together.\nExample: for (long {name} = 0; {name} < n; ++{name}) {{ }}",
    }  # fmt: skip


def say(t, prompt, seed):
    """Kernels get faster by a second turn. Of the two skills that each task teaches only the first makes a kernel faster."""
    if t.agent == "selection":
        offered = [line.split(" | ")[0] for line in prompt.split("\nskills:\n")[-1].splitlines() if " | " in line]
        return json.dumps({"select": [name for name in offered if name.startswith("helps")][:1]})
    if t.agent == "summary":
        number = [task.name for task in TASKS].index(t.task)
        return json.dumps({"add": [draft(f"helps_{number}", f"lanes{number}"), draft(f"idles_{number}", f"ghosts{number}")]})
    helped = "lanes" in prompt or any(name.startswith("helps") for name in t.skills)
    speed = (4.0 if helped else 2.0) if t.turns else (3.0 if helped else 1.0)
    return kernel(speed, f"seed {seed % 100_000}")


@pytest.fixture(scope="module")
def cfg():
    c = get_config()
    c.skills.update(dict(looks=2, pairs_per_look=2, max_triggers=1))
    c.rollout.update(dict(summaries=1, headers=9))
    c.tasks.update(dict(generated=0, rl_fresh=0, rl_checked=0))
    return c


def plan_of(cfg, **fields):
    search = strategy.make(dict(name="turns", grow=True))
    config = setup.rollout_config(cfg)
    return Plan(**(dict(tasks=TASKS, samples=1, turns=2, chunk=1, seed=0, config=config, skills=(OLD,), search=search) | fields))


def work(cfg, folder, policy, client, *, plan=None, facts=None, wrap=None):
    """One start of the command."""
    plan = plan or plan_of(cfg)
    folder.mkdir(exist_ok=True)
    remember_settings(folder, settings_of(cfg, plan, policy=facts or {"policy": "test"}, split="held_out", library={}))
    journal = VerdictJournal(folder / harness.VERDICTS)
    with SkillLibrary(folder / LIBRARY) as library:
        growth = Growth(library=library, verifier=Verifier.from_config(cfg, setup.load_tasks(cfg).siblings))
        growth.begin(plan.skills)
        if wrap:
            wrap(growth)
        try:
            return evaluate(policy, believing_judge(client, journal), plan, ResultsFile(folder / RESULTS), growth=growth)
        finally:
            journal.close()


def spoken(room=1_000_000):
    speaker = SayingSpeaker(say, room=room)
    return Policy(speaker=speaker, greedy=speaker)


def state(folder):
    """All that is to be the same however often the command was killed."""
    results = [r.to_dict() for r in ResultsFile(folder / RESULTS, read_only=True).results.values()]
    with SkillLibrary(folder / LIBRARY) as library:
        return results, library.version, [(s.name, s.status) for s in library.skills()], library.step


@pytest.fixture(scope="module")
def whole(cfg, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "e"
    policy, client = spoken(), BelievingClient()
    assert not work(cfg, folder, policy, client)
    return folder, policy.speaker, client


def test_what_a_chunk_teaches_is_proved_and_on_offer_to_the_next(whole):
    folder, speaker, client = whole
    results, _, skills, step = state(folder)
    assert skills[:3] == [("old_skill", "active"), ("helps_0", "active"), ("idles_0", "rejected")] and step == 3
    assert [len(r["trajectory"]["skills"]) for r in results] == [0, 1, 1] and results[1]["trajectory"]["skills"] == ("helps_0",)
    offered = [re.findall(r"^(\w+) \|", prompt, re.MULTILINE) for agent, _, prompt in speaker.asked if agent == "selection"]
    assert [set(names) for names in offered] == [{"old_skill"}, {"old_skill", "helps_0"}, {"old_skill", "helps_0", "helps_1"}]
    assert [[turn["verdict"]["speedup"] for turn in r["trajectory"]["turns"]] for r in results] == [[1.0, 2.0], [3.0, 4.0], [3.0, 4.0]]
    summary = summary_of(folder, resamples=FEW)
    growth = summary["growth"]
    assert (growth["offered"], growth["chunks"], growth["of"]) == (1, 3, 3) and not summary["partial"]
    assert growth["steps"][0] == {"proposed": 2, "accepted": 1, "active": 2} and growth["proposed"] == len(skills) - 1
    assert growth["accepted"] == growth["active"] - 1 == 3 and client.verified
    assert "library: 1 skills at the beginning; " in table(summary) and "are active after 3 of 3 chunks" in table(summary)
    assert json.loads((folder / "settings.json").read_text())["growth"]["verification"] == "paired"


@pytest.mark.parametrize("kill_at", [0, 1, 2, 5, 17, 19])
def test_killed_at_any_verdict_nothing_is_doubled_and_nothing_lost(cfg, whole, tmp_path, kill_at):
    folder, _, client = whole
    with pytest.raises(Killed):
        work(cfg, tmp_path / "e", spoken(), first := BelievingClient(kill_at))
    assert summary_of(tmp_path / "e", resamples=FEW)["partial"]
    assert not work(cfg, tmp_path / "e", spoken(), second := BelievingClient())
    assert state(tmp_path / "e") == state(folder)
    again = len(first.judged) + len(second.judged) - len(client.judged)
    assert 0 <= again < 16, "only the arms of a verification that was cut short are judged again"
    assert not work(cfg, tmp_path / "e", spoken(), third := BelievingClient()) and not third.judged


@pytest.mark.parametrize("seam", ["before", "after"])
def test_killed_between_results_and_library_the_next_start_learns_from_the_file(cfg, whole, tmp_path, seam):
    def dies(growth):
        commit = growth.library.commit

        def killed(step):
            if step == 2:
                if seam == "after":
                    commit(step)
                raise Killed
            return commit(step)

        growth.library.commit = killed

    with pytest.raises(Killed):
        work(cfg, tmp_path / "e", spoken(), first := BelievingClient(), wrap=dies)
    found = summary_of(tmp_path / "e", resamples=FEW)
    assert found["samples"]["there"] == 2 and found["growth"]["chunks"] == (1 if seam == "before" else 2)
    assert not work(cfg, tmp_path / "e", policy := spoken(), second := BelievingClient())
    assert state(tmp_path / "e") == state(whole[0]) and sorted(first.judged + second.judged) == sorted(whole[2].judged)
    asked = [(agent, task) for agent, task, _ in policy.speaker.asked]
    assert ("selection", TASKS[1].name) not in asked, "what is in the file is not asked for again"


def test_a_library_that_is_lost_is_grown_again_from_the_results(cfg, whole, tmp_path):
    work(cfg, tmp_path / "e", spoken(), BelievingClient())
    for path in (tmp_path / "e").glob(f"{LIBRARY}*"):
        path.unlink()
    assert summary_of(tmp_path / "e", resamples=FEW)["partial"]
    work(cfg, tmp_path / "e", spoken(), client := BelievingClient())
    assert state(tmp_path / "e") == state(whole[0]) and not client.judged


def test_a_plan_and_its_library_go_together_and_the_beginning_is_remembered(cfg, whole, tmp_path):
    with pytest.raises(ValueError, match="evaluation.search.grow=True, but the evaluation has no library that grows"):
        evaluate(spoken(), believing_judge(BelievingClient()), plan_of(cfg), ResultsFile(tmp_path / RESULTS))
    with pytest.raises(harness.SettingsError, match="skills: now without old_skill"):
        work(cfg, whole[0], spoken(), BelievingClient(), plan=plan_of(cfg, skills=()))
    with pytest.raises(harness.SettingsError, match="search.grow: True -> False"):
        remember_settings(
            whole[0], settings_of(cfg, plan_of(cfg, search=strategy.Search()), policy={"policy": "test"}, split="held_out", library={})
        )


def test_a_library_grows_with_any_way_to_spend_turns(cfg, tmp_path):
    block = dict(name="memory", window=2, latest=False, plain=0, grow=True)
    plan = plan_of(cfg, search=strategy.make(block), turns=3)
    assert not work(cfg, tmp_path / "e", spoken(), BelievingClient(), plan=plan)
    assert state(tmp_path / "e")[2][1] == ("helps_0", "active")


# --- an endpoint ----------------------------------------------------------------------------------------------------------------------


def ask(cfg, folder, fake, client, *, budget_tokens=None):
    own = cfg.copy_and_resolve_references()
    own.style = "chat"
    config = dataclasses.replace(setup.rollout_config(own), max_context_tokens=16_384)
    plan = plan_of(own, config=config, skills=(), tasks=TASKS[:2])
    endpoint = EndpointConfig(base_url=fake.base_url, model="m", api_key_env="", parallel=1, retries=0, budget_tokens=budget_tokens)
    views = {task.name: task_view(task, language="cpp", form="kernel") for task in TASKS}
    described = policies.describe("endpoint", own, TASKS, views, endpoint=endpoint)
    folder.mkdir(exist_ok=True)
    with policies.opened(described, own, TASKS, views, config=config, workdir=folder) as policy:
        return work(own, folder, policy, client, plan=plan, facts=described.facts)


def answer(body, number):
    prompt = body["messages"][0]["content"]
    first = len(body["messages"]) == 1 and "Your attempts so far" not in prompt
    if "Choose the optimisation skills" in prompt:
        chosen = [{"name": name, "reason": "it helps"} for name in re.findall(r"helps_\d", prompt)[:1]]
        return chat(f'<tool_call>\n{json.dumps({"name": "select_skills", "arguments": {"skills": chosen}})}\n</tool_call>')
    if "was improved. Say what is worth knowing" in prompt:
        task = next(i for i, task in enumerate(TASKS) if f"## Task {task.name}\n" in prompt)
        skills = [draft(f"helps_{task}", f"lanes{task}")]
        return chat(f'<tool_call>\n{json.dumps({"name": "add_skills", "arguments": {"skills": skills}})}\n</tool_call>')
    helped = "lanes" in prompt
    return chat(f"```cpp\n{kernel((3.0 if helped else 1.0) if first else (4.0 if helped else 2.0), f'number {number}')}\n```")


def test_an_endpoint_whose_budget_ends_anywhere_goes_on_and_pays_for_nothing_twice(cfg, tmp_path):
    with FakeEndpoint(answer) as fake:
        assert not ask(cfg, tmp_path / "whole", fake, BelievingClient())
        whole, asked = state(tmp_path / "whole"), len(fake.asked)
    assert [name for name, status in whole[2] if status == "active"][0] == "helps_0" and whole[3] == 2
    assert whole[0][1]["further"] and whole[0][1]["calls"] == (2, 1), "the choice of skills is counted with the first turn"
    with FakeEndpoint(answer) as fake:
        for budget, ends in ((500, "in the first chunk"), (2000, "in what it teaches"), (3100, "in the second"), (99_000, "")):
            left = ask(cfg, tmp_path / "e", fake, BelievingClient(), budget_tokens=budget)
            assert bool(left[OUT_OF_BUDGET]) == bool(ends) == summary_of(tmp_path / "e", resamples=FEW)["partial"], ends
        assert len(fake.asked) == asked
    again = state(tmp_path / "e")
    assert again[2:] == whole[2:] and [r["trajectory"]["skills"] for r in again[0]] == [r["trajectory"]["skills"] for r in whole[0]]
