"""What `credit.assign` and `microbatches` make of all that can happen in a small step: its expectation against the exact policy gradient.

Messages are single tokens, and a token's id is its place in one flat table of logits that all agents share, so that rows can be scored
as they come out. What dk_jax.rl alone does is proved in test_policy_gradient; here it is who is compared with whom, what is dropped, and
what the rest then weighs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from dk_jax.rl.losses import clipped_policy_loss
from dk_jax.rollout.episode import StepRollouts, triggers
from dk_jax.rollout.trajectory import Trajectory, Turn, Verdict
from dk_jax.rollout.verify import Proposal
from dk_jax.skills.record import SkillDraft
from dk_jax.skills.verification import Decision
from dk_jax.train.batch import microbatches
from dk_jax.train.credit import CreditConfig, assign

PROMPT = 1
"""A token that nobody samples."""


class Table:
    """Choices, each a group of places in a flat table of logits, drawn at random."""

    def __init__(self, seed: int):
        self.rng, self.logits, self.members = np.random.default_rng(seed), [0.0, 0.0], {}

    def choice(self, name: str, size: int) -> None:
        start = len(self.logits)
        self.logits += self.rng.normal(size=size).tolist()
        self.members[name] = np.arange(start, start + size)

    def probability(self, name: str) -> np.ndarray:
        z = np.exp(np.array(self.logits)[self.members[name]])
        return z / z.sum()

    def score(self, token: int) -> np.ndarray:
        """Derivative of log p(token) in the table's logits."""
        out = np.zeros(len(self.logits))
        name = next(n for n, places in self.members.items() if token in places)
        out[self.members[name]] = -self.probability(name)
        out[token] += 1.0
        return out

    def logp(self, token: int) -> float:
        name = next(n for n, places in self.members.items() if token in places)
        return float(np.log(self.probability(name)[token - self.members[name][0]]))

    def trajectory(self, agent: str, task: str, group: str, turns: list[Turn], tokens: list[int], **fields) -> Trajectory:
        t = Trajectory(agent=agent, task=task, group=group, **fields)
        for turn, token in zip(turns, tokens, strict=True):
            t.append_prompt([PROMPT])
            t.append_sample([token], [self.logp(token)])
            t.turns.append(turn)
            if turn.verdict is not None:
                t.rewards.append(turn.reward)
        return t


def judged(reward: float, speedup: float = 1.0) -> Turn:
    verdict = Verdict(outcome="ok", stage="timed", reward=reward, speedup=speedup, noisy=False, coverage=1.0, feedback="")
    return Turn(text="", stop="eos", source="k", verdict=verdict, reward=reward)


def config(**changes) -> CreditConfig:
    numbers = dict(gamma=1.0, min_group_std=1e-6, format_penalty=0.25, summary_cap=2.5, weights=(0.3, 1.0, 0.5), loss_scale=5.0)
    return CreditConfig(**{**numbers, **changes})


def expected_update(table: Table, happens: Iterator[tuple[float, StepRollouts]], how: CreditConfig) -> np.ndarray:
    """Sum over outcomes of probability * (minus the derivative of the joint loss); every token stands at ratio 1."""
    scores = np.stack([table.score(t) if t > 1 else np.zeros(len(table.logits)) for t in range(len(table.logits))])
    total, mass = np.zeros(len(table.logits)), 0.0
    for probability, rollouts in happens:
        mass += probability
        rows, _ = assign(rollouts, config=how, seed=0, step=0)
        for batch in microbatches(rows, size=8, step=8):
            logp, advantage, mask = batch["old_logp"], batch["advantage"], batch["mask"]
            # At ratio 1 the derivative of a token's loss in its log-prob is the loss itself.
            loss, _ = clipped_policy_loss(logp, logp, advantage, mask)
            weighted = np.asarray(loss) * batch["weight"][:, None]
            total -= probability * np.einsum("bt,btv->v", weighted, scores[batch["tokens"][:, 1:]])
    assert mass == pytest.approx(1.0)
    return total


# --- three agents ---------------------------------------------------------------------------------------------------

SKILLS = ("", "a", "b")  # what a selection's tokens choose; the third can't be read
K = 1
FIRST, SECOND = np.array([[0.2, 1.1], [0.9, 0.4], [0.2, 1.1]]), np.array([[1.5, 0.3], [0.8, 2.2], [1.5, 0.3]])  # [skill, token]
EFFECT, ACCEPTED = (1.4, 4.0), (0.7, 0.35)  # of the summary's two skills; its third token can't be read


def three_agents() -> Table:
    table = Table(3)
    table.choice("selection", 3)
    for skill in (0, 1):
        table.choice(f"first{skill}", 2)
        for token in (0, 1):
            table.choice(f"second{skill}{token}", 2)
    table.choice("summary", 3)
    return table


def skill_of(choice: int) -> int:
    return choice % 2  # a broken call, token 2, leads to no skill


