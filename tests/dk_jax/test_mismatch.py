"""Mismatch rejection on a real model: the trainer's view of what the sampler drew, and which trajectories that leaves."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.demo import get_config
from dk_jax.generation.sampler import SamplerConfig, make_sampler
from dk_jax.models import token_log_probs
from dk_jax.models.backbone import build_backbone
from dk_jax.models.config import AGENTS, BackboneConfig
from dk_jax.models.sharding import make_mesh, mesh_of, on_mesh, param_shardings
from dk_jax.rollout.episode import StepRollouts
from dk_jax.rollout.trajectory import Trajectory, Turn
from dk_jax.train.credit import CreditConfig, assign
from dk_jax.train.mismatch import judge, make_screen, score

CFG = BackboneConfig(
    family="qwen3", vocab_size=40, d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=24, head_rank=2, init_std=0.3,
)  # fmt: skip
TEMPERATURE = 0.8
SIZES = dict(temperature=TEMPERATURE, microbatch=4, length_step=32)


@pytest.fixture(scope="module")
def model():
    static, params = build_backbone(CFG, jax.random.key(0))
    mesh = make_mesh(data=jax.device_count())
    params = on_mesh(params, param_shardings(static, mesh))
    return SimpleNamespace(static=static, trainable=params, frozen=jax.tree.map(lambda leaf: None, params), mesh=mesh)


@pytest.fixture(scope="module")
def sampled(model):
    """Trajectories of all agents and of several lengths, one of them of two sequences, as the sampler drew them."""
    config = SamplerConfig(
        eos_id=1, max_new_tokens=12, temperature=TEMPERATURE, max_length_tokens=64, batch_buckets=(8,), chunks=(16,), block=8, cache_step=64
    )
    agents = ["policy", "policy", "selection", "summary", "policy", "policy", "policy"]
    prompts = [[2 + i] * (1 + i) for i in range(7)]
    sampler = make_sampler(model.static, config, mesh_of(model.trainable))
    found = sampler.sample(model.trainable, prompts, [AGENTS.index(a) for a in agents], list(range(7)))
    out = []
    for i, (agent, prompt, sample) in enumerate(zip(agents, prompts, found, strict=True)):
        t = out[-1] if i == 6 else Trajectory(agent=agent, task="t", group="t", scheme=i)
        t.start_sequence()
        t.append_prompt(prompt)
        t.append_sample(sample.tokens, sample.logp_sample)
        t.turns.append(Turn(text="", stop="eos"))
        t.rewards.append(float(i))
        if i < 6:
            out.append(t)
    assert len(out) == 6 and len(out[5].sequences) == 2
    return out


def test_the_score_of_each_token_is_its_own_whatever_batch_and_place_it_is_scored_in(model, sampled):
    got = score(model, model.trainable, sampled, **SIZES)
    alone = jax.jit(partial(token_log_probs, temperature=TEMPERATURE), static_argnums=0)
    for t, log_probs in zip(sampled, got, strict=True):
        assert log_probs.shape == (len(t.tokens),)
        for where in t.sequences:
            tokens = t.tokens[where]
            padded, length, agent = [tokens + [0] * (64 - len(tokens))], [len(tokens)], [AGENTS.index(t.agent)]
            want = alone(model.static, model.trainable, *map(jnp.asarray, (padded, length, agent))).log_probs[0, : len(tokens) - 1]
            own = np.array(t.turn_index[where]) >= 0
            np.testing.assert_allclose(log_probs[where][own], np.asarray(want)[own[1:]], atol=1e-5)
            assert not log_probs[where][~own].any()


def test_what_the_sampler_has_just_drawn_stays_within_the_papers_bounds(model, sampled):
    seen = judge(sampled, score(model, model.trainable, sampled, **SIZES), low=0.999, high=1.001, veto=1e-4)
    assert all(seen.keep) and not any(seen.vetoed)
    for agent in AGENTS:
        assert 0 <= seen.metrics[f"mismatch_gap_{agent}"] <= seen.metrics[f"mismatch_gap_max_{agent}"] < 1e-4
        assert seen.metrics[f"mismatch_ratio_p50_{agent}"] == pytest.approx(1.0, abs=1e-4)
        assert seen.metrics[f"mismatch_rejected_{agent}"] == seen.metrics[f"mismatch_vetoed_{agent}"] == 0.0


def test_other_parameters_than_the_samplers_are_noticed(model, sampled):
    others = jax.tree.map(lambda leaf: leaf * 1.3, model.trainable)
    seen = judge(sampled, score(model, others, sampled, **SIZES), low=0.999, high=1.001, veto=1e-4)
    assert not any(seen.keep) and seen.metrics["mismatch_rejected_policy"] == 1.0


def test_metrics_are_those_of_the_tokens_that_differ(sampled):
    theirs = [np.where(np.array(t.turn_index) >= 0, t.logp_sample, 0.0).astype(np.float32) for t in sampled]
    ours = [x.copy() for x in theirs]
    policy = [i for i, t in enumerate(sampled) if t.agent == "policy"]
    first, second = (np.flatnonzero(np.array(sampled[i].turn_index) >= 0)[-1] for i in policy[:2])
    ours[policy[0]][first] += 0.5
    ours[policy[1]][second] -= 12.0
    seen = judge(sampled, ours, low=0.999, high=1.001, veto=1e-4)
    assert [seen.keep[i] for i in policy] == [False, False, True, True]
    assert [seen.vetoed[i] for i in policy] == [False, True, False, False]
    tokens = sum(int((np.array(sampled[i].turn_index) >= 0).sum()) for i in policy)
    assert seen.metrics["mismatch_gap_policy"] == pytest.approx(12.5 / tokens, rel=1e-5)
    assert seen.metrics["mismatch_gap_max_policy"] == pytest.approx(12.0) and seen.metrics["mismatch_gap_summary"] == 0.0
    assert seen.metrics["mismatch_rejected_policy"] == 0.5 and seen.metrics["mismatch_vetoed_policy"] == 0.25
    only_veto = judge(sampled, ours, low=0.0, high=math.inf, veto=1e-4)
    assert [only_veto.keep[i] for i in policy] == [True, False, True, True]


def config(**changes):
    c = get_config()
    c.rl.update(dict(microbatch=4, length_step=32, **changes))
    c.rollout.temperature = TEMPERATURE
    return c


def test_switched_off_there_is_no_second_look(model):
    assert make_screen(config(), model, model.trainable) is None


def test_a_trajectory_that_was_drawn_from_another_policy_is_left_out_of_the_update(model, sampled):
    changed = [Trajectory.from_dict(t.to_dict()) for t in sampled if t.agent == "policy"]
    changed[1].logp_sample = [p - 0.1 for p in changed[1].logp_sample]
    credit = CreditConfig(gamma=1.0, min_group_std=1e-3, format_penalty=0.1, summary_cap=6.0, weights=(0.3, 1.0, 0.5), loss_scale=10.0)
    bounds = ((dict(mismatch_low=0.999, mismatch_high=1.001), 1), (dict(mismatch_veto=0.5), 0), (dict(mismatch_high=1.2), 0))
    for changes, rejected in bounds:
        screen = make_screen(config(**changes), model, model.trainable)
        rows, metrics = assign(StepRollouts(trajectories=changed, proposals=[]), config=credit, seed=0, step=0, screen=screen)
        assert metrics["dropped_mismatch_policy"] == rejected and len(rows) == 5 - rejected, changes  # the last is of two sequences


def test_parameters_that_are_not_finite_are_told_apart_from_a_mismatch(model, sampled):
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, model.trainable)
    with pytest.raises(FloatingPointError, match="task 't' are not finite: the parameters are broken"):
        score(model, broken, sampled, **SIZES)
