"""Skills rest, come back, are absorbed and retired by what they do; all of it is logged, exact and undone with its step."""

import dataclasses
import math

import numpy as np
import pytest

from dk_jax.sft.skill_topics import skill_catalogue
from dk_jax.skills.library import SkillLibrary
from dk_jax.skills.lifecycle import Lifecycle, LifecycleRules, Recent, posterior
from dk_jax.skills.likeness import Alike, likeness, runs
from dk_jax.skills.record import Evidence, Skill, SkillDraft

RULES = LifecycleRules(half_life_steps=50.0, rest_steps=10, most_rests=1)
CODE = {
    "tile": "for (int i = 0; i < n; i += 64) {\n  for (int j = i; j < i + 64; ++j) acc += a[j] * b[j];\n}\nout[0] = acc;",
    "unroll": "float s0 = 0, s1 = 0;\nwhile (k + 1 < n) { s0 += x[k]; s1 += x[k + 1]; k += 2; }\nreturn s0 + s1;",
}


def draft(name, code=None, idea="keep a tile in registers"):
    """`code`: of the example; by default some that is like no other name's."""
    rng = np.random.default_rng([ord(c) for c in name])
    code = code or "\n".join(f"{'+-*/%&|^'[a]}({'<>=!,.'[b]}{'[]{}:?'[c]}" for a, b, c in rng.integers(0, [8, 6, 6], (12, 3)))
    return SkillDraft(
        name=name, description="one line", scope="general", tags=("one", "two", "three"),
        content=f"Motivation: memory is slow\nKey Idea: {idea}\nExample:\n{code}",
    )  # fmt: skip


@pytest.fixture
def library(tmp_path):
    with SkillLibrary(tmp_path / "library.sqlite") as library:
        yield library


def add(library, name, **more):
    skill_id = library.propose(draft(name, **more), language="cpp")
    library.activate(skill_id)
    return skill_id


def run(library, lifecycle, step, uses=()):
    """One step: uses, review, commit."""
    for skill_id, use in uses:
        library.use(skill_id, **use)
    changes = lifecycle.review(library, step)
    library.commit(step)
    return [(change.name, change.status) for change in changes]


def test_the_posterior_is_the_conjugate_one():
    """Against a grid over theta and sigma^2."""
    rules = LifecycleRules(prior_effects=1.5, prior_sigma=0.3, verification_weight=0.0, least_gain=1.05)
    effects = [0.3, 0.1, 0.45, 0.2]
    recent = Recent(effects=4, total=sum(effects), squares=sum(e * e for e in effects))
    got = posterior(Skill.from_draft(draft("a")), recent, rules)
    theta, log_variance = np.meshgrid(np.linspace(-1.5, 1.5, 1201), np.linspace(np.log(1e-4), np.log(20), 900), indexing="ij")
    variance = np.exp(log_variance)
    log_p = -2.0 * log_variance - 0.09 / variance  # inverse gamma of shape 1 and scale 0.09
    log_p += -0.5 * log_variance - 0.5 * 1.5 * theta**2 / variance
    for effect in effects:
        log_p += -0.5 * log_variance - 0.5 * (effect - theta) ** 2 / variance
    p = np.exp(log_p + log_variance - log_p.max())
    weight = p.sum(axis=1) / p.sum()
    assert got.mean == pytest.approx((weight * theta[:, 0]).sum(), abs=2e-3)
    assert got.helps == pytest.approx(weight[theta[:, 0] > np.log(1.05)].sum(), abs=3e-3)
    below = np.cumsum(weight)
    assert (got.low, got.high) == (
        pytest.approx(theta[np.searchsorted(below, 0.025), 0], abs=0.01), pytest.approx(theta[np.searchsorted(below, 0.975), 0], abs=0.01),
    )  # fmt: skip


