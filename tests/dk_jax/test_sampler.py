"""The sampler draws from the model it is given, reports the right probabilities, and keeps rows apart."""

import dataclasses
import functools
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dk_jax.generation import Engine, Request, SamplerConfig, make_sampler
from dk_jax.generation.choice import Draw, choose_tokens, likely
from dk_jax.models import BackboneConfig, hidden_states, logits, token_log_probs
from tests.dk_jax.filled import filled_backbone

EOS = 2
CFG = BackboneConfig(
    family="qwen3",
    vocab_size=61,
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    d_ff=48,
    head_rank=3,
    lora_rank=2,
)
SIZES = SamplerConfig(
    eos_id=EOS,
    max_new_tokens=20,
    max_length_tokens=64,
    batch_buckets=(4,),
    chunks=(16, 32),
    block=8,
    cache_step=64,
)


_choose = jax.jit(choose_tokens, static_argnums=4)
_score = jax.jit(token_log_probs, static_argnums=0, static_argnames="temperature")
_left = jax.jit(likely)


@functools.cache
def _backbone(cfg=CFG):
    return filled_backbone(cfg)


@functools.cache
def _sampler(config=SIZES, cfg=CFG):
    return make_sampler(_backbone(cfg)[0], config)


def _prompts(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, CFG.vocab_size, n).tolist() for n in lengths]


def _sample(prompts, agents=None, keys=None, config=SIZES, cfg=CFG, **overrides):
    agents = agents or [i % 3 for i in range(len(prompts))]
    keys = keys or list(range(100, 100 + len(prompts)))
    return _sampler(config, cfg).sample(_backbone(cfg)[1], prompts, agents, keys, **overrides)


