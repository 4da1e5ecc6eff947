"""EvoEngineer: populations hold what they say, prompts carry what their technique says, and kernels get better by both."""

from __future__ import annotations

import dataclasses
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.evoengineer import get_config
from dk_jax.agents import policy
from dk_jax.rollout.episode import task_view
from dk_jax.search import evoengineer, strategy
from dk_jax.search.evoengineer import EvoEngineer, Evolution
from dk_jax.search.evoengineer_population import Individual, Population, migrate
from dk_jax.search.evoengineer_prompts import Carried, fitted, render
from dk_jax.train.checks import check_config
from tests.dk_jax.scripted_search import CONFIG, OTHER, SKILL, TASK, ScriptedJudge, ScriptedSpeaker, message, right, spend, wrong

VIEW = task_view(TASK, language="cuda", form="module")
PAPER = dict(size=5, islands=3, initial=5, generation=4, migrate_every=3, insights=3, elites_shown=1)
VARIANTS = [(technique, population) for technique in ("free", "insight", "full") for population in ("single", "elites", "islands")]


def engineer(technique="full", population="elites", **changes) -> EvoEngineer:
    return EvoEngineer(technique=technique, population=population, **(PAPER | changes))


def individual(speedup: float, born: int, *, source: str = "", insight: str = "", **fields) -> Individual:
    return Individual(source=source or f"class ModelNew: k{born}", verdict=right(speedup, **fields), insight=insight, born=born)


def kernels(prompt: str) -> list[str]:
    """Sources of the kernels that a prompt shows, in its order."""
    return re.findall(r"^class ModelNew: \S+", prompt, re.MULTILINE)


# --- populations ----------------------------------------------------------------------------------------------------------------------

newborn = st.tuples(st.integers(0, 9), st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0]))


@given(st.lists(newborn, max_size=30), st.integers(1, 6))
def test_a_population_is_the_best_of_all_that_ever_joined(trials, size):
    population, known = Population(size), {}
    for born, (text, speedup) in enumerate(trials):
        one = individual(speedup, born, source=f"k{text}")
        known.setdefault(one.source, one)
        population.add(one)
        assert len(population.individuals) <= size and population.seen == list(known.values())
        assert population.individuals == sorted(known.values(), key=lambda one: (-one.verdict.speedup, one.born))[:size]


def test_a_kernel_that_failed_is_no_individual_and_one_whose_speed_does_not_count_is_the_last():
    with pytest.raises(ValueError, match=r"trial 3 failed \(incorrect\)"):
        Individual(source="k", verdict=wrong("max err"), insight="", born=3)
    population = Population(2)
    for one in (individual(9.0, 0, speed_rewarded=False), individual(0.5, 1), individual(0.5, 2)):
        population.add(one)
    assert [one.born for one in population.individuals] == [1, 2]


@given(st.lists(st.lists(newborn, max_size=6), min_size=1, max_size=4), st.integers(1, 3))
def test_the_best_of_each_island_joins_the_next_ones(born, size):
    islands = [Population(size) for _ in born]
    for i, (island, trials) in enumerate(zip(islands, born, strict=True)):
        for number, (text, speedup) in enumerate(trials):
            island.add(individual(speedup, 10 * number + i, source=f"island {i} text {text}"))
    before = [list(island.individuals) for island in islands]
    migrate(islands)
    for i, island in enumerate(islands):
        guests = before[i - 1][:1]
        wanted = sorted({one.source: one for one in (*before[i], *guests)}.values(), key=lambda one: (-one.fitness, one.born))[:size]
        assert island.individuals == wanted


def test_parents_are_distinct_and_the_better_ones_more_often():
    population = Population(4)
    for born, speedup in enumerate((1.0, 4.0, 2.0, 3.0)):
        population.add(individual(speedup, born))
    firsts = [population.draw(2, random.Random(seed)) for seed in range(600)]
    assert firsts == [population.draw(2, random.Random(seed)) for seed in range(600)] and all(a != b for a, b in firsts)
    counts = [sum(pair[0] == one for pair in firsts) for one in population.individuals]
    assert counts == sorted(counts, reverse=True) and 180 < counts[0] < 300 > 100 > counts[3] > 30, "shares of 0.4, 0.3, 0.2 and 0.1"
    assert len(population.draw(9, random.Random(0))) == 4 and Population(1).draw(2, random.Random(0)) == []


# --- prompts --------------------------------------------------------------------------------------------------------------------------

