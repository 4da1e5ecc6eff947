"""The backbone computes what transformers computes, ignores padding, and trains what it is told to."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dk_jax.models import (
    AGENTS,
    BackboneConfig,
    abstract_backbone,
    build_backbone,
    combine,
    logits,
    merge_lora,
    partition,
    trainable_mask,
)
from dk_jax.models import hidden_states as eager_hidden_states
from dk_jax.models import token_log_probs as eager_token_log_probs
from dk_jax.models.layers import rope_angles
from dk_jax.models.log_probs import chunked_log_probs

TINY = BackboneConfig(
    family="qwen3", vocab_size=61, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48
)

FULL = dataclasses.replace(TINY, head_rank=4, lora_rank=2, lora_alpha=3.0)

hidden_states = jax.jit(eager_hidden_states, static_argnums=0)
token_log_probs = jax.jit(eager_token_log_probs, static_argnums=0, static_argnames="chunk")


@functools.cache
def _built(cfg):
    return build_backbone(cfg, jax.random.key(0))


def _tokens(cfg, shape, seed=0):
    return jax.random.randint(jax.random.key(seed), shape, 0, cfg.vocab_size)


def _filled(params):
    """Replaces every zero-initialised array, so that heads and LoRA do something."""
    rng = np.random.default_rng(0)

    def fill(x):
        return x if np.any(x) else jnp.asarray(0.1 * rng.standard_normal(x.shape), x.dtype)

    return jax.tree.map(fill, params)


@functools.partial(jax.jit, static_argnums=0)
def _dense_log_probs(static, params, tokens, lengths, agents):
    return jax.nn.log_softmax(
        logits(static, params, eager_hidden_states(static, params, tokens, lengths), agents)
    )


@functools.cache
def _value_and_grad(cfg):
    """Of a loss over TINY's parameters, computed as `cfg` says."""
    static, tokens, lengths = abstract_backbone(cfg)[0], _tokens(TINY, (2, 8)), jnp.array([8, 5])
    return jax.jit(jax.value_and_grad(lambda p: jnp.sum(eager_hidden_states(static, p, tokens, lengths) ** 2)))(_built(TINY)[1])


class TestHiddenStates:
    def test_padding_has_no_influence(self):
        static, params = _built(TINY)
        tokens = _tokens(TINY, (2, 10))
        lengths = jnp.array([6, 10])
        other = tokens.at[0, 6:].set(0)
        a = hidden_states(static, params, tokens, lengths)
        np.testing.assert_array_equal(a, hidden_states(static, params, other, lengths))
        alone = hidden_states(static, params, tokens[:1, :6], lengths[:1])
        np.testing.assert_allclose(a[:1, :6], alone, atol=1e-5)
        assert not np.any(a[0, 6:])

    def test_later_tokens_have_no_influence(self):
        static, params = _built(TINY)
        tokens = _tokens(TINY, (1, 10))
        changed = tokens.at[0, 7].add(1)
        a, b = (hidden_states(static, params, t, jnp.array([10])) for t in (tokens, changed))
        np.testing.assert_array_equal(a[0, :7], b[0, :7])
        assert np.any(a[0, 7] != b[0, 7])

    def test_shifted_heads_see_the_key_of_the_token_before(self):
        """One layer whose queries are constant: the attention weight on a token follows its predecessor alone."""
        cfg = dataclasses.replace(TINY, n_layers=1, n_heads=1, n_kv_heads=1, shifted_kv_heads=1, init_std=0.5)
        static, params = _built(cfg)
        tokens = _tokens(cfg, (1, 9))

        def keys(static):
            block, x = static.layer(jax.tree.map(lambda leaf: leaf[0], params["layers"])), static.ends(params).embed.embed(tokens)
            rope = rope_angles(static.cfg, jnp.arange(9)[None])
            return block.attention(block.attention_norm(x), rope, lambda q, k, v: (v, k))[1].transpose(0, 2, 3, 1)

        kept = keys(static)
        unshifted = keys(abstract_backbone(dataclasses.replace(cfg, shifted_kv_heads=0))[0])
        assert not np.any(kept[..., 0])
        # Rotation keeps a pair's length, so lengths of the rotated pairs can be compared across positions.
        pairs = lambda k: jnp.hypot(*jnp.split(k[0, 0], 2, axis=0))  # noqa: E731
        np.testing.assert_allclose(pairs(kept)[:, 1:], pairs(unshifted)[:, :-1], atol=1e-5)
        assert np.abs(pairs(kept)[:, 1:] - pairs(unshifted)[:, 1:]).max() > 0.01

    @pytest.mark.parametrize("attention", ["xla", "blocks"])
    @pytest.mark.parametrize("remat", ["products", "attention", "full"])
    def test_remat_changes_neither_values_nor_gradients(self, remat, attention):
        plain, again = _value_and_grad(TINY), _value_and_grad(dataclasses.replace(TINY, remat=remat, attention=attention))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), plain, again)

    def test_each_remat_keeps_more_than_the_next(self):
        """Bytes that the backward pass takes from the forward pass."""
        tokens, lengths, params = _tokens(TINY, (2, 32)), jnp.array([32, 20]), _built(TINY)[1]

        def kept(remat):
            static, _ = abstract_backbone(dataclasses.replace(TINY, remat=remat))
            _, pullback = jax.vjp(lambda p: hidden_states(static, p, tokens, lengths), params)
            return sum(leaf.nbytes for leaf in jax.tree.leaves(pullback))

        sizes = [kept(remat) for remat in ("none", "products", "attention", "full")]
        assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4

    def test_remat_can_be_said_with_true_and_false_and_another_is_refused(self):
        assert [dataclasses.replace(TINY, remat=remat).remat for remat in (True, False)] == ["full", "none"]
        with pytest.raises(ValueError, match="remat is 'most'; there are none, products, attention, full"):
            dataclasses.replace(TINY, remat="most")

    def test_bfloat16_stays_near_float32(self):
        static, params = _built(TINY)
        half, _ = abstract_backbone(dataclasses.replace(TINY, compute_dtype="bfloat16"))
        tokens, lengths = _tokens(TINY, (2, 8)), jnp.array([8, 8])
        low = hidden_states(half, params, tokens, lengths)
        assert low.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            np.asarray(low, np.float32), hidden_states(static, params, tokens, lengths), atol=0.1
        )