def _trainer_log_probs(prompts, samples, agents, cfg=CFG, temperature=1.0):
    """What `token_log_probs` says about each sampled token."""
    static, params = _backbone(cfg)
    rows = [p + s.tokens for p, s in zip(prompts, samples, strict=True)]
    width = -(-max(map(len, rows)) // 64) * 64  # few widths, each compiled once
    tokens = jnp.asarray([row + [0] * (width - len(row)) for row in rows])
    lengths = jnp.asarray([len(row) for row in rows])
    table = np.asarray(_score(static, params, tokens, lengths, jnp.asarray(agents), temperature=temperature).log_probs)
    return [table[i, len(p) - 1 : len(rows[i]) - 1] for i, p in enumerate(prompts)]


def _assert_same(a, b, exact=True):
    assert a.tokens == b.tokens
    assert a.stop == b.stop
    for name in ("logp_sample", "logp_model"):
        if exact:
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
        else:
            np.testing.assert_allclose(getattr(a, name), getattr(b, name), atol=1e-4)


class TestAgreementWithTheTrainer:
    @pytest.mark.parametrize("family", ["llama", "qwen3"])
    @pytest.mark.parametrize("shifted", [0, 1, 2])
    def test_log_probs_equal_over_prompts_of_different_lengths(self, family, shifted):
        cfg = dataclasses.replace(CFG, family=family, tie_embeddings=family == "qwen3", shifted_kv_heads=shifted)
        prompts, agents = _prompts([1, 5, 16, 17]), [0, 1, 2, 1]
        samples = _sample(prompts, agents, cfg=cfg)
        assert sum(len(s.tokens) for s in samples) > 20
        for sample, expected in zip(samples, _trainer_log_probs(prompts, samples, agents, cfg), strict=True):
            np.testing.assert_allclose(sample.logp_model, expected, atol=1e-4)
            np.testing.assert_array_equal(sample.logp_sample, sample.logp_model)

    @pytest.mark.parametrize("shifted", [0, 1])
    def test_log_probs_equal_over_turns(self, shifted):
        cfg = dataclasses.replace(CFG, shifted_kv_heads=shifted)
        prompts, agents = _prompts([3, 9]), [1, 1]
        first = _sample(prompts, agents, max_new_tokens=6, cfg=cfg)
        feedback = _prompts([4, 7], seed=1)
        longer = [p + s.tokens + f for p, s, f in zip(prompts, first, feedback, strict=True)]
        second = _sample(longer, agents, keys=[7, 8], max_new_tokens=12, cfg=cfg)
        for sample, expected in zip(second, _trainer_log_probs(longer, second, agents, cfg), strict=True):
            np.testing.assert_allclose(sample.logp_model, expected, atol=1e-4)

    @pytest.mark.parametrize("temperature", [0.5, 1.7])
    def test_sampling_log_probs_equal_the_trainers_at_the_samplers_temperature(self, temperature):
        prompts, agents = _prompts([4, 8, 12]), [0, 1, 2]
        samples = _sample(prompts, agents, config=dataclasses.replace(SIZES, temperature=temperature))
        scored = _trainer_log_probs(prompts, samples, agents, temperature=temperature)
        for sample, expected in zip(samples, scored, strict=True):
            np.testing.assert_allclose(sample.logp_sample, expected, atol=1e-4)
            assert not np.allclose(sample.logp_sample, sample.logp_model, atol=1e-3)

    def test_temperature_and_top_p_do_not_leak_into_the_model_log_probs(self):
        config = dataclasses.replace(SIZES, temperature=0.7, top_p=0.8)
        prompts, agents = _prompts([4, 8, 12]), [0, 1, 2]
        samples = _sample(prompts, agents, config=config)
        for sample, expected in zip(samples, _trainer_log_probs(prompts, samples, agents), strict=True):
            np.testing.assert_allclose(sample.logp_model, expected, atol=1e-4)
            assert np.mean(sample.logp_sample) > np.mean(sample.logp_model)

    def test_greedy_takes_the_most_likely_token_each_time(self):
        static, params = _backbone()
        prompts = _prompts([3, 11])
        samples = _sample(prompts, [0, 2], temperature=0.0, max_new_tokens=6)
        for prompt, sample, agent in zip(prompts, samples, [0, 2], strict=True):
            row = prompt + sample.tokens
            padded = jnp.asarray([row + [0] * (20 - len(row))])
            hidden = hidden_states(static, params, padded, jnp.asarray([len(row)]))
            best = np.argmax(logits(static, params, hidden, jnp.asarray([agent]))[0], axis=-1)
            assert sample.tokens == best[len(prompt) - 1 : len(row) - 1].tolist()
            assert not np.any(sample.logp_sample)


class TestRowsAreIndependent:
    def test_neighbours_do_not_change_a_single_bit(self):
        mine = _prompts([9])[0]
        a = _sample([mine, *_prompts([9, 12, 14], seed=1)], [1, 0, 2, 1], [5, 1, 2, 3])
        b = _sample([mine, *_prompts([10, 15, 16], seed=2)], [1, 2, 2, 0], [5, 9, 8, 7])
        assert len(a[0].tokens) > 3
        _assert_same(a[0], b[0])
        assert a[1].tokens != b[1].tokens

    def test_samples_of_one_prompt_differ_by_key_alone(self):
        prompt = _prompts([9])[0]
        a, b, again, _ = _sample([prompt] * 4, [1] * 4, [5, 6, 5, 7])
        _assert_same(a, again)
        assert a.tokens != b.tokens

    def test_a_seed_is_the_key_that_jax_makes_of_it(self):
        key = jax.random.key(5)
        a, b, c = _sample([_prompts([9])[0]] * 3, [1] * 3, [5, key, np.asarray(jax.random.key_data(key))])
        _assert_same(a, b)
        _assert_same(a, c)

    def test_more_rows_than_a_batch_come_back_in_order(self):
        prompts = _prompts([12, 3, 7, 16, 1, 9, 30, 2, 5])
        agents, keys = [i % 3 for i in range(9)], list(range(9))
        together = _sample(prompts, agents, keys)
        for i in (0, 4, 6, 8):
            _assert_same(together[i], _sample([prompts[i]], [agents[i]], [keys[i]])[0], exact=False)

    @pytest.mark.parametrize("streams", [2, 3])
    def test_streams_only_share_out_the_rows(self, streams):
        prompts = _prompts([12, 3, 7, 16, 1, 9, 30, 2, 5, 6, 4])
        agents, keys = [i % 3 for i in range(11)], list(range(11))
        config = dataclasses.replace(SIZES, streams=streams)
        together = _sample(prompts, agents, keys, config=config)
        for i, alone in enumerate(_sample(prompts, agents, keys)):
            _assert_same(together[i], alone, exact=False)
        for one, again in zip(together, _sample(prompts, agents, keys, config=config), strict=True):
            _assert_same(one, again)

    def test_what_goes_wrong_in_one_stream_is_raised(self, monkeypatch):
        sampler = make_sampler(_backbone()[0], dataclasses.replace(SIZES, streams=2))
        monkeypatch.setattr(Engine, "_collect", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(MemoryError, match="no room"):
            sampler.sample(_backbone()[1], _prompts([3] * 8), [0] * 8, list(range(8)))

    @pytest.mark.parametrize("shifted", [0, 1])
    def test_growing_the_cache_changes_nothing(self, shifted):
        cfg = dataclasses.replace(CFG, shifted_kv_heads=shifted)
        prompts = _prompts([3, 14])
        small = dataclasses.replace(SIZES, block=4, cache_step=4)
        for a, b in zip(_sample(prompts, cfg=cfg), _sample(prompts, config=small, cfg=cfg), strict=True):
            _assert_same(a, b, exact=False)


class TestConversations:
    @pytest.mark.parametrize("streams", [1, 2])
    def test_kept_ones_go_on_where_they_are_and_a_call_without_keeping_ends_them(self, streams):
        static, params = _backbone()
        sampler = make_sampler(static, dataclasses.replace(SIZES, streams=streams, batch_buckets=(2, 4)))
        prompts, agents = _prompts([9, 12, 5, 7, 11, 3]), [0, 1, 2, 0, 1, 2]
        first = sampler.sample(params, prompts, agents, range(6), max_new_tokens=6, keep=True)
        engines = list(sampler._engines)
        assert len(engines) == streams and sum(s.conversation.row is not None for s in first) == min(6, 4 * streams)
        more = _prompts([4] * 6, seed=1)
        second = sampler.sample(params, more, agents, range(6), max_new_tokens=6, conversations=[s.conversation for s in first])
        assert sampler._engines == [] and sum(engine.counts.refed for engine in engines) >= (2 if streams == 1 else 0)
        longer = [p + s.tokens + m for p, s, m in zip(prompts, first, more, strict=True)]
        for sample, expected in zip(second, _trainer_log_probs(longer, second, agents), strict=True):
            np.testing.assert_allclose(sample.logp_model, expected, atol=1e-4)
        again = sampler.sample(params, longer, agents, range(6), max_new_tokens=6)
        assert [s.tokens for s in again] == [s.tokens for s in second]


class TestStopping:
    def test_every_reason_is_reported(self):
        prompts = _prompts([5, 8, 58, 64])
        samples = _sample(prompts, keys=[3, 4, 5, 6], max_new_tokens=20)
        assert samples[2].stop == "cache_full" and len(samples[2].tokens) == 6
        assert samples[3].stop == "cache_full" and samples[3].tokens == []
        seen = {
            sample.stop: sample
            for seed in range(8)
            for sample in _sample(prompts[:2] * 2, keys=[seed * 4 + i for i in range(4)])
        }
        assert set(seen) == {"eos", "length"}
        assert seen["eos"].tokens[-1] == EOS and EOS not in seen["eos"].tokens[:-1]
        assert len(seen["length"].tokens) == 20 and EOS not in seen["length"].tokens

    def test_an_eos_in_the_prompt_is_just_a_token(self):
        samples = _sample([[EOS, 5, EOS], [5, EOS, 0]], keys=[11, 12])
        assert all(samples[i].tokens for i in range(2))
        agreed = _trainer_log_probs([[EOS, 5, EOS], [5, EOS, 0]], samples, [0, 1])
        for sample, expected in zip(samples, agreed, strict=True):
            np.testing.assert_allclose(sample.logp_model, expected, atol=1e-4)


class TestCompilations:
    def test_only_new_sizes_compile(self):
        sampler = make_sampler(_backbone()[0], SIZES)
        params = _backbone()[1]
        sampler.sample(params, _prompts([3, 9]), [0, 1], [1, 2])
        first = sampler.compilations
        assert first == 3  # weights, feeding, decode
        halved = jax.tree.map(lambda x: x / 2, params)
        sampler.sample(halved, _prompts([16, 2, 7]), [2, 1, 0], [4, 5, 6], max_new_tokens=11, temperature=0.0)
        assert sampler.compilations == first
        sampler.sample(params, _prompts([4]), [0], [0])  # a prompt fed by itself
        assert sampler.compilations == first + 1
        sampler.sample(params, _prompts([4] * 9), [0] * 9, list(range(9)))
        assert sampler.compilations == first + 1
        sampler.sample(params, _prompts([30]), [0], [0])  # the next size of prompts shares the decode program
        assert sampler.compilations == first + 2

    def test_streams_compile_nothing_twice(self):
        sampler = make_sampler(_backbone()[0], dataclasses.replace(SIZES, streams=2))
        sampler.sample(_backbone()[1], _prompts([9] * 8), [0] * 8, list(range(8)))
        assert sampler.compilations == 3

    @pytest.mark.parametrize(
        ("groups", "shares"), [([3], [3]), ([1] * 4, [4]), ([1] * 5, [3, 2]), ([4, 4, 1], [5, 4]), ([8, 2, 2, 2], [8, 6])]
    )
    def test_two_streams_get_like_numbers_of_rows_and_equal_prompts_stay_together(self, groups, shares):
        prompts = [prompt for prompt, n in zip(_prompts(range(20, 20 - len(groups), -1)), groups, strict=True) for _ in range(n)]
        sampler = make_sampler(_backbone()[0], dataclasses.replace(SIZES, streams=2))
        requests = [Request(tokens=prompt, agent=0, key=0, max_new_tokens=1) for prompt in prompts]
        found = [share for _, share in sampler._shares(requests)]
        assert [len(share) for share in found] == shares
        assert sorted(place for share in found for place in share) == list(range(len(prompts)))
        assert not any({tuple(prompts[i]) for i in one} & {tuple(prompts[i]) for i in other} for one, other in combinations(found, 2))

    def test_samplers_that_draw_otherwise_share_programs(self):
        static, params = _backbone()
        base = make_sampler(static, SIZES)
        base.sample(params, _prompts([3, 9]), [0, 1], [1, 2])
        first = base.compilations
        greedy, nucleus = base.drawing(temperature=0.0), base.drawing(temperature=0.7, top_p=0.5)
        alone = make_sampler(static, dataclasses.replace(SIZES, temperature=0.7, top_p=0.5))
        arguments = (params, _prompts([3, 9]), [0, 1], [1, 2])
        drawn = [[s.tokens for s in sampler.sample(*arguments)] for sampler in (greedy, nucleus, alone)]
        assert drawn[1] == drawn[2] != drawn[0]
        assert drawn[0] == [s.tokens for s in base.sample(*arguments, temperature=0.0)]
        assert base.compilations == greedy.compilations == nucleus.compilations == first + 1  # the choice within a nucleus
        assert base.config.temperature == SIZES.temperature


class TestChoice:
    LOGITS = jnp.log(jnp.array([0.5, 0.2, 0.15, 0.1, 0.05]))

    def _draw(self, n, temperature, top_p, step=0, top_k=0, min_p=0.0):
        keys = jax.vmap(jax.random.key_data)(jax.random.split(jax.random.key(0), n))
        table = jnp.tile(self.LOGITS, (n, 1))
        draw = Draw(*(jnp.full(n, value) for value in (float(temperature), top_k, float(top_p), float(min_p))))
        return map(np.asarray, _choose(table, keys, jnp.full(n, step), draw, top_p < 1 or top_k > 0 or min_p > 0))

    @pytest.mark.parametrize(
        ("temperature", "more", "expected"),
        [
            (1.0, {}, [0.5, 0.2, 0.15, 0.1, 0.05]),
            (0.5, {}, [0.769, 0.123, 0.069, 0.031, 0.008]),
            (1.0, {"top_p": 0.8}, [0.588, 0.235, 0.176, 0, 0]),
            (1.0, {"top_p": 0.3}, [1, 0, 0, 0, 0]),
            (1.0, {"top_k": 2}, [0.714, 0.286, 0, 0, 0]),
            (1.0, {"top_k": 4, "top_p": 0.7}, [0.714, 0.286, 0, 0, 0]),
            (1.0, {"min_p": 0.25}, [0.588, 0.235, 0.176, 0, 0]),
            (0.5, {"top_k": 3, "min_p": 0.1}, [0.862, 0.138, 0, 0, 0]),
        ],
    )
    def test_frequencies_and_reported_probabilities(self, temperature, more, expected):
        n = 20_000
        tokens, logp_sample, logp_model = self._draw(n, temperature, **{"top_p": 1.0, **more})
        frequencies = np.bincount(tokens, minlength=5) / n
        sigma = np.sqrt(np.asarray(expected) * (1 - np.asarray(expected)) / n)
        assert np.all(np.abs(frequencies - expected) <= 4.5 * sigma + 1e-3)
        np.testing.assert_allclose(np.exp(logp_sample), np.asarray(expected)[tokens], atol=1e-3)
        np.testing.assert_allclose(logp_model, np.asarray(self.LOGITS)[tokens], atol=1e-5)

    @pytest.mark.parametrize("vocabulary", [127, 128, 129, 4096, 9_001])
    def test_tokens_of_all_blocks_and_groups_of_a_large_vocabulary_are_drawn_as_often_as_they_should(self, vocabulary):
        rng, n = np.random.default_rng(vocabulary), 20_000
        logits = np.where(rng.random(vocabulary) < 0.6, -np.inf, rng.normal(0.0, 1.5, vocabulary)).astype(np.float32)
        logits[[0, vocabulary - 1]] = 3.0  # both ends
        p = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        keys = jax.vmap(jax.random.key_data)(jax.random.split(jax.random.key(1), 500))
        draw = Draw(jnp.ones(500), jnp.zeros(500, jnp.int32), jnp.ones(500), jnp.zeros(500))
        drawn = [_choose(jnp.tile(logits, (500, 1)), keys, jnp.full(500, step), draw, False) for step in range(n // 500)]
        tokens, logp_sample, logp_model = (np.concatenate(column) for column in zip(*drawn, strict=True))
        np.testing.assert_allclose(logp_sample, np.log(p[tokens]), atol=2e-5)
        np.testing.assert_array_equal(logp_sample, logp_model)
        counts = np.bincount(tokens, minlength=vocabulary)
        assert not counts[p == 0].any()
        order = np.argsort(-p)
        bins = np.minimum(np.cumsum(p[order]) * 40, 39).astype(int)  # about equal masses
        expected, seen = (np.bincount(bins, weights=x[order], minlength=40) for x in (n * p, counts))
        assert np.sum((seen - expected)[expected > 0] ** 2 / expected[expected > 0]) < 39 + 4.5 * np.sqrt(2 * 39)
        halves = np.array([[counts[: vocabulary // 2].sum(), counts[vocabulary // 2 :].sum()]]) / n
        assert np.abs(halves - [p[: vocabulary // 2].sum(), p[vocabulary // 2 :].sum()]).max() < 4.5 * 0.5 / np.sqrt(n)

    def test_greedy_takes_the_first_of_the_most_likely_ones(self):
        rng = np.random.default_rng(0)
        tables = rng.integers(0, 50, (64, 9_001)).astype(np.float32)
        keys = jnp.zeros((64, 2), jnp.uint32)
        draw = Draw(jnp.zeros(64), jnp.zeros(64, jnp.int32), jnp.ones(64), jnp.zeros(64))
        for table in (tables, -tables, np.where(np.arange(9_001) == 9_000, 1e4, tables)):
            tokens, logp_sample, _ = _choose(jnp.asarray(table), keys, jnp.zeros(64, jnp.int32), draw, False)
            assert tokens.tolist() == np.argmax(table, axis=-1).tolist() and not np.any(logp_sample)

    def test_each_step_draws_afresh(self):
        a, b = (next(self._draw(1000, 1.0, 1.0, step)) for step in (0, 1))
        assert np.mean(a == b) == pytest.approx(0.325, abs=0.06)  # sum of p^2: independent draws

    def test_each_row_draws_in_its_own_way(self):
        table, keys = jnp.tile(self.LOGITS, (4, 1)), jnp.asarray(np.arange(8, dtype=np.uint32).reshape(4, 2))
        draw = Draw(jnp.array([0.0, 1, 1, 1]), jnp.array([0, 1, 0, 0]), jnp.array([1, 1, 0.4, 1]), jnp.array([0, 0, 0, 0.9]))
        tokens, logp_sample, _ = _choose(table, keys, jnp.arange(4), draw, True)
        assert tokens.tolist() == [0] * 4 and not np.any(logp_sample)

    @pytest.mark.parametrize("seed", range(4))
    def test_what_is_left_is_what_sorting_leaves(self, seed):
        rng = np.random.default_rng(seed)
        log_p = np.log(rng.dirichlet(np.full(300, 0.1), 6) + 1e-30).astype(np.float32)
        log_p[:, 5] = log_p[:, 6]
        top_k, top_p, min_p = rng.integers(0, 50, 6), rng.uniform(0.3, 1.0, 6), rng.choice([0.0, 0.01], 6)
        draw = Draw(jnp.ones(6), *(jnp.asarray(value, dtype) for value, dtype in ((top_k, "int32"), (top_p, "float32"), (min_p, "float32"))))
        left = np.asarray(_left(jnp.asarray(log_p), draw))
        for row in range(6):
            order = np.argsort(-log_p[row], kind="stable")
            p = np.exp(log_p[row].astype(np.float64))
            kept = order[: top_k[row] or len(order)]
            kept = np.flatnonzero(log_p[row] >= log_p[row][kept].min())
            kept = kept[np.argsort(-p[kept], kind="stable")]
            before = np.cumsum(p[kept]) - p[kept]
            last = p[kept][before < top_p[row] * p[kept].sum()].min()
            expected = {i for i in kept if p[i] >= last and p[i] >= min_p[row] * p.max()}
            assert set(np.flatnonzero(left[row])) == expected

    def test_a_token_ruled_out_by_the_model_stays_out(self):
        logits = jnp.array([[0.0, -jnp.inf, 1.0, -jnp.inf]])
        draw = Draw(jnp.ones(1), jnp.array([3]), jnp.array([0.999]), jnp.array([0.01]))
        drawn = {int(_choose(logits, jnp.array([[0, key]], jnp.uint32), jnp.zeros(1, int), draw, True)[0][0]) for key in range(40)}
        assert drawn == {0, 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1], [2]], [0], [1, 2]), "one of each"),
        (([[]], [0], [1]), "empty"),
        (([[99]], [0], [1]), "token id"),
        (([[1]], [3], [1]), "agent 3"),
        (([[1]], [0], [np.zeros(3)]), "key"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        _sampler().sample(_backbone()[1], *arguments)


@pytest.mark.parametrize(
    "change", [{"top_p": 0.0}, {"temperature": -1.0}, {"batch_buckets": (8, 4)}, {"block": 0}, {"chunks": ()}, {"min_p": 2.0}, {"stops": ((),)}]
)
def test_a_bad_config_is_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        dataclasses.replace(SIZES, **change)