SLOW, FAST, BEST = (
    individual(1.2, 3, insight="reads rows twice"), individual(1.5, 4, insight="keeps rows in registers", feedback="bound by latency"),
    individual(2.0, 7, insight="loads four at once"),
)  # fmt: skip
LESSON = individual(1.1, 1, insight="threads of a warp\nshare a row")
FULL = Carried(skills=(SKILL,), parents=(FAST, SLOW), elites=(BEST,), insights=(LESSON,))


def test_free_carries_task_and_parent_alone():
    prompt = render(VIEW, Carried(parents=(FAST,)), technique="free")
    told = [policy.Attempt(source=FAST.source, summary="", verdict=FAST.verdict)]
    assert prompt == policy.render_first(VIEW, style="chat", attempts=told) and "registers" not in prompt and "two or three sentences" not in prompt
    assert render(VIEW, Carried(), technique="free") == policy.render_first(VIEW, style="chat")


def test_insight_carries_what_was_said_as_well():
    prompt = render(VIEW, Carried(parents=(FAST,), insights=(LESSON,)), technique="insight")
    assert kernels(prompt) == [FAST.source] and "Your summary: keeps rows in registers" in prompt and "two or three sentences" in prompt
    assert "- 1.10x the speed of PyTorch eager: threads of a warp share a row" in prompt and "## This trial" not in prompt
    uncounted = dataclasses.replace(LESSON, verdict=right(5.0, speed_rewarded=False))
    assert "- right, speed not counted: threads" in render(VIEW, Carried(insights=(uncounted,)), technique="insight")


def test_full_carries_elites_too_and_says_which_attempts_to_combine_or_change():
    prompt = render(VIEW, FULL, technique="full")
    assert kernels(prompt) == [SLOW.source, FAST.source, BEST.source], "slowest first"
    assert prompt.endswith("## This trial\nCombine attempts 2 and 1: one kernel with what makes each of them fast.")
    alone = render(VIEW, dataclasses.replace(FULL, parents=(SLOW,)), technique="full")
    assert kernels(alone) == [SLOW.source, BEST.source] and "Change attempt 1 substantially" in alone
    assert f"### Skill {SKILL.name}" in prompt and "Insights" in prompt


def test_what_does_not_fit_is_left_out_in_the_order_of_its_worth():
    carried, forms = FULL, []
    while carried is not None:
        forms.append(render(VIEW, carried, technique="full"))
        carried = carried.less()
    gone = [BEST.source, "## Insights", SLOW.source, f"### Skill {SKILL.name}", "bound by latency", FAST.source]
    assert [[part in form for part in gone] for form in forms] == [[False] * n + [True] * (6 - n) for n in range(7)]
    assert forms == sorted(forms, key=len, reverse=True) and forms[-1] == render(VIEW, Carried(), technique="full")
    for form in forms:
        assert fitted(VIEW, FULL, technique="full", fits=lambda prompt, most=len(form): len(prompt) <= most) == form
    assert fitted(VIEW, FULL, technique="full", fits=lambda prompt: False) == forms[-1]
    failed = Carried(skills=(SKILL,), failure=wrong("max abs err 3.0"))
    less = failed.less()
    assert less.failure is None and less.skills == (SKILL,) and less.less().skills == () and less.less().less() is None


# --- evolutions -----------------------------------------------------------------------------------------------------------------------


def level(source: str) -> int:
    return int(re.findall(r"v(\d+)", source)[0])


def climbs(trajectory, prompt, seed):
    """One better than the fastest kernel in sight, with the number of the trial in it; every third trial fails."""
    trial, seen = len(trajectory.turns), kernels(prompt)
    bad = "broken_" if trial % 3 == 2 else ""
    best = 1 + max(map(level, seen), default=0)
    return message(f"class ModelNew: {bad}v{best}_t{trial}", f"said in trial {trial}")


def verdict(source):
    return wrong("max abs err 3.0") if "broken" in source else right(float(level(source)))


def run(strategy_, turns=13, says=climbs, **fields):
    speaker, judge = ScriptedSpeaker(says, room=fields.pop("room", 10**9)), ScriptedJudge(verdict)
    trajectories, further = spend(strategy_, speaker, judge, turns=turns, **fields)
    assert not further
    return speaker, judge, trajectories