def test_verification_counts_as_a_few_old_effects():
    evidence = Evidence(step=0, tasks=("t",), device="cpu", rule="sequential", decision="accept", effect=1.5, n=8)
    skill = dataclasses.replace(Skill.from_draft(draft("a")), evidence=(evidence,))
    fresh, old = (posterior(skill, Recent(step=step), LifecycleRules()) for step in (0, 500))
    assert 0 < old.mean < fresh.mean < math.log(1.5) and fresh.helps > old.helps and fresh.effects == 0
    many = dataclasses.replace(skill, evidence=(evidence,) * 20)
    assert posterior(many, Recent(), LifecycleRules()).mean == pytest.approx(math.log(1.5) * 4 / 6)


def test_effects_halve_with_age_and_nothing_else_changes():
    recent = Recent(step=10).plus(4, 2, [0.5, -0.25]).at(60, 50.0)
    assert (recent.shown, recent.selected, recent.effects, recent.total, recent.squares) == (2, 1, 1, 0.125, (0.25 + 0.0625) / 2)


def test_a_harmful_skill_rests_gets_another_chance_and_is_retired(library):
    lifecycle, harmful, good = Lifecycle(RULES), add(library, "harmful"), add(library, "good")
    seen = {}
    library.commit(0)
    for step in range(1, 60):
        uses = [(one, dict(shown=1, selected=1, log_effects=[effect])) for one, effect in ((harmful, -0.4), (good, 0.3))]
        active = {skill.id for skill in library.active()} or {harmful, good}
        for change in run(library, lifecycle, step, [use for use in uses if use[0] in active]):
            seen.setdefault(change, []).append(step)
    # Four aged effects are there after five uses; a quarter of those and four more after its rest.
    assert seen == {("harmful", "dormant"): [5, 19], ("harmful", "active"): [15], ("harmful", "retired"): [19]}
    reasons = [logged.event.data["reason"] for logged in library.history(harmful) if logged.event.kind == "status"]
    assert "helps with probability" in reasons[1] and "rested for 10 steps" in reasons[2] and reasons[-1].endswith("after 1 rests")
    assert library.get("good").status == "active"


def test_few_measurements_decide_nothing(library):
    lifecycle, one = Lifecycle(RULES), add(library, "one")
    assert [run(library, lifecycle, step, [(one, dict(shown=1, selected=1, log_effects=[-0.9]))]) for step in range(3)] == [[], [], []]
    for step in range(3, 40):
        assert run(library, lifecycle, step) == []


def test_a_skill_that_is_shown_and_never_taken_rests(library):
    lifecycle, ignored, taken = Lifecycle(RULES), add(library, "ignored"), add(library, "taken")
    changes = []
    library.commit(0)
    for step in range(1, 20):
        uses = [(ignored, dict(shown=4)), (taken, dict(shown=4, selected=step % 5 == 0, log_effects=[0.0] * (step % 5 == 0)))]
        changes += run(library, lifecycle, step, uses)
        if changes:
            break
    assert changes == [("ignored", "dormant")] and 4 * step >= RULES.ignored_after > 4 * (step - 3)


def test_of_too_many_the_least_promising_rest_and_what_is_hardly_known_is_not_the_first(library):
    lifecycle = Lifecycle(dataclasses.replace(RULES, most_active=2, least_effects=50.0))
    ids = {name: add(library, name) for name in ("poor", "fine", "new")}
    library.use(ids["poor"], shown=9, selected=9, log_effects=[0.04, 0.06] * 6)
    library.use(ids["fine"], shown=9, selected=9, log_effects=[0.3, 0.34] * 6)
    assert run(library, lifecycle, 0) == [("poor", "dormant")]
    assert "3 skills are active" in library.history(ids["poor"])[-1].event.data["reason"]
    assert [run(library, lifecycle, step) for step in (1, 2)] == [[], []]


def test_one_idea_in_other_words_is_absorbed_by_the_better_skill(library):
    lifecycle = Lifecycle(RULES)
    renamed = CODE["tile"].replace("acc", "total").replace("64", "128").replace("out", "y") + "  // the same in other words"
    one, other = add(library, "one", code=CODE["tile"]), add(library, "other", code=renamed, idea="block the loop")
    third = add(library, "third", code=CODE["unroll"])
    library.use(one, shown=3, selected=2, log_effects=[0.05, 0.0])
    changes = run(library, lifecycle, 0, [(other, dict(shown=2, selected=2, log_effects=[0.4, 0.3])), (third, dict(shown=1))])
    assert changes == [("one", "retired")]
    better = library.get("other")
    assert better.parents == (one,) and (better.usage.shown, better.usage.selected, better.usage.effects) == (5, 4, 4)
    assert better.usage.log_effect_sum == pytest.approx(0.75) and library.get("one").status == "retired"
    assert lifecycle.posteriors(library, 0)["other"].effects == pytest.approx(4)
    assert run(library, lifecycle, 1) == []
    library.set_status(one, "active", "revived by hand")
    library.commit(2)
    assert [skill.name for skill in library.active()] == ["one", "other", "third"]


