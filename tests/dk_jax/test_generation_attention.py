"""Ways of attention and what generation makes of a model's products: equal to the trainer's, and chosen by what is there."""

import dataclasses
import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dk_jax.generation import Engine, implementation
from dk_jax.generation.implementation import fastest_attention, fastest_products, fastest_prompts
from dk_jax.generation.kv_cache import KVCache
from dk_jax.generation.programs import Programs
from dk_jax.models.backbone import OfProducts, unstack_for_decode
from dk_jax.models.decode_attention import fused_attention, fused_step
from dk_jax.models.decode_products import Cut, added, cut_of, fused_block, gated, product, takes_kernels
from dk_jax.models.first_chunk import fused_first
from dk_jax.models.layers import rope_angles, rotate
from tests.dk_jax.small_engine import CFG, EOS, SIZES, agrees, backbone, engine, prompts, requests


class TestAttention:
    @pytest.mark.parametrize(("rows", "heads", "kv_heads", "slots", "splits"), [(3, 4, 2, 200, None), (2, 8, 8, 64, 1), (5, 6, 2, 300, 4)])
    def test_the_kernel_looks_at_each_rows_slots_and_no_further(self, rows, heads, kv_heads, slots, splits):
        rng = np.random.default_rng(rows)
        cfg = dataclasses.replace(CFG, n_heads=heads, n_kv_heads=kv_heads, head_dim=16, shifted_kv_heads=0)
        q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, heads, 16), *((rows, kv_heads, slots, 16),) * 2))
        lengths = rng.integers(1, slots + 1, rows)
        lengths[0] = slots
        far = np.arange(slots)[:, None] >= lengths[:, None, None, None]
        pair = jnp.where(far, np.nan, k), jnp.where(far, np.nan, v)
        plain = KVCache(cfg, "heads").attend(q[:, None], (jnp.asarray(k), jnp.asarray(v)), jnp.asarray(lengths - 1))[:, 0]
        np.testing.assert_allclose(fused_attention(q, *pair, lengths, splits=splits, interpret=True), plain, atol=1e-5)

    @pytest.mark.parametrize(
        ("rows", "heads", "kv_heads", "slots", "head_dim", "splits", "dtype", "normed"),
        [
            (3, 4, 2, 200, 32, None, "float32", True),
            (2, 8, 8, 64, 32, 1, "float32", False),
            (5, 6, 2, 300, 64, 4, "float32", True),
            (4, 16, 8, 130, 128, 2, "bfloat16", True),
            (4, 14, 2, 70, 64, 1, "bfloat16", False),
        ],
    )
    def test_the_kernel_of_a_whole_step_does_what_its_parts_do(self, rows, heads, kv_heads, slots, head_dim, splits, dtype, normed):
        cfg = dataclasses.replace(CFG, n_heads=heads, n_kv_heads=kv_heads, head_dim=head_dim, shifted_kv_heads=0, compute_dtype=dtype)
        plain, rng = KVCache(cfg, "heads"), np.random.default_rng(rows)
        products, k, v = (
            jnp.asarray(rng.standard_normal(shape), dtype)
            for shape in ((rows, heads + 2 * kv_heads, head_dim), *((rows, kv_heads, slots, head_dim),) * 2)
        )
        scale = jnp.asarray(1 + rng.standard_normal((heads + kv_heads, head_dim)), jnp.float32) if normed else None
        positions = jnp.asarray([0, slots - 1, *rng.integers(1, slots, rows - 2)])
        rope = rope_angles(cfg, positions[:, None])
        qk = products[:, None, : heads + kv_heads]
        if normed:
            wide = qk.astype(jnp.float32)
            qk = (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5) * scale).astype(dtype)
        q, new = jnp.split(rotate(qk, *rope), [heads], axis=2)
        pair = plain.write((k, v), new, products[:, None, heads + kv_heads :], jnp.arange(rows), positions[:, None])
        expected = plain.attend(q, pair, positions)[:, 0]
        angles = tuple(each[:, 0, 0] for each in rope)
        far = np.arange(slots)[:, None] >= np.asarray(positions)[:, None, None, None]  # is not looked at, nor the token's own slot
        unread = tuple(jnp.where(far, jnp.nan, array) for array in (k, v))
        got, kept = fused_step(products, scale, angles, *unread, positions, positions, eps=1e-5, splits=splits, interpret=True)
        close = {"float32": 2e-6, "bfloat16": 1e-2}[dtype]
        np.testing.assert_allclose(got.astype(jnp.float32), expected.astype(jnp.float32), atol=close, rtol=close)
        for array, wanted in zip(kept, pair, strict=True):
            there = ~np.broadcast_to(np.arange(slots)[:, None] > np.asarray(positions)[:, None, None, None], array.shape)
            np.testing.assert_allclose(np.asarray(array, np.float32)[there], np.asarray(wanted, np.float32)[there], atol=close, rtol=close)
        nowhere = jnp.full(rows, slots + 1)
        _, kept = fused_step(products, scale, angles, k, v, positions, nowhere, eps=1e-5, splits=splits, interpret=True)
        for array, before in zip(kept, (k, v), strict=True):
            np.testing.assert_array_equal(array, before)

    def test_an_engine_whose_steps_start_from_the_products_is_the_trainer(self):
        cfg = dataclasses.replace(CFG, head_dim=32, shifted_kv_heads=0)
        kv = KVCache(cfg, "fused", interpret=True)
        assert kv.takes_products
        assert not any(
            KVCache(dataclasses.replace(cfg, **change), "fused").takes_products
            for change in ({"head_dim": 16}, {"shifted_kv_heads": 1}, {"lora_rank": 2, "lora_targets": ("q",)})
        )
        mine = Programs(backbone(cfg)[0], kv, eos_id=EOS, stops=(), block=4)
        some = requests(prompts([5, 21, 9]), new=5)
        got = Engine(backbone(cfg)[0], dataclasses.replace(SIZES, attention="fused"), mine).run(backbone(cfg)[1], some)
        for one, sample in zip(some, got, strict=True):
            agrees(one.tokens, sample, one.agent, cfg)

    @pytest.mark.parametrize("attention", ["fused", "cudnn"])
    def test_rows_are_copied_together_as_one_after_the_other(self, attention):
        cfg, rng = dataclasses.replace(CFG, head_dim=16, compute_dtype="bfloat16"), np.random.default_rng(0)
        kv = KVCache(cfg, attention, interpret=True)
        assert kv.copies_together and not KVCache(cfg, "heads").copies_together
        pair = tuple(jnp.asarray(rng.standard_normal(array.shape), array.dtype) for array in kv.zeros(5, 300)[0])
        source, target = jnp.asarray([1, 1, 3, 0]), jnp.asarray([0, 4, 2, 0])
        expected = pair
        for one in range(3):
            expected = kv.copy(expected, source[one], target[one], 270)
        got = kv.copy_together(pair, source, target, jnp.int32(3), 270)
        for mine, wanted, before in zip(got, expected, pair, strict=True):
            np.testing.assert_array_equal(mine, wanted)
            assert np.any(np.asarray(mine != before))

    def test_a_cache_for_the_kernel_is_written_and_read_like_any_other(self):
        cfg = dataclasses.replace(CFG, head_dim=16)
        mine = Programs(backbone(cfg)[0], KVCache(cfg, "fused", interpret=True), eos_id=EOS, stops=(), block=4)
        config = dataclasses.replace(SIZES, attention="fused")
        some = requests(prompts([5, 21, 9]), new=5)
        fused = Engine(backbone(cfg)[0], config, mine).run(backbone(cfg)[1], some)
        for one, sample in zip(some, fused, strict=True):
            agrees(one.tokens, sample, one.agent, cfg)

    @pytest.mark.parametrize("attention", ["columns", "heads", "fused"])
    def test_first_chunks_that_look_at_themselves_alone_are_the_trainers(self, attention):
        cfg = dataclasses.replace(CFG, shifted_kv_heads=0, head_dim=16)
        mine = Programs(backbone(cfg)[0], KVCache(cfg, attention, interpret=True, prompts="blocks"), eos_id=EOS, stops=(), block=4)
        some = requests(prompts([1, 2, 9, 17, 40, 5, 21, 9]), new=5)
        got = Engine(backbone(cfg)[0], SIZES, mine).run(backbone(cfg)[1], some)
        for one, sample in zip(some, got, strict=True):
            agrees(one.tokens, sample, one.agent, cfg)
        fed = [sizes[4] for sizes in mine._seen if sizes[0] == "feed"]
        assert True in fed and False in fed, "prompts of several chunks go on by looking at the cache"

    @pytest.mark.parametrize(("attention", "slots"), [("columns", 24), ("heads", 24), ("fused", 24), ("cudnn", 24), ("heads", 6)])
    def test_first_tokens_lie_where_each_would_be_put_by_itself(self, attention, slots):
        cfg = dataclasses.replace(CFG, shifted_kv_heads=0, head_dim=16, compute_dtype="bfloat16")
        kv, rng = KVCache(cfg, attention), np.random.default_rng(0)
        [pair, *_] = kv.zeros(5, slots)  # of padding, slots may be too few
        k, v = (jnp.asarray(rng.standard_normal((3, 8, cfg.n_kv_heads, 16)), cfg.dtype) for _ in "kv")
        rows = jnp.array([4, 1, 5])  # the last one is nobody
        where = jnp.broadcast_to(jnp.arange(8), (3, 8))
        for mine, wanted in zip(kv.write_first(pair, k, v, rows), kv.write(pair, k, v, rows, where), strict=True):
            np.testing.assert_array_equal(mine, wanted)
            assert np.count_nonzero(np.asarray(mine, np.float32)) == 2 * min(8, slots) * cfg.n_kv_heads * 16

    @pytest.mark.parametrize(
        ("heads", "kv_heads", "length", "slots", "head_dim", "dtype", "normed", "heads_first"),
        [
            (4, 2, 40, 64, 32, "float32", True, True),
            (4, 2, 40, 64, 32, "float32", True, False),
            (6, 2, 64, 50, 64, "float32", False, True),
            (8, 8, 7, 20, 32, "bfloat16", False, False),
            (8, 2, 33, 40, 128, "bfloat16", True, True),
        ],
    )
    def test_the_kernel_of_first_tokens_does_what_its_parts_do(self, heads, kv_heads, length, slots, head_dim, dtype, normed, heads_first):
        cfg = dataclasses.replace(CFG, n_heads=heads, n_kv_heads=kv_heads, head_dim=head_dim, shifted_kv_heads=0, compute_dtype=dtype)
        kv, rng = KVCache(cfg, "fused" if heads_first else "heads"), np.random.default_rng(length)
        if not heads_first and dtype == "bfloat16":
            kv = KVCache(cfg, "cudnn")
        products = jnp.asarray(rng.standard_normal((3, length, heads + 2 * kv_heads, head_dim)), dtype)
        scale = jnp.asarray(1 + rng.standard_normal((heads + kv_heads, head_dim)), jnp.float32) if normed else None
        rope = rope_angles(cfg, jnp.broadcast_to(jnp.arange(length), (3, length)))
        qk, value = products[:, :, : heads + kv_heads], products[:, :, heads + kv_heads :]
        if normed:
            wide = qk.astype(jnp.float32)
            qk = (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5) * scale).astype(dtype)
        query, key = jnp.split(rotate(qk, *rope), [heads], axis=2)
        rows = jnp.array([4, 1, 5])  # the last one is nobody
        [pair, *_] = KVCache(cfg, kv.attention).zeros(5, slots)
        pair = tuple(jnp.asarray(rng.standard_normal(array.shape), dtype) for array in pair)
        wanted = kv.write_first(pair, key, value, rows)
        angles = tuple(each[0, :, 0] for each in rope)
        laid = tuple(array if heads_first or kv.attention == "cudnn" else array.swapaxes(1, 2) for array in pair)
        q, k, v, kept = fused_first(products, scale, angles, *laid, rows, eps=1e-5, heads_first=heads_first, interpret=True)
        if kv.attention == "heads":
            kept = tuple(array.swapaxes(1, 2) for array in kept)
        close = {"float32": 2e-6, "bfloat16": 1e-2}[dtype]
        for got, expected in zip((q, k, v, *kept), (query, key, value, *wanted), strict=True):
            np.testing.assert_allclose(got.astype(jnp.float32), expected.astype(jnp.float32), atol=close, rtol=close)
        for array, before in zip(kept, pair, strict=True):
            same = np.asarray(array == before).all(axis=tuple(range(1, array.ndim)))
            assert same.tolist() == [True, False, True, True, False], "rows that are nobody's are as they were"

    @pytest.mark.parametrize("attention", ["fused", "cudnn"])
    def test_first_chunks_that_start_from_the_products_are_the_trainers(self, attention):
        cfg = dataclasses.replace(CFG, shifted_kv_heads=0, head_dim=32)
        assert KVCache(cfg, "fused", prompts="blocks").takes_first_products
        assert not any(
            KVCache(dataclasses.replace(cfg, **change), kind, prompts=by).takes_first_products
            for change, kind, by in (
                ({"head_dim": 16}, "fused", "blocks"), ({}, "fused", "xla"), ({}, "heads", "blocks"),
                ({"lora_rank": 2, "lora_targets": ("q",)}, "fused", "blocks"),
            )
        )  # fmt: skip
        if attention == "cudnn":  # its layout; its kernel is not had here, so that is the prompts' part alone
            wide = dataclasses.replace(cfg, compute_dtype="bfloat16")
            kv, rng = KVCache(wide, "cudnn", interpret=True, prompts="blocks"), np.random.default_rng(0)
            [pair, *_] = kv.zeros(4, 24)
            heads = wide.n_heads + 2 * wide.n_kv_heads
            products = jnp.asarray(rng.standard_normal((2, 8, heads, 32)), wide.dtype)
            rope = rope_angles(wide, jnp.broadcast_to(jnp.arange(8), (2, 8)))
            scale = jnp.ones((heads - wide.n_kv_heads, 32), jnp.float32)
            rows, counts = jnp.array([2, 0]), jnp.array([8, 5])
            mixed, kept = kv.first_step(products, scale, wide.norm_eps, rope, pair, rows, counts)
            other, same = KVCache(wide, "fused", interpret=True, prompts="blocks"), tuple(array.swapaxes(1, 2) for array in pair)
            wanted, (keys, values) = other.first_step(products, scale, wide.norm_eps, rope, same, rows, counts)
            for got, expected in zip((mixed, *kept), (wanted, keys.swapaxes(1, 2), values.swapaxes(1, 2)), strict=True):
                np.testing.assert_array_equal(got, expected)
            return
        mine = Programs(backbone(cfg)[0], KVCache(cfg, attention, interpret=True, prompts="blocks"), eos_id=EOS, stops=(), block=4)
        some = requests(prompts([1, 2, 9, 17, 40, 5, 21, 9]), new=5)
        got = Engine(backbone(cfg)[0], SIZES, mine).run(backbone(cfg)[1], some)
        for one, sample in zip(some, got, strict=True):
            agrees(one.tokens, sample, one.agent, cfg)
        fed = [sizes[4] for sizes in mine._seen if sizes[0] == "feed"]
        assert True in fed and False in fed, "prompts of several chunks go on by looking at the cache"

    def test_a_joined_product_is_in_the_place_of_its_parts_where_none_has_lora(self):
        static, params = backbone(dataclasses.replace(CFG, lora_rank=2, lora_targets=("v", "down")))
        [layer, _] = unstack_for_decode(static, params, joined=True)["layers"]
        assert {"q", "k", "v", "q_norm"} <= layer["attention"].keys() and layer["mlp"].keys() == {"gate_up", "down"}
        static, params = backbone()
        [layer, _] = unstack_for_decode(static, params, joined=True)["layers"]
        assert layer["attention"].keys() == {"qkv", "qk_norm", "o"}
        x, seen = jnp.ones((2, 3, CFG.d_model)), []
        plain = unstack_for_decode(static, params)["layers"][0]
        for parts, joined in ((plain, False), (layer, True)):
            look = lambda q, k, v: (seen.append((q, k, v)) or q, None)  # noqa: E731
            seen.append(static.layer(parts, joined)(x, rope_angles(CFG, jnp.arange(6).reshape(2, 3)), look)[0])
        for one, other in zip(*(jax.tree.leaves(half) for half in (seen[:2], seen[2:])), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)

    @pytest.mark.parametrize(
        ("prompts", "change", "message"),
        [("cudnn", {}, "shifted"), ("cudnn", {"shifted_kv_heads": 0}, "bfloat16"), ("flash", {}, "choose 'xla', 'blocks' or 'cudnn'")],
    )
    def test_what_cannot_be_done_with_prompts_is_said(self, prompts, change, message):
        with pytest.raises(ValueError, match=message):
            KVCache(dataclasses.replace(CFG, **change), "columns", prompts=prompts)

    def test_a_batch_of_one_is_no_batch_for_a_gpu(self, monkeypatch):
        assert implementation.least_rows(SimpleNamespace(platform="gpu")) == 2 and implementation.least_rows() == 1
        one = dataclasses.replace(SIZES, rows=1)
        assert engine(one).config.rows == 1
        monkeypatch.setattr("dk_jax.generation.engine.least_rows", lambda device: 2)
        some = requests(prompts([5, 9, 21]), new=5)
        two = engine(one)
        assert two.config.rows == 2
        for got, expected in zip(two.run(backbone()[1], some), engine().run(backbone()[1], some), strict=True):
            assert got.tokens == expected.tokens

    def test_prompts_are_attended_in_by_what_is_there_and_fastest(self, caplog):
        cfg = dataclasses.replace(CFG, shifted_kv_heads=0, compute_dtype="bfloat16")
        with caplog.at_level(logging.INFO, "dk_jax.generation.implementation"):
            assert fastest_prompts(cfg, SIZES, platform="gpu") == "xla"
        assert "cuDNN does not attend in prompts" in caplog.text and "2 of 16 tokens: xla" in caplog.text
        assert fastest_prompts(CFG, SIZES, platform="gpu") == fastest_prompts(cfg, SIZES) == "xla"

    @pytest.mark.parametrize(
        ("attention", "change", "message"),
        [("cudnn", {}, "bfloat16"), ("fused", {}, "power of two"), ("fused", {"head_dim": 48}, "head_dim"), ("flash", {}, "choose one")],
    )
    def test_what_an_implementation_cannot_do_is_said(self, attention, change, message):
        with pytest.raises(ValueError, match=message):
            KVCache(dataclasses.replace(CFG, **change), attention)

    def test_the_fastest_that_works_is_taken_and_all_are_named(self, monkeypatch, caplog):
        def seconds_of(kv, config):
            if kv.attention == "heads":
                return 1e-3
            raise NotImplementedError("not on this machine")

        monkeypatch.setattr(implementation, "seconds_of", seconds_of)
        with caplog.at_level(logging.INFO, "dk_jax.generation.implementation"):
            assert fastest_attention(CFG, SIZES, platform="gpu") == "heads"
        assert "heads 1000 us" in caplog.text and "fused does not work" in caplog.text and "cudnn does not work" in caplog.text
        monkeypatch.setitem(implementation.CANDIDATES, "gpu", ("cudnn", "fused"))
        with pytest.raises(RuntimeError, match="no attention works on gpu"):
            fastest_attention(CFG, SIZES, platform="gpu")

    def test_a_measurement_measures(self):
        assert 0 < implementation.seconds_of(KVCache(CFG, "columns"), SIZES) < 1
        assert fastest_attention(CFG, SIZES, platform="tpu") in ("heads", "columns")


