"""Continuous batching: many requests, a fixed number of rows, tokens with their log-probs and stop reasons out.

    submit(...)   puts requests in the queue: new prompts, or more tokens for conversations whose cache was kept
    step(params)  gives free rows to waiting requests, feeds their prompts to the cache, decodes one block of steps for all rows,
                  and returns the samples that are finished

A row that finishes is given to the next request after the block. Prompts are fed in chunks; equal prompts are fed once and their keys
and values copied, to rows admitted together as to rows that come later while one with this beginning is still there. The last token
of a prompt is fed by the first decode step, which needs its logits.

Within one set of sizes a row's outcome depends on its own prompt, agent, key and way of drawing alone, bit for bit: chunks are cut by a
prompt's own length, and how many prompts were fed together is the only size that others have a say in.

Token in, token out: a kept conversation goes on from the tokens it has, nothing is rendered or tokenised again. If its row was needed
meanwhile, or the parameters have changed, its tokens are fed once more (`Counts.refed`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dk_jax.generation.implementation import fastest_attention, fastest_products, fastest_prompts, least_rows
from dk_jax.generation.jobs import Counts, Job, leave, make_job, rows_at_rest
from dk_jax.generation.kv_cache import KVCache
from dk_jax.generation.programs import Cache, Programs, Rows
from dk_jax.generation.requests import Conversation, Request, Sample, Stop
from dk_jax.generation.sizes import EngineConfig
from dk_jax.models.backbone import Params, Static
from dk_jax.models.sharding import check_mesh, mesh_of, on_mesh, row_share

log = logging.getLogger(__name__)


class Engine:
    """Samples from one backbone. Not thread-safe; engines that share `programs` may run in threads of their own.

    Args:
      static: the backbone.
      config: sizes.
      programs: of another engine of the same backbone and configuration, or `make_programs`' for a mesh.
      device: where it works; the parameters' own by default.

    Raises:
      ValueError: a mesh that does not divide the rows.
    """

    def __init__(self, static: Static, config: EngineConfig, programs: Programs | None = None, device: Any = None):
        config = dataclasses.replace(config, rows=max(config.rows, least_rows(device)))
        self.config, self._static, self._device = config, static, device
        self.programs = programs or make_programs(static, config)
        share = row_share(self.programs.kv.mesh)
        if config.rows % share:
            raise ValueError(f"generation: {config.rows} rows can't be spread over {share} parts of the mesh; use a multiple")
        self.counts = Counts()
        self._waiting: deque[Job] = deque()
        self._tickets = 0
        self._cache: Cache | None = None
        self._rows: Rows | None = None
        self._jobs: list[Job | None] = [None] * config.rows
        self._held: list[list[int]] = [[] for _ in range(config.rows)]
        """Tokens whose keys and values each row holds."""
        self._prompts: list[tuple[int, ...]] = [()] * config.rows
        """What each row holds first, fed to it (or to the row that it was copied from) in one go: good for whoever has this prompt."""
        self._kept: dict[int, Conversation] = {}
        """Conversations at rest by row, the longest at rest first."""
        self._params: Params | None = None
        self._weights: Params | None = None
        self._finished: list[tuple[int, Sample]] = []
        """Samples that nobody has been given yet."""
        self._broken: BaseException | None = None

    # ------------------------------------------------------------ requests

    def submit(self, request: Request) -> int:
        """Queues a request; returns the ticket under which its sample comes out of `step`.

        Raises:
          ValueError: an empty prompt, an unknown agent or token id, a limit below 1, a key that is none, a conversation that is
            going on already.
        """
        return self._queue(self._job(request))

    def _job(self, request: Request) -> Job:
        return make_job(request, self._static.cfg.vocab_size, self.config.max_length_tokens)

    def _queue(self, job: Job) -> int:
        conversation = job.request.conversation
        if conversation is not None:
            if conversation.going_on:
                raise ValueError("generation: this conversation is going on already; wait for its sample")
            conversation.going_on = True
            if conversation.engine is not self:
                leave(conversation)
        job.ticket, self._tickets = self._tickets, self._tickets + 1
        self._waiting.append(job)
        return job.ticket

    @property
    def busy(self) -> bool:
        """Whether anything waits or is being decoded, or has finished without having been given to anybody."""
        return bool(self._waiting) or any(self._jobs) or bool(self._finished)

    def run(self, params: Params, requests: Sequence[Request], on_done: Callable[[int, Sample], None] | None = None) -> list[Sample]:
        """All samples of some requests, in order. `on_done(place, sample)` hears of each when it is there. Samples of what else was
        submitted, before or meanwhile, come out of the next `step` that nobody else calls.

        Raises:
          ValueError: as `submit`, before any of them is queued.
        """
        places = {self._queue(job): place for place, job in enumerate([self._job(request) for request in requests])}
        samples: list[Sample | None] = [None] * len(requests)
        others: list[tuple[int, Sample]] = []
        while places:
            if not self.busy:
                raise RuntimeError("generation: samples were given to somebody else; call no step from on_done")
            for ticket, sample in self.step(params):
                place = places.pop(ticket, None)
                if place is None:
                    others.append((ticket, sample))
                    continue
                samples[place] = sample
                if on_done:
                    on_done(place, sample)
        self._finished += others
        return samples

    def release(self, conversation: Conversation) -> None:
        """Gives a kept conversation's row back."""
        leave(conversation)

    def close(self) -> None:
        """Gives all memory back; conversations that were kept here are fed anew where they go on."""
        for conversation in list(self._kept.values()):
            leave(conversation)
        self._cache = self._rows = self._params = self._weights = None

    # ------------------------------------------------------------ steps

    def step(self, params: Params) -> list[tuple[int, Sample]]:
        """Admits what there is room for, decodes one block, and returns what has finished, by ticket.

        Raises:
          ValueError: other parameters while samples are being drawn, or too little memory. RuntimeError: an earlier step has failed.
        """
        if self._broken is not None:
            raise RuntimeError("generation: this engine is broken, as an earlier step has failed; make a new one") from self._broken
        self._use(params)
        try:
            return self._step()
        except BaseException as error:
            self._broken = error
            for job in (*self._waiting, *filter(None, self._jobs)):
                if job.request.conversation is not None:
                    job.request.conversation.going_on = False
            self.close()
            raise

    def _step(self) -> list[tuple[int, Sample]]:
        finished, self._finished = self._finished + self._turn_away(), []
        self._admit()
        if not any(self._jobs):
            return finished
        self._make_slots()
        filtered = any(job.request.drawing.filters for job in self._jobs if job)
        enough = max(1, self.config.rows // self.config.refill_share) if self._waiting else self.config.rows
        self._cache, self._rows, block = self.programs.decode(
            self._weights, self._cache, self._rows, np.int32(enough), filtered=filtered
        )
        block, done = jax.device_get((block, self._rows.done))
        return finished + self._collect(block, done)

    def _use(self, params: Params) -> None:
        """Takes new parameters into use: what the rows hold is of no use any more."""
        if params is self._params:
            return
        if any(self._jobs):
            raise ValueError("generation: the parameters changed while samples are being drawn; finish these first")
        if self._cache is None:
            mesh = self.programs.kv.mesh
            if mesh_of(params) != mesh:
                raise ValueError(f"generation: the parameters lie on {mesh_of(params) or 'one device'}, these programs are for {mesh or 'one'}")
            self._device = self._device or next(iter(jax.tree.leaves(params)[0].addressable_shards)).device
            log.info("%s", self.config.budget(self._static.cfg, self.programs.kv).check(self._device))
        for conversation in list(self._kept.values()):
            leave(conversation)
        self._held, self._prompts = [[] for _ in self._jobs], [()] * len(self._jobs)
        self._params = self._weights = None
        self._weights = self.programs.weights(params)
        if self._cache is None:
            self._cache = self.programs.kv.zeros(self.config.rows, self.config.first_slots, self._device)
            self._rows = self._placed(rows_at_rest(self.config.rows, self.programs.memory))
        self._params = params

    def _turn_away(self) -> list[tuple[int, Sample]]:
        """Empty samples for prompts that leave no room for a token."""
        full = [job for job in self._waiting if job.limit < 1]
        self._waiting = deque(job for job in self._waiting if job.limit >= 1)
        return [(job.ticket, self._sample(job, "cache_full", None)) for job in full]

    def _admit(self) -> None:
        """Gives rows to waiting requests, in order but for conversations that have theirs, and brings into the cache what stands before
        each one's last token."""
        places: dict[int, Job] = {}
        self._waiting = deque(sorted(self._waiting, key=lambda job: job.request.conversation is None or job.request.conversation.row is None))
        while self._waiting:
            row = self._row_for(self._waiting[0])
            if row is None:
                break
            job = self._waiting.popleft()
            self._jobs[row] = places[row] = job
        if not places:
            return
        self._make_slots()
        self._fill(places)
        rows = jax.tree.map(np.array, jax.device_get(self._rows))
        for row, job in places.items():
            drawing = job.request.drawing
            for array, value in (
                (rows.token, job.history[-1]), (rows.position, len(job.history) - 1), (rows.step, 0), (rows.limit, job.limit),
                (rows.agent, job.request.agent), (rows.key, job.key), (rows.recent, -1), (rows.done, False),
                (rows.draw.temperature, drawing.temperature), (rows.draw.top_k, drawing.top_k), (rows.draw.top_p, drawing.top_p),
                (rows.draw.min_p, drawing.min_p),
            ):  # fmt: skip
                array[row] = value
        self._rows = self._placed(rows)

    def _placed(self, rows: Rows) -> Rows:
        return jax.device_put(rows, self._device) if self.programs.whole is None else on_mesh(rows, self.programs.whole)

    def _row_for(self, job: Job) -> int | None:
        """The row that a request gets: its conversation's own, else a free one (one that holds the prompt, if there is one; else one that
        holds none), else that of the conversation longest at rest."""
        conversation = job.request.conversation
        if conversation is not None and conversation.row is not None:  # of this engine: see `_queue`
            del self._kept[conversation.row]
            return conversation.row
        free = [row for row in range(self.config.rows) if self._jobs[row] is None and row not in self._kept]
        if free:
            wanted = tuple(job.history[:-1])
            return max(free, key=lambda row: (self._prompts[row] == wanted, not self._prompts[row], -row))
        if self._kept:
            wanted = {id(job.request.conversation) for job in self._waiting}
            row, conversation = min(self._kept.items(), key=lambda item: id(item[1]) in wanted)  # the first whose turn has not come
            leave(conversation)
            return row
        return None

    def _fill(self, places: dict[int, Job]) -> None:
        """Feeds or copies prompts, so that each row holds all of its job's history but the last token."""
        known = {prompt: row for row, prompt in enumerate(self._prompts) if prompt and row not in places}
        pieces, copies = [], []
        for row, job in places.items():
            wanted, conversation = tuple(job.history[:-1]), job.request.conversation
            goes_on = conversation is not None and conversation.row == row
            self.counts.refed += conversation is not None and not goes_on
            if goes_on:
                pieces.append((row, wanted, len(self._held[row])))
            elif self._prompts[row] == wanted:
                known[wanted] = row
            elif wanted in known:
                copies.append((known[wanted], row, len(wanted)))
            else:
                pieces.append((row, wanted, 0))
            if not goes_on:
                self._prompts[row] = wanted
                if wanted:
                    known.setdefault(wanted, row)
            self._held[row] = list(wanted)
        self._feed([piece for piece in pieces if piece[2] < len(piece[1])])
        self._copy(copies)

    def _feed(self, pieces: list[tuple[int, tuple[int, ...], int]]) -> None:
        """Feeds tokens from `start` on to each row, chunk by chunk; those whose chunks have equal sizes go together."""
        config = self.config
        while pieces:
            by_size: dict[tuple[int, int], list] = {}
            for row, tokens, start in pieces:
                chunk = config.chunk(len(tokens) - start)
                by_size.setdefault((chunk, config.window(start + chunk)), []).append((row, tokens, start))
            pieces = []
            for (chunk, window), group in sorted(by_size.items()):
                width = config.width(chunk, len(group))
                for first in range(0, len(group), width):
                    part = group[first : first + width]
                    rows, starts, counts = (np.zeros(width, np.int32) for _ in range(3))
                    rows[len(part) :] = config.rows
                    fed = np.zeros((width, chunk), np.int32)
                    for i, (row, tokens, start) in enumerate(part):
                        now = tokens[start : start + chunk]
                        rows[i], starts[i], counts[i], fed[i, : len(now)] = row, start, len(now), now
                        if start + len(now) < len(tokens):
                            pieces.append((row, tokens, start + len(now)))
                    self.counts.prefilled += int(counts.sum())
                    self._cache = self.programs.feed(self._weights, self._cache, rows, fed, starts, counts, window=window)

    def _copy(self, copies: list[tuple[int, int, int]]) -> None:
        width = self.config.copy_width
        by_window: dict[int, list[tuple[int, int]]] = {}
        for source, target, length in copies:
            by_window.setdefault(self.config.window(length + 1), []).append((source, target))
        for window, pairs in sorted(by_window.items()):
            for first in range(0, len(pairs), width):
                source, target = np.zeros(width, np.int32), np.zeros(width, np.int32)
                some = pairs[first : first + width]
                for i, pair in enumerate(some):
                    source[i], target[i] = pair
                self._cache = self.programs.copy(self._cache, source, target, np.int32(len(some)), window=window)
        self.counts.copied += len(copies)

    def _make_slots(self) -> None:
        """As many slots as the rows at work need in the next block."""
        kv = self.programs.kv
        longest = max((len(job.history) + len(job.tokens) for job in self._jobs if job), default=0)
        wanted = self.config.slots(longest + self.config.block + 1)
        if wanted > kv.slots(self._cache[0]):
            self._cache = self.programs.grow(self._cache, wanted)

    def _collect(self, block, done: np.ndarray) -> list[tuple[int, Sample]]:
        finished = []
        self.counts.row_steps += int(block.count.max(initial=0)) * self.config.rows
        for row, job in enumerate(self._jobs):
            if job is None:
                continue
            count = int(block.count[row])
            fed = [(job.tokens or job.history)[-1], *block.tokens[row, : max(count - 1, 0)].tolist()][:count]
            self._held[row] = [*self._held[row], *fed]
            job.tokens += block.tokens[row, :count].tolist()
            for parts, values in zip(job.logps, (block.logp_sample, block.logp_model), strict=True):
                parts.append(values[row, :count].copy())
            if not np.isfinite(job.logps[1][-1]).all():
                raise FloatingPointError(f"generation: the model's log-probs of a sample with {len(job.tokens)} tokens are not finite")
            self.counts.decoded += count
            if done[row]:
                finished.append((job.ticket, self._sample(job, self._why(job), row)))
                self._jobs[row] = None
        return finished

    def _why(self, job: Job) -> Stop:
        if job.tokens[-1] == self.config.eos_id:
            return "eos"
        if any(tuple(job.tokens[-len(stop) :]) == stop for stop in self.config.stops):
            return "stop"
        return "length" if len(job.tokens) == job.request.max_new_tokens else "cache_full"

    def _sample(self, job: Job, stop: Stop, row: int | None) -> Sample:
        conversation = job.request.conversation
        if conversation is not None:
            conversation.going_on = False
            leave(conversation)
        if job.request.keep:
            conversation = conversation or Conversation([], job.request.agent)
            conversation.tokens = [*job.history, *job.tokens]
            if row is not None:
                conversation.row, conversation.engine = row, self
                self._kept[row] = conversation
        else:
            conversation = None
        logp_sample, logp_model = (np.concatenate(parts) if parts else np.zeros(0, np.float32) for parts in job.logps)
        return Sample(job.tokens, logp_sample, logp_model, stop, conversation)


def make_programs(static: Static, config: EngineConfig, mesh: Mesh | None = None) -> Programs:
    """Programs for engines of this backbone and configuration, on one device or with parameters that are spread over a mesh.

    Raises:
      ValueError: a mesh that does not divide the network.
    """
    if mesh is not None and mesh.size == 1:
        mesh = None
    if mesh is not None:
        check_mesh(static.cfg, mesh)
    attention, prompts, products = config.attention, "xla", "xla"
    if attention == "auto":
        attention, prompts = fastest_attention(static.cfg, config, mesh), fastest_prompts(static.cfg, config, mesh)
    kv = KVCache(static.cfg, attention, mesh=mesh, prompts=prompts)
    if config.attention == "auto":
        products = fastest_products(static, config, kv)
    return Programs(static, kv, eos_id=config.eos_id, stops=config.stops, block=config.block, products=products)