def test_a_process_that_starts_anew_and_a_step_that_is_done_again_decide_alike(tmp_path):
    rng = np.random.default_rng(0)
    effects = rng.normal([[-0.3], [0.0], [0.3]], 0.3, (3, 80))

    def played(path, *, again):
        with SkillLibrary(path) as library:
            ids = [add(library, name) for name in ("bad", "so_so", "good")]
            library.commit(0)
            lifecycle, step = Lifecycle(RULES), 1
            undone = {30, 55} if again else set()
            while step < 80:
                active = {skill.id for skill in library.active()}
                found = zip(ids, effects[:, step], strict=True)
                run(library, lifecycle, step, [(one, dict(shown=2, selected=1, log_effects=[float(e)])) for one, e in found if one in active])
                if step in undone:
                    undone.discard(step)
                    library.rollback_to(step - 7)
                    step -= 7
                    lifecycle = Lifecycle(RULES) if step > 40 else lifecycle
                step += 1
            return library.version, [skill.to_dict() for skill in library.skills()]

    assert played(tmp_path / "a.sqlite", again=False) == played(tmp_path / "b.sqlite", again=True)


def test_of_the_catalogue_no_two_subjects_are_one_idea_and_all_phrasings_of_one_are():
    topics = [[runs(phrasing) for phrasing in topic.phrasings] for topic in skill_catalogue()]
    for i, topic in enumerate(topics):
        assert all(likeness(topic[0], other) == 1 for other in topic)
        assert all(likeness(topic[0], other[0]) < LifecycleRules().alike for other in topics[:i])


def test_each_skill_is_held_against_those_that_it_may_be_like_and_gets_the_same_answer():
    rng, alike = np.random.default_rng(0), Alike(0.4)
    pieces = ["a = b + c;", "if (a < b) { c(); }", "for (;;) d[e] += f;", "return g ? h : 1;", "x(y, z)[w] = -1;"]
    skills = [
        dataclasses.replace(Skill.from_draft(draft("a", code="\n".join(rng.choice(pieces, 6)))), id=f"s{i}", language=("cpp", "triton")[i % 2])
        for i in range(40)
    ]
    for i, skill in enumerate(skills):
        degrees = {other.id: likeness(runs(skill), runs(other)) for other in skills[:i] if other.language == skill.language}
        assert alike.to(skill) == {name: pytest.approx(degree) for name, degree in degrees.items() if degree >= 0.4}
    assert any(alike.to(skill) for skill in skills)
    other = dataclasses.replace(skills[3], content=draft("new").content)  # its step was undone, and another skill has its number now
    assert alike.to(other) == {} and alike.to(other) == {}


def test_names_numbers_and_comments_are_no_part_of_an_idea_but_structure_is():
    one = runs(draft("a", code=CODE["tile"]))
    assert likeness(one, runs(draft("b", code=CODE["tile"].replace("a[j]", "left[at]").replace("j", "at").replace("64", "7")))) == 1
    assert likeness(one, runs(draft("c", code=CODE["tile"].replace("acc +=", "/* sum */ acc +=")))) == 1
    assert likeness(one, runs(draft("d", code=CODE["unroll"]))) < 0.3
    assert runs(draft("e", code="x = 1")) == frozenset() and likeness(frozenset(), frozenset()) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [({"half_life_steps": 0}, "half_life_steps is 0"), ({"most_rests": -1}, "most_rests is -1"), ({"dormant_below": 1.0}, "is a probability")],
)
def test_rules_that_make_no_sense_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        LifecycleRules(**change)