@pytest.mark.parametrize(("technique", "population"), VARIANTS)
def test_every_variant_climbs_and_never_shows_a_kernel_that_failed(technique, population):
    search = engineer(technique, population, initial=2, generation=1, size=3, islands=2, migrate_every=2)
    speaker, judge, trajectories = run(search, turns=16, samples=2, tasks=(TASK, OTHER))
    assert [len(call) for call in speaker.calls] == [4] * 16 and [len(sources) for _, sources, _ in judge.calls] == [4] * 16
    assert [phase for phase, *_ in judge.calls] == [f"eval/turn{i}" for i in range(16)]
    for prompt in speaker.prompts:
        assert not any("broken" in source for source in kernels(prompt)) and "secret" not in prompt
        assert ("Insights" in prompt or "Your summary" in prompt) <= (technique != "free") and ("This trial" in prompt) <= (technique == "full")
        most = {"free": 1, "insight": 1, "full": {"single": 1}.get(population, 3)}[technique]
        assert len(kernels(prompt)) == len(set(kernels(prompt))) <= most
    for t in trajectories:
        assert len(t.turns) == len(t.rewards) == 16 and t.best.verdict.speedup >= 4.0
    again = run(search, turns=16, samples=2, tasks=(TASK, OTHER))
    assert again[0].calls == speaker.calls and again[2] == trajectories


def test_the_single_best_is_always_the_parent():
    speaker, _, (trajectory,) = run(engineer("free", "single", initial=1, generation=1), turns=10)
    best, wanted = None, []
    for turn in trajectory.turns:
        wanted.append([best] if best else [])
        if turn.verdict.correct and (best is None or turn.verdict.speedup > level(best)):
            best = turn.source
    assert [kernels(prompt) for prompt in speaker.prompts] == wanted and trajectory.best.verdict.speedup == 7.0


def test_trials_of_a_generation_see_the_population_of_its_beginning():
    speaker, _, (trajectory,) = run(engineer("free", "single", initial=3, generation=4), turns=11)
    seen = [kernels(prompt) for prompt in speaker.prompts]
    first, second = ["class ModelNew: v1_t0"], ["class ModelNew: v2_t3"]
    assert seen == [[]] * 3 + [first] * 4 + [second] * 4


def test_insights_are_of_all_right_kernels_and_fewer_than_there_are():
    speaker, _, _ = run(engineer("insight", "single", initial=1, generation=1, insights=2), turns=12)
    told = [re.findall(r"said in trial (\d+)", prompt.partition("## Insights")[2]) for prompt in speaker.prompts]
    assert [len(lines) for lines in told] == [0, 0, 1, 1, 2, *[2] * 7] and not {"2", "5", "8"} & {n for lines in told for n in lines}
    assert len({n for lines in told for n in lines}) > 2, "drawn, not always the same"
    for prompt, lines in zip(speaker.prompts, told, strict=True):
        own = re.findall(r"Your summary: said in trial (\d+)", prompt)
        assert not set(own) & set(lines), "none twice"
    none = run(engineer("insight", "single", initial=1, generation=1, insights=0), turns=5)[0]
    assert not any("## Insights" in prompt for prompt in none.prompts)


def test_full_combines_and_changes_in_turn():
    speaker, _, _ = run(engineer("full", "elites", initial=5, generation=1), turns=13)
    moves = [re.findall(r"## This trial\n(\w+)", prompt) for prompt in speaker.prompts]
    assert moves == [[]] * 5 + [["Combine"], ["Change"]] * 4


def test_islands_keep_to_themselves_until_they_migrate():
    """Each trial's kernel tells its island; with two islands and generations of two, migration is before trial 2 + 2 * 2 = 6."""

    def settle(trajectory, prompt, seed):
        trial = len(trajectory.turns)
        return message(f"class ModelNew: v{trial + 1}_island{trial % 2}")

    search = engineer("full", "islands", islands=2, initial=2, generation=2, migrate_every=2, elites_shown=5)
    speaker, _, _ = run(search, turns=8, says=settle)
    seen = [{source[-1] for source in kernels(prompt)} for prompt in speaker.prompts]
    assert seen == [set(), set(), {"0"}, {"1"}, {"0"}, {"1"}, {"0", "1"}, {"0", "1"}]
    apart = run(dataclasses.replace(search, migrate_every=100), turns=8, says=settle)[0]
    assert [{source[-1] for source in kernels(prompt)} for prompt in apart.prompts[6:]] == [{"0"}, {"1"}]