class TestProducts:
    """Kernels in the place of a decode step's products."""

    CFG = dataclasses.replace(CFG, d_model=64, d_ff=96, head_dim=32, shifted_kv_heads=0)

    @pytest.mark.parametrize("cut", [None, Cut(16, 32, 16), Cut(32, 16, 64)])
    @pytest.mark.parametrize(("rows", "dtype"), [(3, "float32"), (40, "float32"), (64, "bfloat16")])
    def test_they_are_xlas(self, rows, dtype, cut):
        rng = np.random.default_rng(rows)
        x, plain, both = (jnp.asarray(rng.standard_normal(shape), dtype) / 8 for shape in ((rows, 192), (192, 64), (192, 128)))
        residual = jnp.asarray(rng.standard_normal((rows, 64)), jnp.float32)
        gate, up = jnp.split(x @ both, 2, axis=-1)
        pairs = (
            (product(x, plain, cut=cut, interpret=True), x @ plain),
            (gated(x, both, cut=cut, interpret=True), jax.nn.silu(gate) * up),
            (added(residual, x, plain, cut=cut, interpret=True), residual + x @ plain),
        )
        close = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
        for got, expected in pairs:
            assert got.shape == expected.shape and got.dtype == expected.dtype
            np.testing.assert_allclose(got.astype(jnp.float32), expected.astype(jnp.float32), atol=close, rtol=close)

    def test_a_matrix_is_shared_out_to_enough_programs_in_pieces_that_fit(self):
        assert cut_of(64, 1024, 4096)[:3] == (64, 32, 128)
        assert cut_of(64, 3072, 1024)[:3] == (32, 16, 128), "few columns: rows are shared out, too"
        assert cut_of(256, 4096, 12288, widest=64)[:3] == (64, 64, 128)
        assert cut_of(2, 96, 48)[:3] == (16, 16, 32), "of the smallest there are"
        with pytest.raises(ValueError, match="192 places and 64 columns does not divide into pieces of 128 and 16"):
            product(jnp.ones((2, 192)), jnp.ones((192, 64)), cut=Cut(16, 16, 128), interpret=True)

    @pytest.mark.parametrize("family", ["llama", "qwen3"])
    def test_a_block_by_kernels_is_the_block(self, family):
        static, params = backbone(dataclasses.replace(self.CFG, family=family))
        [layer, _] = unstack_for_decode(static, params, joined=True)["layers"]
        rope = rope_angles(static.cfg, jnp.arange(5)[:, None])
        look = OfProducts(lambda products, scale, eps, rope: (jnp.tanh(products[:, :, : static.cfg.n_heads]), eps))
        block, x = static.layer(layer, joined=True), jax.random.normal(jax.random.key(1), (5, 1, 64))
        (got, kept), (expected, same) = fused_block(block, x, rope, look, interpret=True), block(x, rope, look)
        np.testing.assert_allclose(got, expected, atol=1e-5)
        assert got.shape == expected.shape and kept == same

    def test_an_engine_by_kernels_is_the_trainer(self):
        static, params = backbone(self.CFG)
        mine = Programs(static, KVCache(self.CFG, "fused", interpret=True), eos_id=EOS, stops=(), block=4, products="kernels")
        some = requests(prompts([5, 21, 9]), new=5)
        got = Engine(static, dataclasses.replace(SIZES, attention="fused"), mine).run(params, some)
        for one, sample in zip(some, got, strict=True):
            agrees(one.tokens, sample, one.agent, self.CFG)

    def test_what_cannot_be_done_by_kernels_is_said(self):
        assert takes_kernels(self.CFG)
        changes = ({"d_ff": 100}, {"lora_rank": 2, "lora_targets": ("o",)}, {"lora_rank": 2, "lora_targets": ("gate",)})
        for change in changes:
            cfg = dataclasses.replace(self.CFG, **change)
            assert not takes_kernels(cfg)
            with pytest.raises(ValueError, match="needs attention 'fused' on one device, sizes that divide by 16"):
                Programs(backbone(cfg)[0], KVCache(cfg, "fused", interpret=True), eos_id=EOS, stops=(), block=4, products="kernels")
        with pytest.raises(ValueError, match="choose 'xla' or 'kernels'"):
            Programs(backbone(self.CFG)[0], KVCache(self.CFG, "fused"), eos_id=EOS, stops=(), block=4, products="triton")

    def test_the_faster_ones_are_measured_and_named(self, caplog, monkeypatch):
        monkeypatch.setattr(implementation, "BEYOND_CACHE", 1)
        cfg = dataclasses.replace(self.CFG, compute_dtype="bfloat16")
        static, kv = backbone(cfg)[0], KVCache(cfg, "fused", interpret=True)
        assert fastest_products(static, SIZES, kv) == "xla", "on a CPU"
        assert fastest_products(static, SIZES, KVCache(cfg, "heads"), platform="gpu") == "xla" and not caplog.records
        with caplog.at_level(logging.INFO, "dk_jax.generation.implementation"):
            chosen = fastest_products(static, SIZES, kv, platform="gpu")
        [said] = [record.getMessage() for record in caplog.records]
        assert said.startswith(f"products of a decode step, one layer, {SIZES.rows} rows: {chosen} ")
        assert "xla" in said and "kernels" in said
        monkeypatch.setattr(implementation, "fused_block", lambda *_, **__: 1 / 0)
        with caplog.at_level(logging.INFO, "dk_jax.generation.implementation"):
            assert fastest_products(static, SIZES, kv, platform="gpu") == "xla"
        assert "do not work (ZeroDivisionError" in caplog.text
