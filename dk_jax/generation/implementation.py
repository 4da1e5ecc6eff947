"""Which way of attention, and of a step's products, is fastest on this machine for a model and its sizes: measured at start-up, said in the log."""

from __future__ import annotations

import dataclasses
import logging
import statistics
import time
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all
from jax.sharding import Mesh

from dk_jax.generation.kv_cache import Attention, KVCache
from dk_jax.generation.sizes import EngineConfig
from dk_jax.models.backbone import OfProducts, Static, abstract_backbone, unstack_for_decode
from dk_jax.models.config import BackboneConfig
from dk_jax.models.decode_products import fused_block, takes_kernels
from dk_jax.models.layers import rope_angles
from dk_jax.models.sharding import row_share

log = logging.getLogger(__name__)
CANDIDATES: dict[str, tuple[Attention, ...]] = {"cpu": ("columns",), "gpu": ("fused", "cudnn", "heads"), "tpu": ("heads", "columns")}
"""By platform; where there is one it is not measured."""
REPEATS, ROUNDS = 10, 5
BEYOND_CACHE = 256 << 20
"""Bytes of weights that no device's cache holds."""
MOST_BYTES = 4 << 30
"""Of keys and values of one layer that are made for the measurement."""


def fastest_attention(cfg: BackboneConfig, config: EngineConfig, mesh: Mesh | None = None, platform: str | None = None) -> Attention:
    """The implementation for single queries, of those that this platform has for this model.

    Args:
      mesh: on several devices one of them is measured with its own share of rows and heads; all processes take what the first one finds.

    Raises:
      RuntimeError: none of them works.
    """
    platform = platform or jax.default_backend()
    names = CANDIDATES.get(platform, CANDIDATES["tpu"])
    if len(names) == 1:
        return names[0]
    if mesh is not None:
        heads = {"n_heads": cfg.n_heads // mesh.shape["tensor"], "n_kv_heads": cfg.n_kv_heads // mesh.shape["tensor"]}
        cfg = dataclasses.replace(cfg, shifted_kv_heads=0, **heads)
        config = dataclasses.replace(config, rows=max(1, config.rows // row_share(mesh)))
    found, problems = {}, {}
    for name in names:
        try:
            found[name] = seconds_of(KVCache(cfg, name), config)
        except Exception as error:  # a driver, a library or a model that it cannot do
            problems[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
    said = [f"{name} {1e6 * seconds:.0f} us" for name, seconds in sorted(found.items(), key=lambda item: item[1])]
    said += [f"{name} does not work ({why})" for name, why in problems.items()]
    log.log(logging.WARNING if problems else logging.INFO, "attention of a decode step, one layer, %d rows: %s", config.rows, ", ".join(said))
    if not found:
        raise RuntimeError(f"no attention works on {platform}: {'; '.join(said)}")
    chosen = min(found, key=found.get)
    if jax.process_count() > 1:  # what compiles differently would wait for each other for ever
        chosen = names[int(broadcast_one_to_all(np.int32(names.index(chosen))))]
    return chosen


def seconds_of(kv: KVCache, config: EngineConfig) -> float:
    """One layer's attention and write for all rows, half full, in seconds. Raises whatever the implementation does."""
    cfg = kv.cfg
    a_row = 2 * config.all_slots * cfg.n_kv_heads * cfg.head_dim * cfg.dtype.itemsize
    rows = max(1, min(config.rows, MOST_BYTES // a_row))
    [pair] = KVCache(dataclasses.replace(cfg, n_layers=1), kv.attention, kv.interpret).zeros(rows, config.all_slots)
    if kv.takes_products:
        return _timed(*_steps_of_products(kv, rows, config.all_slots // 2), pair) / REPEATS
    q = jnp.ones((rows, 1, cfg.n_heads, cfg.head_dim), cfg.dtype)
    k = v = jnp.ones((rows, 1, cfg.n_kv_heads, cfg.head_dim), cfg.dtype)
    positions = jnp.full(rows, config.all_slots // 2, jnp.int32)

    def steps(q, pair):
        def step(_, carry):
            q, pair = carry
            pair = kv.write(pair, k, v, jnp.arange(rows), positions[:, None])
            return kv.attend(q, pair, positions).astype(cfg.dtype), pair

        return jax.lax.fori_loop(0, REPEATS, step, (q, pair))

    return _timed(jax.jit(steps, donate_argnums=1), q, pair) / REPEATS


def _steps_of_products(kv: KVCache, rows: int, position: int):
    """What `seconds_of` times of a cache that takes products, norms and RoPE included, and the products."""
    cfg, both = kv.cfg, kv.cfg.n_heads + kv.cfg.n_kv_heads
    scale = jnp.ones((both, cfg.head_dim), jnp.float32) if cfg.family == "qwen3" else None
    positions = jnp.full(rows, position, jnp.int32)
    rope = rope_angles(cfg, positions[:, None])

    def steps(products, pair):
        def step(_, carry):
            products, pair = carry
            mixed, pair = kv.step(products, scale, cfg.norm_eps, rope, pair, positions, positions)
            return products.at[:, :, : cfg.n_heads].set(mixed), pair

        return jax.lax.fori_loop(0, REPEATS, step, (products, pair))

    return jax.jit(steps, donate_argnums=1), jnp.ones((rows, 1, both + cfg.n_kv_heads, cfg.head_dim), cfg.dtype)


def fastest_prompts(cfg: BackboneConfig, config: EngineConfig, mesh: Mesh | None = None, platform: str | None = None) -> Literal["xla", "cudnn"]:
    """How first chunks of prompts are attended in, see `KVCache.prompts`: what is fastest for the largest of them."""
    if (platform or jax.default_backend()) != "gpu" or cfg.compute_dtype != "bfloat16" or cfg.shifted_kv_heads or mesh is not None:
        return "xla"
    chunk = min(config.chunks[-1], config.all_slots)
    rows, rng = config.width(chunk), np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((rows, chunk, n, cfg.head_dim)), cfg.dtype) for n in (cfg.n_heads, *(cfg.n_kv_heads,) * 2))
    counts, found = jnp.full(rows, chunk, jnp.int32), {}
    for name in ("cudnn", "xla"):
        kv = KVCache(cfg, "heads", prompts=name)
        try:
            found[name] = _timed(jax.jit(lambda q, pair, kv=kv: (kv.attend_first(q, *pair, counts), pair)), q, (k, v))
        except Exception as error:  # as above
            if name == "xla":
                raise
            log.warning("cuDNN does not attend in prompts (%s: %s)", type(error).__name__, str(error).splitlines()[:1])
    said = ", ".join(f"{name} {1e6 * seconds:.0f} us" for name, seconds in sorted(found.items(), key=lambda item: item[1]))
    log.info("attention of first chunks, one layer, %d of %d tokens: %s", rows, chunk, said)
    return min(found, key=found.get)


def fastest_products(static: Static, config: EngineConfig, kv: KVCache, platform: str | None = None) -> Literal["xla", "kernels"]:
    """What does a decode step's products, see `Programs`: what is faster for layers whose weights the device's cache does not hold."""
    cfg = static.cfg
    if (platform or jax.default_backend()) != "gpu" or cfg.compute_dtype != "bfloat16" or not (kv.takes_products and takes_kernels(cfg)):
        return "xla"
    of_one, params = abstract_backbone(dataclasses.replace(cfg, n_layers=1))
    shapes = jax.eval_shape(lambda params: unstack_for_decode(of_one, params, joined=True)["layers"][0], params)
    a_layer = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    layers = [jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), shapes) for _ in range(max(2, -(-BEYOND_CACHE // a_layer)))]
    x, found = jnp.ones((config.rows, 1, cfg.d_model), jnp.float32), {}
    attend = OfProducts(lambda products, *_: (products[:, :, : cfg.n_heads], None))
    for name in ("kernels", "xla"):

        def run(x, layers, name=name):
            for layer in layers:
                block = static.layer(layer, joined=True)
                x = (fused_block(block, x, None, attend, interpret=kv.interpret) if name == "kernels" else block(x, None, attend))[0]
            return x, layers

        try:
            found[name] = _timed(jax.jit(run), x, layers) / len(layers)
        except Exception as error:  # as above
            if name == "xla":
                raise
            log.warning("the kernels for a decode step's products do not work (%s: %s)", type(error).__name__, str(error).splitlines()[:1])
    said = ", ".join(f"{name} {1e6 * seconds:.0f} us" for name, seconds in sorted(found.items(), key=lambda item: item[1]))
    log.info("products of a decode step, one layer, %d rows: %s", config.rows, said)
    return min(found, key=found.get)


def least_rows(device: Any = None) -> int:
    """Rows of the smallest batch that the device (the default one's kind if None) does well. On a GPU two: XLA takes the product of a
    single row with a matrix as a multiplication, whose result it writes down, and a sum."""
    return 2 if (device.platform if device is not None else jax.default_backend()) in ("gpu", "cuda") else 1


def _timed(run, q, pair) -> float:
    """Median seconds of `q, pair = run(q, pair)`, after one that compiles."""
    seconds = []
    for _ in range(1 + ROUNDS):
        start = time.perf_counter()
        q, pair = jax.block_until_ready(run(q, pair))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