def steps_of_three_agents(table: Table) -> Iterator[tuple[float, StepRollouts]]:
    """k = 1 selection and the null scheme, one rollout of two turns each, two summaries of the first task that earned them."""
    p = table.probability
    for choice, a, b, c, d in itertools.product(range(3), *[range(2)] * 4):
        chosen = table.trajectory(
            "selection", "t", "t", [Turn(text="", stop="eos", error="broken" if choice == 2 else "")],
            [table.members["selection"][choice]], scheme=0,
        )  # fmt: skip
        probability, rollouts = p("selection")[choice], []
        for scheme, skill, one, two in ((0, skill_of(choice), a, b), (1, 0, c, d)):
            names = f"first{skill}", f"second{skill}{one}"
            probability *= p(names[0])[one] * p(names[1])[two]
            speeds = FIRST[skill, one], SECOND[skill, two]
            tokens = [table.members[names[0]][one], table.members[names[1]][two]]
            turns = [judged(0.5 + 0.5 * x, x) for x in speeds]
            rollouts.append(table.trajectory("policy", "t", "t", turns, tokens, scheme=scheme))
        if not triggers(rollouts, alpha=1.2, beta=1.2, limit=1):
            yield probability, StepRollouts(trajectories=[chosen, *rollouts], proposals=[])
            continue
        for told in itertools.product(range(3), repeat=2):
            readable = [m for m in told if m < 2]
            for verdicts in itertools.product((True, False), repeat=len(readable)):
                calls, proposals, chance, left = [], [], probability, list(verdicts)
                for member, token in enumerate(told):
                    turn = Turn(text="", stop="eos", error="broken" if token == 2 else "")
                    call = table.trajectory("summary", "t", "t/0", [turn], [table.members["summary"][token]], member=member)
                    chance *= p("summary")[token]
                    calls.append(call)
                    if token < 2:
                        accepted = left.pop(0)
                        chance *= ACCEPTED[token] if accepted else 1 - ACCEPTED[token]
                        proposals.append(proposal(call, EFFECT[token], accepted))
                yield chance, StepRollouts(trajectories=[chosen, *rollouts, *calls], proposals=proposals)


def proposal(call: Trajectory, effect: float, accepted: bool) -> Proposal:
    decision = Decision(
        status="accept" if accepted else "reject", effect=effect, low=None, high=None, p=0.01, n=4, best=effect, reason=""
    )
    draft = SkillDraft(name="a", description="", scope="general", tags=(), content="")
    return Proposal(call=call, trigger=call, draft=draft, decision=decision)


def exact(table: Table, how: CreditConfig) -> dict[str, np.ndarray]:
    """Each agent's derivative of the expected reward of one sample, times weight over scale, from the score of every path."""
    size = len(table.logits)
    p, out = table.probability, {name: np.zeros(size) for name in ("policy", "selection", "summary")}
    best = np.zeros(2)
    earned = {0: 0.0, 1: 0.0}
    shares = {0: 0.5 + 0.5 * (p("selection")[0] + p("selection")[2]), 1: 0.5 * p("selection")[1]}
    for skill, one, two in itertools.product(range(2), repeat=3):
        names = f"first{skill}", f"second{skill}{one}"
        chance = p(names[0])[one] * p(names[1])[two]
        speeds = np.array([FIRST[skill, one], SECOND[skill, two]])
        score = table.score(table.members[names[0]][one]) + table.score(table.members[names[1]][two])
        out["policy"] += shares[skill] * chance * score * (1.0 + 0.5 * speeds.sum())
        best[skill] += chance * (0.5 + 0.5 * speeds.max())
        earned[skill] += chance * bool(speeds[1] >= max(1.2 * speeds[0], 1.2))
    for choice in range(3):
        worth = -how.format_penalty if choice == 2 else best[skill_of(choice)]
        out["selection"] += p("selection")[choice] * worth * table.score(table.members["selection"][choice])
    chosen = sum(p("selection")[c] * earned[skill_of(c)] for c in range(3))
    for token in range(3):
        worth = -how.format_penalty if token == 2 else ACCEPTED[token] * min(EFFECT[token], how.summary_cap)
        out["summary"] += (chosen + (1 - chosen) * earned[0]) * p("summary")[token] * worth * table.score(table.members["summary"][token])
    weight = dict(zip(("selection", "policy", "summary"), how.weights, strict=True))
    return {name: g * weight[name] / how.loss_scale for name, g in out.items()}


@pytest.fixture(scope="module")
def three():
    return three_agents()


def test_the_rows_of_a_step_are_in_expectation_the_policy_gradient_of_all_three_agents(three):
    how = config()
    want = exact(three, how)
    assert all(np.abs(g).max() > 1e-3 for g in want.values())
    np.testing.assert_allclose(expected_update(three, steps_of_three_agents(three), how), sum(want.values()), rtol=1e-5, atol=1e-7)


