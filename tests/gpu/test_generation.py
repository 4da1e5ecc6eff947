"""Generation on a GPU: every way of attention gives the same, the fastest is found, and bfloat16's log-probs are near the trainer's.

    python -m pytest tests/gpu/test_generation.py        with JAX's CUDA build
"""

import dataclasses
import logging

import numpy as np
import pytest

jax = pytest.importorskip("jax")
if jax.default_backend() != "gpu":
    pytest.skip("JAX sees no GPU", allow_module_level=True)

import jax.numpy as jnp  # noqa: E402

from dk_jax.generation import Engine, EngineConfig, Request  # noqa: E402
from dk_jax.generation.implementation import fastest_attention, fastest_products, fastest_prompts  # noqa: E402
from dk_jax.generation.kv_cache import KVCache  # noqa: E402
from dk_jax.generation.programs import Programs  # noqa: E402
from dk_jax.models import BackboneConfig, build_backbone, token_log_probs  # noqa: E402
from dk_jax.models.decode_attention import fused_step  # noqa: E402
from dk_jax.models.decode_products import added, gated, product  # noqa: E402
from dk_jax.models.first_chunk import fused_first  # noqa: E402
from dk_jax.models.layers import rope_angles  # noqa: E402

CFG = BackboneConfig(
    family="qwen3", vocab_size=4096, d_model=512, n_layers=4, n_heads=8, n_kv_heads=4, head_dim=64, d_ff=1024, head_rank=4,
    compute_dtype="bfloat16", param_dtype="bfloat16",
)  # fmt: skip
SIZES = EngineConfig(eos_id=4096, rows=16, max_length_tokens=1024, chunks=(128, 256), cache_step=0)


def prompts(lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(0, CFG.vocab_size, n).tolist() for n in lengths]


@pytest.mark.parametrize("attention", ["fused", "cudnn"])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_kernels_agree_with_xla(attention, rows):
    rng = np.random.default_rng(rows)
    q, k, v = (jnp.asarray(rng.standard_normal((rows, n, 8, 64)), jnp.bfloat16)[:, :, :heads] for n, heads in ((1, 8), (700, 4), (700, 4)))
    lengths = jnp.asarray(rng.integers(1, 701, rows))
    plain = KVCache(dataclasses.replace(CFG, compute_dtype="float32", param_dtype="float32"), "heads")
    wide = tuple(array.astype(jnp.float32).transpose(0, 2, 1, 3) for array in (k, v))
    expected = plain.attend(q.astype(jnp.float32), wide, lengths - 1)
    pair = (k, v) if attention == "cudnn" else tuple(array.transpose(0, 2, 1, 3) for array in (k, v))
    got = jax.jit(KVCache(CFG, attention).attend)(q, pair, lengths - 1)
    np.testing.assert_allclose(got.astype(jnp.float32), expected, atol=2e-2)


@pytest.mark.parametrize("splits", [1, 2, 4, None])
@pytest.mark.parametrize("rows", [2, 5, 64])
def test_a_whole_step_s_kernel_does_compiled_what_it_does_interpreted(rows, splits):
    rng = np.random.default_rng(rows)
    products, k, v = (jnp.asarray(rng.standard_normal((rows, *shape)), jnp.bfloat16) for shape in ((16, 128), (4, 700, 128), (4, 700, 128)))
    scale = jnp.asarray(1 + 0.1 * rng.standard_normal((12, 128)), jnp.float32)
    positions = jnp.asarray([0, 699, *rng.integers(0, 700, rows - 2)])
    rope = tuple(each[:, 0, 0] for each in rope_angles(dataclasses.replace(CFG, head_dim=128), positions[:, None]))
    slots = positions.at[1].set(701)
    expected, kept = fused_step(products, scale, rope, k, v, positions, slots, eps=1e-6, splits=1, interpret=True)
    step = jax.jit(lambda *of: fused_step(*of, positions, slots, eps=1e-6, splits=splits), donate_argnums=(3, 4))
    got, pair = step(products, scale, rope, k, v)
    np.testing.assert_allclose(got.astype(jnp.float32), expected.astype(jnp.float32), atol=2e-2)
    keys, wanted, values, same = (np.asarray(each.astype(jnp.float32)) for both in zip(pair, kept, strict=True) for each in both)
    np.testing.assert_array_equal(values, same)
    # In the new slots the last place of a bfloat16 may differ: of a normed number, before it is rotated with another, and of the result.
    normed = np.tile(np.hypot(*np.split(wanted, 2, axis=-1)), 2)
    assert (np.abs(keys - wanted) <= 2**-7 * (normed + np.abs(wanted))).all()


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("length", [16, 100, 512])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_kernel_of_first_tokens_does_compiled_what_it_does_interpreted(length, head_dim, heads_first):
    rng = np.random.default_rng(length)
    shape = (6, 4, 256, head_dim) if heads_first else (6, 256, 4, head_dim)
    products, k, v = (jnp.asarray(rng.standard_normal(each), jnp.bfloat16) for each in ((3, length, 16, head_dim), shape, shape))
    scale = jnp.asarray(1 + 0.1 * rng.standard_normal((12, head_dim)), jnp.float32)
    rope = tuple(each[0, :, 0] for each in rope_angles(dataclasses.replace(CFG, head_dim=head_dim), jnp.arange(length)[None]))
    rows = jnp.asarray([5, 6, 2])  # the second one is nobody
    *expected, kept = fused_first(products, scale, rope, k, v, rows, eps=1e-6, heads_first=heads_first, interpret=True)
    first = jax.jit(lambda *of: fused_first(*of, rows, eps=1e-6, heads_first=heads_first), donate_argnums=(3, 4))
    *got, pair = first(products, scale, rope, k, v)
    for mine, wanted in zip((*got, *pair), (*expected, *kept), strict=True):
        mine, wanted = (np.asarray(each.astype(jnp.float32)) for each in (mine, wanted))
        normed = np.tile(np.hypot(*np.split(wanted, 2, axis=-1)), 2)
        assert (np.abs(mine - wanted) <= 2**-7 * (normed + np.abs(wanted))).all()  # as above
    for mine, wanted in zip((got[2], pair[1]), (expected[2], kept[1]), strict=True):
        np.testing.assert_array_equal(np.asarray(mine.astype(jnp.float32)), np.asarray(wanted.astype(jnp.float32)))


