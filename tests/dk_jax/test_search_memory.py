"""Serial refinement with a memory: which attempts a prompt tells of, and that turns go on as long as they are asked for."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.demo import get_config
from dk_jax.agents.policy import KEEP
from dk_jax.evaluation.usage import Message, messages_of
from dk_jax.rollout.episode import task_view
from dk_jax.rollout.speaker import Speaker
from dk_jax.rollout.trajectory import STAGES, Trajectory, Turn, Verdict
from dk_jax.search import strategy
from dk_jax.search.memory import Recall
from dk_jax.tasks.builtin import builtin_suite
from dk_jax.train import setup
from tests.dk_jax.spoken_kernels import BelievingClient, SayingSpeaker, believing_judge, kernel
from tests.dk_jax.test_fresh_context import Codec, ScriptedSampler

TASK = builtin_suite("cpu").held_out[0]
CONFIG = setup.rollout_config(get_config())


def memory(**numbers):
    return strategy.make({"name": "memory", "window": 2, "latest": False, "plain": 0, **numbers}).spend


def attempts(*told: tuple[float, float, str]) -> Trajectory:
    """Turns by reward, speedup and kernel; "" is a message without one."""
    trajectory = Trajectory(agent="policy", task=TASK.name, group="g")
    for reward, speedup, source in told:
        verdict = Verdict(
            outcome="ok" if speedup else "incorrect", stage="timed" if speedup else "built", reward=reward, speedup=speedup, noisy=False,
            coverage=None, feedback="",
        )  # fmt: skip
        trajectory.turns.append(Turn(text=source, stop="eos", source=source or None, verdict=verdict if source else Verdict.without_kernel("none")))
        trajectory.rewards.append(reward)
    return trajectory


def test_the_best_attempts_are_told_of_by_reward_then_speedup_and_a_kernel_once():
    t = attempts((0, 0, "wrong"), (2, 1.5, "a"), (2, 3.0, "b"), (3, 1.2, "c"), (2, 1.5, "a"), (0, 0, ""))
    assert Recall(window=9).chosen(t) == [5, 0, 4, 2, 3], "no kernel, wrong, then right ones; of the two equal ones the later"
    assert Recall(window=2).chosen(t) == [2, 3]
    assert Recall(window=2, latest=True).chosen(t) == [5, 3] and Recall(window=1, latest=True).chosen(t) == [5]
    assert Recall(window=3).chosen(attempts()) == []


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 1.0, 2.0]), st.sampled_from([0.0, 1.0, 2.5]), st.sampled_from(["", "a", "b", "c"])), max_size=9),
    st.integers(1, 5),
    st.booleans(),
)
def test_what_is_left_out_is_never_better_than_what_is_told(told, window, latest):
    t = attempts(*told)
    chosen = Recall(window=window, latest=latest).chosen(t)

    def worth(i):
        v = t.turns[i].verdict
        return v.reward, v.earned_speedup, STAGES.index(v.stage)

    assert len(chosen) <= window and [worth(i) for i in chosen] == sorted(worth(i) for i in chosen)
    assert len({t.turns[i].source for i in chosen if t.turns[i].source}) == sum(t.turns[i].source is not None for i in chosen)
    if told and latest:
        assert len(told) - 1 in chosen
    last = {t.turns[i].source or i: i for i in range(len(told))}.values()
    left = [i for i in last if i not in chosen]
    free = [i for i in chosen if not (latest and i == len(told) - 1)]
    assert not left or len(chosen) == window
    assert all(worth(i) >= worth(j) for i in free for j in left)


def run(say, turns, *, room=1_000_000, samples=1, config=CONFIG, **numbers):
    speaker, client = SayingSpeaker(say, room=room), BelievingClient()
    trajectories = [Trajectory(agent="policy", task=TASK.name, group="g", member=m) for m in range(samples)]
    memory(**numbers)(
        speaker, believing_judge(client), trajectories, [TASK] * samples, [()] * samples, config=config,
        seed_of=lambda t, turn: 100 * t.member + turn, phase="p", turns=turns,
    )  # fmt: skip
    return trajectories, speaker


def told(prompt: str) -> list[float]:
    return [float(x) for x in re.findall(r"// ([0-9.]+) times", prompt)]


def test_each_turn_sees_the_best_so_far_from_worst_to_best_and_nothing_else():
    speeds = [1.0, 0.0, 3.0, 2.0, 0.5, 4.0]
    trajectories, speaker = run(lambda t, prompt, seed: kernel(speeds[len(t.turns)], f"sample {t.member}"), len(speeds), samples=2)
    own = [prompt for _, _, prompt in speaker.asked][::2]
    assert [told(prompt) for prompt in own] == [[], [1.0], [0.0, 1.0], [1.0, 3.0], [2.0, 3.0], [2.0, 3.0]]
    assert "sample 1" not in "".join(own), "samples do not see each other"
    assert own[3].index("ok 1.00x") < own[3].index("ok 3.00x") and own[0] == task_view(TASK, language="cpp", form="kernel").compact.strip()
    assert [[v.speedup for v in t.verdicts] for t in trajectories] == [speeds] * 2
    assert speaker.calls == [2] * 6 and speaker.seeds == [100 * m + turn for turn in range(6) for m in range(2)]
    assert [t.rewards for t in trajectories] == [[turn.reward for turn in t.turns] for t in trajectories] and trajectories[0].rewards[2] == 4.0


def test_more_turns_than_fit_into_a_context_leave_the_worst_out():
    longest = len(task_view(TASK, language="cpp", form="kernel").compact)
    speeds = [1.0, 2.0, 3.0, 2.5, 0.0, 5.0, 4.0]
    for latest, wanted in ((False, [[], [1.0], [2.0], [3.0], [3.0], [3.0], [5.0]]), (True, [[], [1.0], [2.0], [3.0], [2.5], [0.0], [5.0]])):
        [t], speaker = run(lambda t, prompt, seed: kernel(speeds[len(t.turns)]), 7, room=longest + 60, window=3, latest=latest)
        assert [told(prompt) for _, _, prompt in speaker.asked] == wanted and len(t.turns) == 7
    [t], speaker = run(lambda t, prompt, seed: kernel(1.0, "very " * 99), 3, room=longest + 60)
    assert [told(prompt) for _, _, prompt in speaker.asked] == [[], [], []] and len(t.turns) == 3, "where none fits the task alone is told"
    [t], speaker = run(lambda t, prompt, seed: kernel(1.0), 3, room=5)
    assert not t.turns and not speaker.asked


def test_a_conversation_comes_first_where_it_is_asked_for():
    [t], speaker = run(lambda t, prompt, seed: kernel(3.0 - len(t.turns) / 4), 4, plain=2, window=4)
    assert [len(told(prompt)) for _, _, prompt in speaker.asked] == [0, 0, 2, 3] and speaker.asked[1][2].startswith("ok 3.00x")
    assert len(t.turns) == 4 and speaker.seeds == [0, 1, 2, 3]
    [t], speaker = run(lambda t, prompt, seed: kernel(1.0), 2, plain=5)
    assert len(t.turns) == 2


def test_keeping_means_the_attempt_nearest_to_the_question():
    speeds = iter([2.0, 1.0])
    [t], _ = run(lambda t, prompt, seed: KEEP if len(t.turns) == 2 else kernel(next(speeds)), 3)
    assert [turn.source for turn in t.turns] == [kernel(2.0), kernel(1.0), kernel(2.0)]


def test_a_message_without_a_kernel_is_an_attempt_too():
    chat = dataclasses.replace(CONFIG, style="chat")

    def say(t, prompt, seed):
        return "I can't." if not t.turns else f"```cpp\n{kernel(2.0)}\n```\nOne loop."

    [t], speaker = run(say, 3, config=chat)
    prompts = [prompt for _, _, prompt in speaker.asked]
    assert "(no kernel)" in prompts[1] and "two or three sentences" in prompts[0] and t.turns[0].verdict.outcome == "no_kernel"
    assert prompts[2].index("(no kernel)") < prompts[2].index("Your summary: One loop.") < prompts[2].index("Write a faster version.")


def test_a_models_turns_are_sequences_of_their_own_whose_tokens_are_counted():
    sampler = ScriptedSampler([(kernel(speed), "eos") for speed in (1.0, 3.0, 2.0)])
    speaker = Speaker(sampler=sampler, params=None, codec=Codec(), max_context_tokens=20_000)
    t = Trajectory(agent="policy", task=TASK.name, group="g")
    memory(window=1)(
        speaker, believing_judge(BelievingClient()), [t], [TASK], [()], config=CONFIG, seed_of=lambda t, turn: turn, phase="p", turns=3
    )
    assert [told(Codec().decode(prompt)) for prompt in sampler.fed] == [[], [1.0], [3.0]] and not any(sampler.kept)
    assert [t.tokens[s][: len(prompt)] for s, prompt in zip(t.sequences, sampler.fed, strict=True)] == sampler.fed
    answer = len(kernel(1.0)) + 1
    assert messages_of(t) == [Message(prompt=len(prompt), answer=answer) for prompt in sampler.fed]


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        (dict(name="memories"), "evaluation.search.name is 'memories': use one of 'turns', 'memory', 'schemes'"),
        (dict(window=0), "evaluation.search.window is 0: give a whole number of at least 1"),
        (dict(window=True), "evaluation.search.window is True"),
        (dict(latest=1), "evaluation.search.latest is 1: use True or False"),
        (dict(plain=-1), "evaluation.search.plain is -1"),
        (dict(grow="yes"), "evaluation.search.grow is 'yes'"),
    ],
)
def test_numbers_that_make_no_sense_are_named(numbers, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        memory(**numbers)
    with pytest.raises(ValueError, match="evaluation.search has no key 'window', 'latest', 'plain', which name='memory' reads"):
        strategy.make({"name": "memory"})