def test_with_the_groups_own_mean_they_are_that_less_one_over_the_group_size(three):
    how = config(advantage="group_mean")
    want = 0.5 * sum(exact(three, how).values())  # two schemes of one rollout, and two summaries
    np.testing.assert_allclose(expected_update(three, steps_of_three_agents(three), how), want, rtol=1e-5, atol=1e-7)


# --- the policy of two tasks ----------------------------------------------------------------------------------------


def two_tasks() -> Table:
    """One whose answers are often the same, and one whose are not."""
    table = Table(5)
    for task in (0, 1):
        table.choice(f"task{task}", 2)
    table.logits[2:] = [1.2, -0.9, 0.1, 0.3]
    return table


WORTH = ((0.0, 1.0), (0.5, 2.0))


def steps_of_two_tasks(table: Table) -> Iterator[tuple[float, StepRollouts]]:
    for drawn in itertools.product(range(2), repeat=4):
        probability, trajectories = 1.0, []
        for i, token in enumerate(drawn):
            task = i // 2
            probability *= table.probability(f"task{task}")[token]
            place = table.members[f"task{task}"][token]
            trajectories.append(table.trajectory("policy", f"t{task}", f"t{task}", [judged(WORTH[task][token])], [place], scheme=i % 2))
        yield probability, StepRollouts(trajectories=trajectories, proposals=[])


def exact_of_two_tasks(table: Table) -> list[np.ndarray]:
    """Derivative of each task's expected reward."""
    return [
        sum(table.probability(f"task{t}")[a] * WORTH[t][a] * table.score(table.members[f"task{t}"][a]) for a in range(2)) for t in (0, 1)
    ]


def same_answer(table: Table, task: int) -> float:
    """Probability that a group of two is dropped."""
    return float((table.probability(f"task{task}") ** 2).sum())


def test_divided_by_all_that_was_sampled_the_update_is_the_gradient_of_the_mean_over_tasks_whatever_is_dropped():
    table = two_tasks()
    want = sum(exact_of_two_tasks(table)) / 2 / 5.0
    got = expected_update(table, steps_of_two_tasks(table), config(aggregate="constant_length"))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


def test_divided_by_what_is_left_a_task_counts_for_more_where_the_other_is_often_dropped():
    table = two_tasks()
    by_task = exact_of_two_tasks(table)
    # A group that is left is the only one with the probability that the other is dropped, else one of two.
    share = [same_answer(table, 1 - t) * 1.0 + (1 - same_answer(table, 1 - t)) * 0.5 for t in (0, 1)]
    assert abs(share[0] - share[1]) > 0.1
    want = (share[0] * by_task[0] + share[1] * by_task[1]) / 5.0
    np.testing.assert_allclose(expected_update(table, steps_of_two_tasks(table), config()), want, rtol=1e-5, atol=1e-7)
    # With one token a sequence, the mean over tokens is the same without the scale.
    of_tokens = expected_update(table, steps_of_two_tasks(table), config(aggregate="token_mean"))
    np.testing.assert_allclose(of_tokens, want * 5.0, rtol=1e-5, atol=1e-7)


# --- turns that do not take place -----------------------------------------------------------------------------------


def steps_that_may_end_early(table: Table) -> Iterator[tuple[float, StepRollouts]]:
    """Two rollouts; after a first token 1 the context is full."""
    paths = [(1,), (0, 0), (0, 1)]
    for pair in itertools.product(paths, repeat=2):
        probability, rollouts = 1.0, []
        for scheme, path in enumerate(pair):
            names = ["first", "second"][: len(path)]
            probability *= np.prod([table.probability(name)[token] for name, token in zip(names, path, strict=True)])
            turns = [judged((0.2, 0.9)[path[0]]), *(judged((0.1, 1.6)[token]) for token in path[1:])]
            tokens = [table.members[name][token] for name, token in zip(names, path, strict=True)]
            rollouts.append(table.trajectory("policy", "t", "t", turns, tokens, scheme=scheme))
        yield float(probability), StepRollouts(trajectories=rollouts, proposals=[])


def test_a_turn_that_others_missed_is_learnt_from_as_often_as_there_is_another_to_compare_it_with():
    table = Table(7)
    table.choice("first", 2)
    table.choice("second", 2)
    first, second = table.probability("first"), table.probability("second")
    second_turn = sum(second[b] * (0.1, 1.6)[b] * table.score(table.members["second"][b]) for b in (0, 1)) * first[0]
    reached = 0.2 + second @ np.array([0.1, 1.6])
    first_turn = sum(first[a] * (reached, 0.9)[a] * table.score(table.members["first"][a]) for a in (0, 1))
    want = (first_turn + first[0] * second_turn) / 5.0  # the other rollout gets to its second turn with first[0]
    np.testing.assert_allclose(expected_update(table, steps_that_may_end_early(table), config()), want, rtol=1e-5, atol=1e-7)