class TestHeads:
    def test_all_agents_start_as_the_shared_backbone(self):
        shared, shared_params = _built(TINY)
        static, _ = abstract_backbone(dataclasses.replace(TINY, head_rank=4))
        params = {**shared_params, "heads": _built(FULL)[1]["heads"]}
        tokens, lengths = _tokens(TINY, (3, 6)), jnp.array([6, 6, 6])
        expected = _dense_log_probs(shared, shared_params, tokens, lengths, jnp.arange(3))
        got = _dense_log_probs(static, params, tokens, lengths, jnp.arange(3))
        np.testing.assert_array_equal(expected, got)

    def test_a_row_depends_on_its_own_agent_only(self):
        static, params = _built(FULL)
        params = _filled(params)
        tokens, lengths = jnp.tile(_tokens(TINY, (1, 6)), (3, 1)), jnp.array([6, 6, 6])
        mixed = _dense_log_probs(static, params, tokens, lengths, jnp.arange(3))
        for agent in range(len(AGENTS)):
            alone = _dense_log_probs(static, params, tokens, lengths, jnp.full(3, agent))
            np.testing.assert_allclose(mixed[agent], alone[agent], atol=1e-5)
        assert np.max(np.abs(mixed[0] - mixed[1])) > 1e-3


class TestTokenLogProbs:
    @pytest.mark.parametrize("chunk", [7, 1024])
    def test_equals_the_dense_computation(self, chunk):
        static, params = _built(FULL)
        params = _filled(params)
        tokens, lengths, agents = _tokens(FULL, (3, 11)), jnp.array([11, 4, 1]), jnp.array([0, 1, 2])
        dense = _dense_log_probs(static, params, tokens, lengths, agents)
        got = token_log_probs(static, params, tokens, lengths, agents, chunk=chunk)
        assert got.log_probs.shape == got.entropies.shape == (3, 10)
        for row, length in enumerate([11, 4, 1]):
            for t in range(10):
                if t + 1 < length:
                    p = np.asarray(dense[row, t], np.float64)
                    assert got.log_probs[row, t] == pytest.approx(p[tokens[row, t + 1]], abs=1e-5)
                    assert got.entropies[row, t] == pytest.approx(-np.sum(np.exp(p) * p), abs=1e-4)
                else:
                    assert got.log_probs[row, t] == got.entropies[row, t] == 0

    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    def test_gradients_equal_the_dense_ones_in_every_parameter(self, temperature):
        static, params = _built(FULL)
        params = _filled(params)
        tokens, lengths, agents = _tokens(FULL, (3, 11)), jnp.array([11, 4, 2]), jnp.array([0, 1, 2])
        weights = jax.random.normal(jax.random.key(5), (3, 10)) * (jnp.arange(1, 11) < lengths[:, None])

        def chunked(p):
            out = eager_token_log_probs(static, p, tokens, lengths, agents, chunk=6, temperature=temperature)
            return jnp.sum(weights * (out.log_probs + out.entropies**2))

        def dense(p):
            log_p = jax.nn.log_softmax(_dense_log_probs(static, p, tokens, lengths, agents)[:, :-1] / temperature)
            entropies = -jnp.sum(jnp.exp(log_p) * log_p, -1)
            return jnp.sum(
                weights * (jnp.take_along_axis(log_p, tokens[:, 1:, None], -1)[..., 0] + entropies**2)
            )

        a, b = jax.jit(jax.grad(chunked))(params), jax.jit(jax.grad(dense))(params)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-4, rtol=1e-3), a, b)
        assert all(np.any(leaf) for leaf in jax.tree.leaves(a))

    def test_in_bfloat16_gradients_of_a_table_are_summed_over_the_chunks_in_float32(self):
        key, chunks, vocabulary = jax.random.key(0), 64, 300
        hidden = jax.random.normal(key, (chunks, 1, 4, 32), jnp.bfloat16)
        table = 0.3 * jax.random.normal(jax.random.key(1), (vocabulary, 32))
        targets = jax.random.randint(key, (chunks, 1, 4), 0, vocabulary)

        def gradients(hidden, chunks):
            def total(hidden, table):
                split = hidden.reshape(chunks, 1, -1, 32), table, targets.reshape(chunks, 1, -1), 1.0
                return jnp.sum(chunked_log_probs(*split)[0])

            return jax.grad(total, argnums=(0, 1))(hidden, table)

        of_hidden, of_table = gradients(hidden, chunks)
        exact_hidden, exact_table = gradients(hidden.astype(jnp.float32), 1)
        assert (of_hidden.dtype, of_table.dtype) == (jnp.bfloat16, jnp.float32)

        def error(a, b):
            return float(jnp.linalg.norm(a.reshape(-1).astype(jnp.float32) - b.reshape(-1)) / jnp.linalg.norm(b))

        # Each of the 256 positions rounds by itself (2^-9); a sum that is rounded 64 times would be off by several times as much.
        assert error(of_table, exact_table) < 5e-3 and error(of_hidden, exact_hidden) < 1e-2

    def test_one_token_has_no_next_token(self):
        static, params = _built(TINY)
        with pytest.raises(ValueError, match="at least 2"):
            token_log_probs(static, params, jnp.zeros((1, 1), int), jnp.array([1]), jnp.array([0]))


