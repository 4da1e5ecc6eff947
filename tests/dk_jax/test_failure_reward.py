"""A message without a kernel earns what a kernel that fails earns: under milestones, less than nothing."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from dk_jax.rollout import episode
from dk_jax.rollout.speaker import Speaker
from dk_jax.rollout.trajectory import Trajectory
from dk_jax.tasks.builtin import builtin_suite
from sandbox.protocol import Options, RewardSpec
from tests.dk_jax.fake_sandbox import A, FakeClient, make_judge, requests
from tests.dk_jax.test_fresh_context import CONFIG, RIGHT, Codec, ScriptedSampler

MILESTONES = Options(reward=RewardSpec(kind="milestones"), baselines=["eager", "torch.compile"])


@pytest.mark.parametrize(("options", "reward"), [(Options(), 0.0), (MILESTONES, -1.0)])
def test_a_text_that_the_protocol_does_not_carry_fails(options, reward):
    client = FakeClient()
    [verdict] = make_judge(client, options=options).evaluate(requests((A, "void kernel() {\x00}")), phase="p")
    assert (verdict.outcome, verdict.reward) == ("no_kernel", reward) and not client.asked


@pytest.mark.parametrize("failure", [0.0, -1.0])
def test_a_turn_without_a_kernel_fails(failure):
    task = builtin_suite().get("softmax_wide")
    trajectory = Trajectory(agent="policy", task=task.name, group=task.name)
    messages = [("no code at all", "eos"), ("```python\ncut", "length"), ("```python\nkernel\n```", "eos")]
    speaker = Speaker(sampler=ScriptedSampler(messages), params=None, codec=Codec(), max_context_tokens=20_000)
    episode.policy_turns(
        speaker, SimpleNamespace(evaluate=lambda asked, **_: [RIGHT] * len(asked)), [trajectory], [task], [()],
        config=dataclasses.replace(CONFIG, failure_reward=failure), seed_of=lambda t, turn: turn, phase="p", turns=3,
    )  # fmt: skip
    assert trajectory.rewards == [failure, failure, RIGHT.reward]
