"""The joint update: what it adds up, whatever way the work is shared out, and that a fresh policy's ratio is 1."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from dk_jax.generation.sampler import SamplerConfig, make_sampler
from dk_jax.models.backbone import build_backbone
from dk_jax.models.config import AGENTS, BackboneConfig
from dk_jax.models.log_probs import token_log_probs
from dk_jax.train.batch import Row, microbatches
from dk_jax.train.update import LossConfig, Updater, _gradient_programs, make_optimizer

CFG = BackboneConfig(
    family="qwen3", vocab_size=40, d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=24, head_rank=2, init_std=0.3,
)  # fmt: skip
STATIC, PARAMS = build_backbone(CFG, jax.random.key(0))
NOTHING = jax.tree.map(lambda leaf: None, PARAMS)  # is frozen


def updater(kind="policy", *, streams=1, temperature=1.0, **loss):
    optimizer = make_optimizer(lr=1e-2, warmup=1, steps=10, weight_decay=0.0, clip_norm=1.0, decay=False)
    return Updater(STATIC, optimizer, LossConfig(kind=kind, temperature=temperature, **loss), streams=streams)


def rows(n=5, seed=0):
    rng = np.random.default_rng(seed)
    found = []
    for i in range(n):
        length = 6 + 3 * i
        found.append(
            Row(tokens=rng.integers(0, 40, length).tolist(), loss=[0.0] * 3 + [1.0] * (length - 3), advantage=rng.normal(size=length).tolist(),
                old_logp=(-3.0 + 0.1 * rng.normal(size=length)).tolist(), agent=i % len(AGENTS), weight=0.1 * (i + 1))
        )  # fmt: skip
    return found


def close(a, b, **tolerance):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, **tolerance)


@pytest.mark.parametrize("kind", ["nll", "policy"])
def test_streams_and_microbatches_only_share_out_the_work(kind):
    whole, told = updater(kind).gradient(PARAMS, NOTHING, microbatches(rows(), size=8, step=32))
    for streams, size, step in ((1, 2, 16), (2, 2, 16), (3, 1, 32)):  # of one length and of several
        parts, stats = updater(kind, streams=streams).gradient(PARAMS, NOTHING, microbatches(rows(), size=size, step=step))
        close(parts, whole, rtol=1e-4, atol=1e-5)  # entries go up to 5
        assert {k: float(v) for k, v in stats.items()} == pytest.approx({k: float(v) for k, v in told.items()}, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(("temperature", "other"), [(1.0, 0.5), (0.5, 1.0)])
def test_tokens_that_the_sampler_has_just_drawn_have_the_ratio_1(temperature, other):
    config = SamplerConfig(
        eos_id=1, max_new_tokens=12, temperature=temperature, max_length_tokens=48, batch_buckets=(4,), chunks=(16,), block=8,
        cache_step=64,
    )  # fmt: skip
    prompts = [[2 + i, 3, 5 + i] for i in range(4)]
    samples = make_sampler(STATIC, config).sample(PARAMS, prompts, [0, 1, 2, 0], list(range(4)))
    found = [
        Row(tokens=prompt + sample.tokens, loss=[0.0] * 3 + [1.0] * len(sample.tokens), advantage=[1.0] * (3 + len(sample.tokens)),
            old_logp=[0.0] * 3 + [float(p) for p in sample.logp_sample], agent=agent, weight=1.0)
        for prompt, sample, agent in zip(prompts, samples, (0, 1, 2, 0), strict=True)
    ]  # fmt: skip
    copy = jax.tree.map(lambda leaf: leaf.copy(), PARAMS)
    own = updater(temperature=temperature)
    _, _, metrics = own.update(copy, NOTHING, own.optimizer.init(copy), microbatches(found, size=4, step=32))
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-4) and metrics["kl"] < 1e-6
    wrong = updater(temperature=other)
    copy = jax.tree.map(lambda leaf: leaf.copy(), PARAMS)
    _, _, off = wrong.update(copy, NOTHING, wrong.optimizer.init(copy), microbatches(found, size=4, step=32))
    assert abs(off["ratio"] - 1.0) > 1e-2, "another temperature shows"


def test_parameters_that_somebody_still_uses_are_kept_and_the_update_is_the_same():
    found = []
    for keep in (False, True):
        own, start = updater(), jax.tree.map(lambda leaf: leaf.copy(), PARAMS)
        after, state, _ = own.update(start, NOTHING, own.start(start), microbatches(rows(), size=2, step=16), keep=keep)
        found.append(jax.tree.map(np.asarray, (after, state)))
        assert {leaf.is_deleted() for leaf in jax.tree.leaves(start)} == {not keep}
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(a, b)
    close(start, PARAMS, rtol=0, atol=0)


def test_how_far_the_policy_has_moved_is_told_of_each_agent():
    own, start = updater(), jax.tree.map(lambda leaf: leaf.copy(), PARAMS)
    batch = microbatches(rows(), size=8, step=32)
    _, _, metrics = own.update(start, NOTHING, own.start(start), batch)
    [b] = batch
    logp = token_log_probs(STATIC, PARAMS, b["tokens"], b["lengths"], b["agents"]).log_probs
    delta = np.asarray(logp, np.float64) - b["old_logp"]
    for i, agent in enumerate(AGENTS):
        own_tokens = (b["mask"] > 0) & (b["agents"] == i)[:, None]
        d = delta[own_tokens]
        assert metrics[f"gap_{agent}"] == pytest.approx(np.abs(d).mean(), rel=1e-4)
        assert metrics[f"ratio_{agent}"] == pytest.approx(np.exp(d).mean(), rel=1e-4)
        assert metrics[f"kl_{agent}"] == pytest.approx((np.exp(d) - 1 - d).mean(), rel=1e-3)
    tokens = {agent: metrics[f"tokens_{agent}"] for agent in AGENTS}
    assert metrics["kl"] == pytest.approx(sum(metrics[f"kl_{a}"] * n for a, n in tokens.items()) / sum(tokens.values()), rel=1e-4)


def test_only_the_named_modules_change_and_only_they_count_in_the_norm():
    optimizer = make_optimizer(lr=1e-2, warmup=1, steps=10, weight_decay=0.1, clip_norm=1.0, decay=False, only=("mlp", "heads"))
    own = Updater(STATIC, optimizer, LossConfig(kind="policy"))
    start = jax.tree.map(lambda leaf: leaf.copy(), PARAMS)
    state = own.optimizer.init(start)
    after, _, _ = own.update(start, NOTHING, state, list(microbatches(rows(), size=8, step=32)))
    changed = {
        "/".join(entry.key for entry in path): bool((a != b).any())
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(PARAMS), jax.tree.leaves(after), strict=True)
    }
    assert {name for name, differs in changed.items() if differs} == {n for n in changed if "mlp/" in n or n.startswith("heads/")}
    assert any("mlp/" in n for n in changed) and any("attention" in n for n in changed)
    # Clipping goes by what is trained: a huge gradient elsewhere leaves the step as it is.
    gradient = jax.tree_util.tree_map_with_path(lambda path, p: np.ones(p.shape, p.dtype) * (1e6 if path[0].key == "embed" else 1e-3), PARAMS)
    small = jax.tree.map(lambda p: np.ones(p.shape, p.dtype) * 1e-3, PARAMS)
    close(optimizer.update(gradient, optimizer.init(PARAMS), PARAMS)[0], optimizer.update(small, optimizer.init(PARAMS), PARAMS)[0])


def test_a_module_that_is_not_there_is_named():
    optimizer = make_optimizer(lr=1e-2, warmup=1, steps=10, weight_decay=0.0, clip_norm=1.0, decay=False, only=("mlp", "lora"))
    with pytest.raises(ValueError, match="no trainable parameter belongs to lora: modules are .*attention.*mlp"):
        optimizer.init(PARAMS)


def test_a_program_is_compiled_for_each_length_and_no_more():
    _gradient_programs.cache_clear()  # other tests' updaters may have compiled some
    own = updater()
    many = rows(9)
    batches = [microbatches(part, size=1, step=16, tokens=64) for part in (many, many[2:], many[:5])]
    whole, _ = own.gradient(PARAMS, NOTHING, batches[0])
    for part in batches[1:]:
        own.gradient(PARAMS, NOTHING, part)
    lengths = {batch["tokens"].shape[1] for part in batches for batch in part}
    assert len(lengths) == 2 and own._compiled[0]._cache_size() == len(lengths)
    close(whole, updater().gradient(PARAMS, NOTHING, microbatches(many, size=9, step=32))[0], rtol=1e-4, atol=1e-5)