class TestLora:
    def test_starts_as_the_identity_and_merges_without_a_trace(self):
        static, params = _built(FULL)
        tokens, lengths = _tokens(FULL, (2, 7)), jnp.array([7, 7])
        bare, bare_params = merge_lora(static, params)
        assert bare.cfg.lora_rank == 0
        at_start = hidden_states(static, params, tokens, lengths)
        np.testing.assert_allclose(at_start, hidden_states(bare, bare_params, tokens, lengths), atol=1e-6)
        params = _filled(params)
        bare, bare_params = merge_lora(static, params)
        trained = hidden_states(static, params, tokens, lengths)
        np.testing.assert_allclose(trained, hidden_states(bare, bare_params, tokens, lengths), atol=1e-5)
        untrained = hidden_states(*merge_lora(*_built(FULL)), tokens, lengths)
        assert np.max(np.abs(trained - untrained)) > 1e-2

    def test_mask_trains_lora_and_heads_alone(self):
        static, params = _built(FULL)
        mask = trainable_mask(static, params, "lora")
        trains = {jax.tree_util.keystr(path) for path, on in jax.tree_util.tree_leaves_with_path(mask) if on}
        assert all("lora_" in name or "heads" in name for name in trains)
        assert len(trains) == 7 * 2 + 2
        assert all(jax.tree.leaves(trainable_mask(static, params, "full")))

    def test_partition_and_combine_are_inverse(self):
        static, params = _built(FULL)
        trainable, frozen = partition(params, trainable_mask(static, params, "lora"))
        assert len(jax.tree.leaves(trainable)) == 7 * 2 + 2
        jax.tree.map(np.testing.assert_array_equal, combine(trainable, frozen), params)

    def test_asking_for_lora_without_rank_is_refused(self):
        static, params = _built(TINY)
        with pytest.raises(ValueError, match="lora_rank"):
            trainable_mask(static, params, "lora")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n_kv_heads", 3, "multiple"),
        ("head_dim", 7, "odd"),
        ("n_layers", 0, "n_layers"),
        ("attention", "cudnn", "bfloat16"),
        ("shifted_kv_heads", 3, "between 0 and n_kv_heads=2"),
        ("init_std", 0.0, "positive"),
        ("family", "gpt2", "family"),
    ],
)
def test_an_impossible_config_is_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **{field: value})
