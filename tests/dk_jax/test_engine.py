"""Rows come and go, conversations go on from what is kept of them, and nobody's tokens depend on who was there before."""

import dataclasses
import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dk_jax.generation import Drawing, Engine, Request
from dk_jax.generation.engine import make_programs
from dk_jax.generation.sizes import count_weights
from tests.dk_jax.small_engine import CFG, SIZES, agrees, backbone, engine, prompts, requests, same


class TestContinuousBatching:
    @pytest.mark.parametrize(("attention", "shifted"), [("columns", 0), ("columns", 1), ("columns", 2), ("heads", 1)])
    def test_many_requests_over_few_rows_get_the_trainers_log_probs(self, attention, shifted):
        cfg, config = dataclasses.replace(CFG, shifted_kv_heads=shifted), dataclasses.replace(SIZES, attention=attention)
        some = requests(prompts([1, 5, 17, 40, 9, 33, 2, 16, 64, 8, 3]))
        found = engine(config, cfg).run(backbone(cfg)[1], some)
        assert sum(agrees(one.tokens, sample, one.agent, cfg) for one, sample in zip(some, found, strict=True)) > 40

    def test_a_free_row_is_refilled_before_the_others_have_finished(self):
        one = engine()
        long, short = requests(prompts([6] * 3), new=60), requests(prompts([7] * 6, seed=1), new=2, first_key=5)
        seen = []
        one.run(backbone()[1], [*long, *short], on_done=lambda place, sample: seen.append(place))
        assert set(seen[:6]) & set(range(3, 9)) and seen[-1] < 3
        assert one.counts.decoded / one.counts.row_steps > 0.4

    def test_who_was_there_before_and_who_is_beside_changes_no_bit(self):
        mine = requests(prompts([19]), first_key=7)[0]
        config = dataclasses.replace(SIZES, cache_step=0)
        alone = engine(config).run(backbone()[1], [mine])[0]
        others = requests(prompts([11, 21, 5, 30, 8, 9, 14], seed=1), new=9)
        among = engine(config).run(backbone()[1], [*others, mine])[-1]
        assert len(alone.tokens) > 3
        same(alone, among)

    def test_equal_prompts_are_fed_once_and_copied(self):
        one, [prompt] = engine(), prompts([23])
        found = one.run(backbone()[1], requests([prompt] * 9, agents=[1] * 9))
        assert one.counts.prefilled == 22 and one.counts.copied == 3
        assert len({tuple(sample.tokens) for sample in found}) > 5
        for sample in found:
            agrees(prompt, sample, 1)
        again = engine().run(backbone()[1], requests([prompt], agents=[1]))[0]
        assert again.tokens == found[0].tokens

    @pytest.mark.parametrize("length", [9, 17, 33])
    def test_a_copied_prompt_has_the_key_that_lies_one_ahead(self, length):
        [prompt] = prompts([length])
        for sample in engine().run(backbone()[1], requests([prompt] * 3, agents=[1] * 3)):
            agrees(prompt, sample, 1)

    def test_a_prompt_that_is_still_there_is_copied_for_those_that_come_later(self):
        one, [prompt, *others] = engine(), prompts([14, 6, 7, 8])
        one.submit(requests([prompt], agents=[1], new=40)[0])
        one.step(backbone()[1])
        late = requests([prompt, *others], agents=[1] * 4, first_key=3)
        found = one.run(backbone()[1], late)
        assert one.counts.copied == 1
        for request, sample in zip(late, found, strict=True):
            agrees(request.tokens, sample, 1)

    def test_a_row_that_gets_another_prompt_is_no_source_of_its_old_one(self):
        config = dataclasses.replace(SIZES, rows=2)
        one, [a, b, c] = engine(config), prompts([10, 11, 12])
        one.run(backbone()[1], requests([a, b], agents=[1, 1], new=3))
        later = [*requests([c], agents=[1], first_key=1), *requests([a, b, a], agents=[1] * 3, first_key=2)]
        for request, sample in zip(later, one.run(backbone()[1], later), strict=True):
            agrees(request.tokens, sample, 1)

    def test_a_prompt_of_other_parameters_is_fed_anew(self):
        one, [prompt] = engine(), prompts([14])
        one.run(backbone()[1], requests([prompt]))
        halved = jax.tree.map(lambda x: 0.5 * x, backbone()[1])
        [after] = one.run(halved, requests([prompt]))
        same(after, engine().run(halved, requests([prompt]))[0])

    def test_a_neighbour_that_filters_changes_no_bit_of_one_that_does_not(self):
        config = dataclasses.replace(SIZES, cache_step=0)
        for key in range(6):
            mine, other = requests(prompts([9, 9]), first_key=key)
            alone = engine(config).run(backbone()[1], [mine, other])[0]
            same(alone, engine(config).run(backbone()[1], [mine, dataclasses.replace(other, drawing=Drawing(top_k=3))])[0])

    def test_samples_of_others_are_not_lost(self):
        one, params = engine(), backbone()[1]
        before = one.submit(requests(prompts([5]), new=2)[0])
        later = []
        one.run(params, requests(prompts([6]), new=9), on_done=lambda *_: later.append(one.submit(requests(prompts([7]), new=2)[0])))
        given = []
        while one.busy:
            given += [ticket for ticket, _ in one.step(params)]
        assert sorted(given) == [before, *later]
        inner = []
        outer = one.run(
            params, requests(prompts([4, 4]), new=2), on_done=lambda *_: inner.append(one.run(params, requests(prompts([4]), new=9))[0])
        )
        assert len(outer) == len(inner) == 2 and not one.busy

    def test_of_a_list_with_a_bad_request_none_is_queued(self):
        one, good = engine(), requests(prompts([5]))[0]
        with pytest.raises(ValueError, match="empty"):
            one.run(backbone()[1], [good, dataclasses.replace(good, tokens=[])])
        assert not one.busy

    def test_an_engine_that_has_failed_says_so_and_frees_its_memory(self, monkeypatch):
        one = engine()
        [sample] = one.run(backbone()[1], requests(prompts([5]), keep=True))
        monkeypatch.setattr(one.programs, "feed", lambda *_, **__: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(MemoryError):
            one.run(backbone()[1], requests(prompts([30]), new=3))
        assert one._cache is None and sample.conversation.row is None
        with pytest.raises(RuntimeError, match="earlier step has failed"):
            one.step(backbone()[1])

    def test_log_probs_that_are_not_finite_are_an_error(self):
        poisoned = jax.tree.map(lambda x: x * jnp.nan, backbone()[1])
        with pytest.raises(FloatingPointError, match="not finite"):
            engine().run(poisoned, requests(prompts([5])))

    def test_a_prompt_in_chunks_is_the_prompt(self):
        [prompt] = prompts([70])
        [whole] = engine(dataclasses.replace(SIZES, chunks=(96,), prefill_tokens=96)).run(backbone()[1], requests([prompt]))
        [parts] = engine().run(backbone()[1], requests([prompt]))
        assert whole.tokens == parts.tokens
        np.testing.assert_allclose(whole.logp_model, parts.logp_model, atol=1e-5)

    def test_no_more_programs_than_sizes(self):
        mine = make_programs(backbone()[0], SIZES)
        for seed in range(3):
            lengths = np.random.default_rng(seed).integers(1, 80, 14)
            Engine(backbone()[0], SIZES, mine).run(backbone()[1], requests(prompts(lengths, seed)))
        first = mine.compilations
        # weights; feeding in 2 widths, chunks of 8 and 16, 5 windows at most, 3 sizes of the cache; growing twice; decode and copies thrice
        assert first <= 1 + 2 * 2 * 5 * 3 + 2 + 2 * 3
        Engine(backbone()[0], SIZES, mine).run(backbone()[1], requests(prompts([3, 77, 20, 41], 9)))
        assert mine.compilations <= first + 2


class TestConversations:
    def turn(self, one, found, appended, **more):
        return one.run(
            backbone()[1],
            [
                Request(tokens=tokens, agent=0, key=i, max_new_tokens=6, conversation=sample.conversation, **more)
                for i, (sample, tokens) in enumerate(zip(found, appended, strict=True))
            ],
        )

    def test_three_turns_go_on_from_the_kept_cache(self):
        one, first = engine(), requests(prompts([20, 9, 31]), new=8, keep=True)
        found = one.run(backbone()[1], first)
        histories = [[*request.tokens, *sample.tokens] for request, sample in zip(first, found, strict=True)]
        for number in range(2):
            fed, more = one.counts.prefilled, prompts([5, 12, 1], seed=number + 1)
            found = self.turn(one, found, more, keep=True)
            for agent, (history, tokens, sample) in enumerate(zip(histories, more, found, strict=True)):
                history += tokens
                agrees(history, sample, agent)
                history += sample.tokens
                assert sample.conversation.tokens == history
            assert one.counts.prefilled == fed + sum(map(len, more))  # their last tokens are decode's, the answers' last ones are fed
        assert one.counts.refed == 0

    def test_one_whose_row_was_needed_is_fed_again(self):
        one = engine()
        first = requests(prompts([6, 7, 8, 9, 10, 11]), new=5, keep=True)
        found = one.run(backbone()[1], first)
        assert sum(sample.conversation.row is None for sample in found) == 2
        more = prompts([3] * 6, seed=2)
        for agent, (request, sample, tokens, after) in enumerate(zip(first, found, more, self.turn(one, found, more), strict=True)):
            agrees([*request.tokens, *sample.tokens, *tokens], after, agent % 3)
        assert one.counts.refed == 2

    def test_new_parameters_leave_nothing_of_the_old_ones(self):
        one, first = engine(), requests(prompts([14]), keep=True)
        [sample] = one.run(backbone()[1], first)
        halved = jax.tree.map(lambda x: 0.5 * x, backbone()[1])
        more = Request(tokens=[5, 6], agent=0, key=3, max_new_tokens=6, conversation=sample.conversation)
        [after] = one.run(halved, [more])
        [fresh] = engine().run(halved, [dataclasses.replace(more, tokens=[*first[0].tokens, *sample.tokens, 5, 6], conversation=None)])
        same(after, fresh)
        assert one.counts.refed == 1

    def test_a_conversation_has_one_turn_at_a_time_and_gives_its_row_back(self):
        one = engine()
        [sample] = one.run(backbone()[1], requests(prompts([4]), keep=True))
        request = Request(tokens=[7], agent=0, key=1, max_new_tokens=3, conversation=sample.conversation)
        one.submit(request)
        with pytest.raises(ValueError, match="going on already"):
            one.submit(request)
        while one.busy:
            one.step(backbone()[1])
        assert sample.conversation.row is None
        [sample] = one.run(backbone()[1], requests(prompts([4]), keep=True))
        row = sample.conversation.row
        one.release(sample.conversation)
        assert row is not None and sample.conversation.row is None and not one._kept

    def test_answers_can_be_answered_while_others_are_still_at_it(self):
        one, params = engine(), backbone()[1]
        tickets = [one.submit(request) for request in requests(prompts([5, 6]), new=40, keep=True)]
        tickets.append(one.submit(requests(prompts([7], seed=3), new=2, first_key=9, keep=True)[0]))
        second = None
        ended = []
        while one.busy:
            for ticket, sample in one.step(params):
                ended.append(ticket)
                if ticket == tickets[2]:
                    second = one.submit(Request(tokens=[9], agent=0, key=1, max_new_tokens=2, conversation=sample.conversation))
        assert ended.index(second) < max(ended.index(ticket) for ticket in tickets[:2])


class TestStopping:
    def test_sequences_end_a_sample_and_say_so(self):
        [prompt] = prompts([12])
        [free] = engine().run(backbone()[1], requests([prompt], new=30))
        pair = tuple(free.tokens[4:6])
        stops = ((59, 60, 60), pair)
        config = dataclasses.replace(SIZES, stops=stops)
        [stopped] = engine(config).run(backbone()[1], requests([prompt], new=30))
        assert stopped.stop == "stop" and stopped.tokens == free.tokens[: len(stopped.tokens)]
        assert tuple(stopped.tokens[-2:]) == pair and len(stopped.tokens) <= 6

    def test_a_stop_sequence_does_not_reach_back_into_the_sample_before(self):
        config = dataclasses.replace(SIZES, rows=1)
        first, second = requests(prompts([12, 9]), new=6)
        one, two = (engine(config).run(backbone()[1], [request])[0] for request in (first, second))
        config = dataclasses.replace(config, stops=((one.tokens[-1], two.tokens[0]),))
        found = engine(config).run(backbone()[1], [first, second])
        assert [sample.tokens for sample in found] == [one.tokens, two.tokens]

    def test_a_stop_sequence_does_not_reach_back_into_the_prompt(self):
        [prompt] = prompts([12])
        [free] = engine().run(backbone()[1], requests([prompt], new=6))
        config = dataclasses.replace(SIZES, stops=((prompt[-1], free.tokens[0]),))
        [found] = engine(config).run(backbone()[1], requests([prompt], new=6))
        assert found.tokens == free.tokens and found.stop == free.stop

    def test_what_has_no_room_is_empty_and_what_runs_out_of_it_is_cut(self):
        full, nearly = prompts([96, 90])
        found = engine().run(backbone()[1], requests([full, nearly], new=30))
        assert found[0].tokens == [] and found[0].stop == "cache_full"
        assert found[1].stop == "cache_full" and len(found[1].tokens) == 6 or found[1].stop == "eos"

    def test_rows_draw_in_ways_of_their_own(self):
        [prompt] = prompts([12])
        ways = [Drawing(temperature=0.0), Drawing(top_k=1), Drawing(), Drawing(temperature=2.0, min_p=1.0)]
        some = [dataclasses.replace(requests([prompt], agents=[1])[0], drawing=way) for way in ways]
        found = engine().run(backbone()[1], some)
        assert found[0].tokens == found[1].tokens == found[3].tokens != found[2].tokens
        np.testing.assert_allclose(found[1].logp_sample, 0.0, atol=1e-6)


class TestMemory:
    def test_the_budget_counts_the_arrays_that_are_made(self, caplog):
        static, params = backbone()
        one = engine()
        with caplog.at_level(logging.INFO, "dk_jax.generation.engine"):
            one.run(params, requests(prompts([80])))
        budget = SIZES.budget(CFG, one.programs.kv)
        assert f"{budget}" in caplog.text
        cache = sum(array.nbytes for pair in one._cache for array in pair)
        assert cache == one.programs.kv.bytes(SIZES.rows, one.programs.kv.slots(one._cache[0]))
        matrices = sum(leaf.size for leaf in jax.tree.leaves(params) if leaf.ndim > 1 and leaf.shape[-1] > 1)
        assert count_weights(CFG) == pytest.approx(matrices, rel=0.1)
        assert budget.cache >= cache

    def test_too_little_memory_is_said_before_anything_is_taken(self):
        device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 1 << 20}, __str__=lambda self: "gpu:0")
        with pytest.raises(ValueError, match=r"needs about .* GiB.*fewer rows"):
            dataclasses.replace(SIZES, rows=4096).budget(CFG, engine().programs.kv).check(device)

    def test_parameters_do_not_change_under_way(self):
        one = engine()
        one.submit(requests(prompts([5]), new=30)[0])
        one.step(backbone()[1])
        with pytest.raises(ValueError, match="parameters changed"):
            one.step(jax.tree.map(lambda x: x, backbone()[1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": []}, "empty"),
        ({"tokens": [99]}, r"outside \[0, 61\)"),
        ({"agent": 3}, "agent 3"),
        ({"key": np.zeros(3)}, "key"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ],
)
def test_bad_requests_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        engine().submit(dataclasses.replace(requests(prompts([3]))[0], **change))