@pytest.mark.parametrize("technique", ["free", "insight", "full"])
def test_as_long_as_nothing_is_right_trials_begin_from_scratch_and_all_but_free_are_told_the_newest_failure(technique):
    def fails(trajectory, prompt, seed):
        trial = len(trajectory.turns)
        return "no code" if trial == 3 else message(f"class ModelNew: {'broken_' if trial < 5 else ''}v1_t{trial}")

    speaker, _, (trajectory,) = run(engineer(technique, "single", initial=2, generation=1), turns=7, says=fails)
    assert [t.verdict.outcome for t in trajectory.turns] == ["incorrect"] * 3 + ["no_kernel", "incorrect", "ok", "ok"]
    assert [kernels(prompt) for prompt in speaker.prompts] == [[]] * 6 + [["class ModelNew: v1_t5"]]
    told = [re.findall(r"A trial before yours failed\nVerdict: ([\w ]+)\.", prompt) for prompt in speaker.prompts]
    assert told == [[]] * 7 if technique == "free" else [[], [], ["incorrect"], ["incorrect"], ["no kernel"], ["incorrect"], []]


def test_seeds_of_other_samples_draw_other_parents():
    searched = engineer("free", "elites", initial=8, generation=1, size=8)
    flat = run(searched, turns=16, samples=2, says=lambda t, prompt, seed: message(f"class ModelNew: v1_t{len(t.turns)}"))[0]
    drawn = [[kernels(call[sample]) for call in flat.calls[8:]] for sample in (0, 1)]
    assert drawn[0] != drawn[1] and len({source for sources in drawn[0] for source in sources}) > 2


def test_skills_are_in_every_prompt_and_trials_may_go_untimed_and_a_task_without_room_is_a_hole():
    speaker, judge, _ = run(engineer("free", "single", initial=1, generation=1), turns=3, skills=(SKILL,), timed=False)
    assert all(f"### Skill {SKILL.name}" in prompt for prompt in speaker.prompts) and not any(timed for *_, timed in judge.calls)
    _, judge, (hole,) = run(engineer(), turns=3, room=1500)
    assert hole.turns == [] and not any(sources for _, sources, _ in judge.calls)


def test_a_generation_that_has_not_ended_is_not_in_the_population():
    evolution, trajectory = Evolution(1, 5), run(engineer("free", "single", initial=1, generation=1), turns=1)[2][0]
    evolution.hand_in(trajectory.turns[0], trial=0, island=0)
    assert not evolution.islands[0].individuals
    evolution.end_generation()
    evolution.end_generation()
    assert [one.insight for one in evolution.islands[0].individuals] == ["said in trial 0"]


# --- refusals and the recipe ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"technique": "fre"}, r"evaluation\.search\.technique is 'fre': use one of 'free', 'insight', 'full'"),
        ({"population": "many"}, r"evaluation\.search\.population is 'many': use one of 'single', 'elites', 'islands'"),
        ({"size": 0}, r"evaluation\.search\.size is 0"),
        ({"initial": 0}, r"evaluation\.search\.initial is 0"),
        ({"generation": 1.5}, r"evaluation\.search\.generation is 1\.5"),
        ({"insights": -1}, r"evaluation\.search\.insights is -1"),
        ({"elites_shown": True}, r"evaluation\.search\.elites_shown is True"),
    ],
)
def test_wrong_numbers_are_named(changes, reason):
    with pytest.raises(ValueError, match=reason):
        evoengineer.make({"technique": "full", "population": "elites", **PAPER} | changes)


def test_what_can_not_work_is_refused_before_anything_is_asked():
    with pytest.raises(ValueError, match=r"evaluation\.search\.population is missing.*configs/evoengineer\.py"):
        evoengineer.make({"technique": "full", **PAPER})
    speaker = ScriptedSpeaker(climbs)
    with pytest.raises(ValueError, match=r"'evoengineer' with style='compact'.*--config\.style=chat"):
        spend(engineer(), speaker, ScriptedJudge(verdict), turns=1, config=dataclasses.replace(CONFIG, style="compact"))
    assert not speaker.calls


def test_the_recipe_is_whole_and_its_first_prompt_is_the_one_that_is_looked_at_beforehand():
    cfg = get_config()
    check_config(cfg)
    search = strategy.make(cfg.evaluation.search)
    assert (search.name, search.spend, cfg.evaluation.turns, cfg.style) == ("evoengineer", engineer(), 45, "chat")
    speaker = run(search.spend, turns=1, config=dataclasses.replace(CONFIG, context=cfg.rollout.context))[0]
    assert speaker.prompts == [policy.render_first(VIEW, style="chat", summarise=cfg.rollout.context == "kernels")]