@pytest.mark.parametrize("rows", [2, 40, 64, 256])
def test_kernels_for_a_step_s_products_agree_with_xla(rows):
    rng = np.random.default_rng(rows)
    x, plain, both = (jnp.asarray(rng.standard_normal(shape) / 16, jnp.bfloat16) for shape in ((rows, 1024), (1024, 512), (1024, 6144)))
    residual = jnp.asarray(rng.standard_normal((rows, 512)), jnp.float32)
    wide = [each.astype(jnp.float32) for each in (x, plain, both)]
    with jax.default_matmul_precision("highest"):
        (of_plain, of_both) = wide[0] @ wide[1], wide[0] @ wide[2]
    gate, up = jnp.split(of_both, 2, axis=-1)
    pairs = ((product(x, plain), of_plain), (gated(x, both), jax.nn.silu(gate) * up), (added(residual, x, plain), residual + of_plain))
    for got, expected in pairs:
        np.testing.assert_allclose(got.astype(jnp.float32), expected, atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("attention", "prompts_by", "products"),
    [
        ("fused", "cudnn", "kernels"), ("fused", "cudnn", "xla"), ("fused", "xla", "xla"), ("cudnn", "cudnn", "xla"), ("heads", "blocks", "xla"),
        ("columns", "xla", "xla"),
    ],
)  # fmt: skip
def test_sampled_log_probs_are_near_the_trainers(attention, prompts_by, products):
    static, params = build_backbone(CFG, jax.random.key(0))
    config = dataclasses.replace(SIZES, attention=attention)
    programs = Programs(static, KVCache(CFG, attention, prompts=prompts_by), eos_id=config.eos_id, stops=(), block=config.block, products=products)
    engine = Engine(static, config, programs)
    some = [Request(tokens=p, agent=i % 3, key=i, max_new_tokens=64) for i, p in enumerate(prompts([5, 130, 300, 700] * 8))]
    gaps = []
    for request, sample in zip(some, engine.run(params, some), strict=True):
        row = [*request.tokens, *sample.tokens]
        tokens = jnp.asarray([row + [0] * (1024 - len(row))])
        table = token_log_probs(static, params, tokens, jnp.asarray([len(row)]), jnp.asarray([request.agent])).log_probs
        gaps.append(np.abs(np.asarray(table)[0, len(request.tokens) - 1 : len(row) - 1] - sample.logp_model))
    gaps = np.concatenate(gaps)
    by = f"{attention}, prompts by {prompts_by}, products by {products}"
    print(f"{by}: |gap| median {np.median(gaps):.2g}, 99 % {np.quantile(gaps, 0.99):.2g}, largest {gaps.max():.2g}")
    assert len(gaps) == 32 * 64 and np.median(gaps) < 0.01 and np.quantile(gaps, 0.99) < 0.1


def test_the_fastest_is_measured_and_named(caplog):
    with caplog.at_level(logging.INFO, "dk_jax.generation.implementation"):
        chosen, prompts_by = fastest_attention(CFG, SIZES), fastest_prompts(CFG, SIZES)
        products = fastest_products(build_backbone(CFG, jax.random.key(0))[0], SIZES, KVCache(CFG, "fused"))
    print(caplog.text)
    assert chosen in caplog.text and "us" in caplog.text
    assert "does not" not in caplog.text and "do not work" not in caplog.text, "all that this platform has is to work"
    assert f"products of a decode step, one layer, {SIZES.rows} rows: {products} " in caplog.text
    assert prompts_by in ("cudnn", "xla") and f"{prompts_by} " in caplog.text


def test_a_batch_of_one_and_copies_of_a_prompt():
    static, params = build_backbone(CFG, jax.random.key(0))
    alone = Engine(static, dataclasses.replace(SIZES, rows=1))
    assert alone.config.rows == 2
    [prompt] = prompts([300])
    one = alone.run(params, [Request(tokens=prompt, agent=0, key=1, max_new_tokens=16)])[0]
    assert len(one.tokens) == 16 and np.isfinite(one.logp_model).all()
    group = Engine(static, SIZES)
    same = group.run(params, [Request(tokens=prompt, agent=0, key=7, max_new_tokens=16) for _ in range(16)])
    assert group.counts.copied == 15 and all(sample.tokens == same[0].tokens for sample in same)
