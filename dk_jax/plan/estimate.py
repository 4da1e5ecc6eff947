"""From a step's programs to what a recipe needs on given devices: parts of memory, the microbatch that fits, time.

    training    parameters + optimiser + summed gradient + the larger of a microbatch's and the optimiser's temporaries
    sampling    parameters + optimiser + weights in the compute type + keys and values + the rest of `generation.sizes.Budget`

With rl.staleness=1 both go on at once, a program at a time (dk_jax.train.device_turns): to training come the trainable parameters once more,
as the sampler has those of the step before, and what the sampler keeps between its calls, its weights and, where conversations go on, its
caches; to sampling those parameters and the gradient summed so far.

Temporaries grow linearly with the tokens that a device has in a microbatch; two compilations give the line, a third one at the answer
gives the truth.

    time of a microbatch    the largest of FLOPs / rate, bytes / rate of memory, bytes sent / rate of links, each rate at the share of
                            `hardware.EFFICIENCY`
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from dk_jax.generation.kv_cache import KVCache
from dk_jax.generation.sizes import Budget
from dk_jax.models.sharding import row_share
from dk_jax.plan.counting import bytes_per_device
from dk_jax.plan.hardware import EFFICIENCY, USABLE, Device
from dk_jax.plan.programs import Program, Step, compile_gradient, compile_update, microbatch_flops, parts_of
from dk_jax.train import setup
from dk_jax.train.setup import ConfigError

LENGTH_STEP = 1024
"""Lengths of rows that are tried are multiples of it, where rows are that long."""
BEHIND, SAMPLER = "behind", "sampler"
"""Parts of memory with rl.staleness=1: the parameters that sample, and what the sampler keeps between its calls."""
MOST_TRIES = 5
"""Compilations for each kind of device."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """The largest microbatch for one kind of device.

    Attributes:
      device: which.
      rows, length: of the microbatch, on all devices together; rows 0 where nothing fits.
      program: its compiled gradient, or None.
      training_bytes, sampling_bytes: on a device, all parts.
      sampling_rows: rows sampled at once that would fit with all slots of their caches, a multiple of what the mesh spreads.
      flops: done for the microbatch by all devices. model_flops: without what is computed again.
      microbatch_s, update_s: estimates; the second of all microbatches of a step and the optimiser.
      microbatches: of a step whose sequences are all as long as they may be.
      bound: what rules a microbatch's time: "flops", "bytes" or "links".
    """

    device: Device
    rows: int = 0
    length: int = 0
    program: Program | None = None
    training_bytes: int = 0
    sampling_bytes: int = 0
    sampling_rows: int = 0
    flops: float = 0.0
    model_flops: float = 0.0
    microbatch_s: float = 0.0
    update_s: float = 0.0
    microbatches: int = 0
    bound: str = ""

    @property
    def tokens(self) -> int:
        """Of the microbatch."""
        return self.rows * self.length

    @property
    def fits(self) -> bool:
        """Whether training and, with the recipe's rows, sampling do."""
        return self.rows > 0 and self.sampling_bytes <= USABLE * self.device.memory_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a recipe needs on a mesh.

    Attributes:
      parts: bytes on each device held throughout training, by name.
      update: the optimiser's program. generation: memory of the sampler's largest arrays on a device.
      base_bytes, token_bytes: of a microbatch's temporaries on a device: without tokens, and for each of its tokens.
      sequences, length: of a training step, and of the longest.
      rows: that the recipe samples at once.
    """

    step: Step
    parts: dict[str, int]
    update: Program
    generation: Budget
    base_bytes: float
    token_bytes: float
    sequences: int
    length: int
    rows: int
    fits: list[Fit]
    compile_s: float


def make_plan(step: Step, devices: list[Device], say: Callable[[str], None] = lambda text: None) -> Plan:
    """Compiles what it takes and fits it into each of the devices.

    Args:
      say: told of each compilation before it starts.
    """
    cfg, share = step.cfg, row_share(step.mesh)
    length, generation = cfg.rollout.max_context_tokens, _generation(step)
    say("the optimiser's step")
    update = compile_update(step)
    shorter = [_rounded(length // 8), _rounded(length // 4)]
    if shorter[0] == shorter[1]:
        shorter = [max(length // 4, 2), max(length // 2, 3)]
    points = []
    for size in shorter:
        say(f"a microbatch of {share} rows of {size} tokens")
        points.append(compile_gradient(step, share, size))
    token_bytes = (points[1].temporary_bytes - points[0].temporary_bytes) / (shorter[1] - shorter[0])
    base_bytes = points[0].temporary_bytes - token_bytes * shorter[0]
    plan = Plan(
        step=step, parts=parts_of(step) | beside(step, generation), update=update, generation=generation, base_bytes=base_bytes,
        token_bytes=token_bytes,
        sequences=sequences(cfg), length=length, rows=cfg.rollout.max_rows, fits=[], compile_s=update.seconds + sum(p.seconds for p in points),
    )  # fmt: skip
    known: dict[tuple[int, int], Program] = {(share, size): point for size, point in zip(shorter, points, strict=True)}
    for device in devices:
        plan.fits.append(_fit(plan, device, known, say))
    more = sum(program.seconds for program in known.values()) - sum(p.seconds for p in points)
    return dataclasses.replace(plan, compile_s=plan.compile_s + more)


def beside(step: Step, generation: Budget) -> dict[str, int]:
    """What the devices hold besides throughout training where rollouts are made meanwhile; nothing at staleness 0."""
    r = step.cfg.rollout
    if not step.cfg.rl.staleness:
        return {}
    kept = generation.cache if r.turns > 1 and r.context == "full" else 0
    return {BEHIND: bytes_per_device(step.model.trainable), SAMPLER: generation.weights + kept}


def sequences(cfg) -> int:
    """Policy sequences of a training step: a rollout each, or a turn each where turns have prompts of their own. (The other agents'
    sequences are few and short.)"""
    r = cfg.rollout
    return (r.tasks * (r.turns if r.context == "kernels" else 1) + r.checked_tasks) * (r.selections + 1) * r.rollouts


def _rounded(length: int) -> int:
    return max(length // LENGTH_STEP, 1) * LENGTH_STEP if length >= LENGTH_STEP else max(length, 2)


def _generation(step: Step) -> Budget:
    cfg = step.cfg
    if cfg.rollout.max_rows % row_share(step.mesh):
        raise ConfigError(
            f"rollout.max_rows={cfg.rollout.max_rows} rows can't be spread over a mesh {dict(step.mesh.shape)}: use a multiple of "
            f"{row_share(step.mesh)}"
        )
    engine = setup.sampler_config(cfg, eos_id=0).engine(cfg.rollout.max_rows)
    return engine.budget(step.config, KVCache(step.config, "heads", mesh=step.mesh if step.mesh.size > 1 else None))


def _fit(plan: Plan, device: Device, known: dict[tuple[int, int], Program], say: Callable[[str], None]) -> Fit:
    step, share = plan.step, row_share(plan.step.mesh)
    room = USABLE * device.memory_bytes
    held = sum(plan.parts.values())
    state = plan.parts["parameters"] + plan.parts["optimiser"]
    learning = plan.parts[BEHIND] + plan.parts["gradient"] if BEHIND in plan.parts else 0
    sampling = state + learning + plan.generation.total
    slots = plan.generation.cache / plan.rows * share  # bytes on a device for each row it has
    free = room - state - learning - plan.generation.weights - max(plan.generation.logits, plan.generation.prefill)
    common = dict(device=device, sampling_bytes=sampling, sampling_rows=max(int(free // slots), 0) * share)
    best = _largest(plan, room, known, say)
    if best is None:
        return Fit(**common, training_bytes=held + int(plan.base_bytes))
    rows, length = key = best[0] * share, best[1]
    program = known[key]
    training = held + max(program.temporary_bytes, plan.update.temporary_bytes)
    model_flops, flops = microbatch_flops(step, *key)
    seconds, bound = _microbatch_seconds(plan, device, program, flops, key)
    microbatches = -(-plan.sequences * plan.length // (key[0] * key[1]))
    optimiser_s = (2 * state + plan.parts["gradient"]) / (device.bytes_per_s * EFFICIENCY["bytes"])
    return Fit(
        **common, rows=rows, length=length, program=program, training_bytes=training, flops=flops, model_flops=model_flops,
        microbatch_s=seconds, update_s=microbatches * seconds + optimiser_s, microbatches=microbatches, bound=bound,
    )  # fmt: skip


def _largest(plan: Plan, room: float, known: dict[tuple[int, int], Program], say: Callable[[str], None]) -> tuple[int, int] | None:
    """(rows on each device, length) of the largest microbatch that fits, found between one that does and one that does not; rows are of
    full length, or there is one that is shorter. None if not even a short one fits."""
    step, share = plan.step, row_share(plan.step.mesh)
    most = -(-plan.sequences // share)

    def size(tokens: int) -> tuple[int, int]:
        return (min(tokens // plan.length, most), plan.length) if tokens >= plan.length else (1, _rounded(tokens))

    def needed(rows: int, length: int) -> int:
        key = (rows * share, length)
        if key not in known:
            say(f"a microbatch of {key[0]} rows of {key[1]} tokens")
            known[key] = compile_gradient(step, *key)
        return sum(plan.parts.values()) + max(known[key].temporary_bytes, plan.update.temporary_bytes)

    low, high = None, None  # ((rows, length), bytes): the largest that fits, the smallest that does not
    for key in sorted(known):
        if key[0] == share and needed(1, key[1]) <= room:
            low = (1, key[1]), needed(1, key[1])
    guess = size(int((room - sum(plan.parts.values()) - plan.base_bytes) // max(plan.token_bytes, 1.0)))
    if low is None and guess[1] < 2:
        return None
    for _ in range(MOST_TRIES):
        found = needed(*guess)
        if found <= room:
            low = guess, found
        else:
            high = guess, found
        if high is None:
            break
        if low is None:
            guess = size(high[0][1] // 2)
            if guess == high[0] or guess[1] < min(LENGTH_STEP, plan.length):
                break
            continue
        (a, least), (b, too_much) = low, high
        tokens = a[0] * a[1] + (b[0] * b[1] - a[0] * a[1]) * (room - least) / max(too_much - least, 1)
        guess = size(int(tokens))
        if guess in (a, b):
            break
    return low[0] if low else None


def _microbatch_seconds(plan: Plan, device: Device, program: Program, flops: float, key: tuple[int, int]) -> tuple[float, str]:
    step = plan.step
    cfg, mesh = step.config, step.mesh
    times = 4 if cfg.remat in ("attention", "full") else 3  # each weight is read forward, again, and for both gradients
    weights = times * plan.generation.weights * mesh.shape["fsdp"]  # gathered along fsdp
    tokens = key[0] * key[1] / row_share(mesh)
    wide = 2 * cfg.n_heads * cfg.head_dim + 2 * cfg.n_kv_heads * cfg.head_dim + 3 * cfg.d_ff
    activations = times * tokens * cfg.n_layers * cfg.dtype.itemsize * (wide / mesh.shape["tensor"] + 6 * cfg.d_model)
    moved = weights + activations + 3 * plan.parts["gradient"]
    seconds = {
        "flops": flops / mesh.size / (device.flops_per_s * EFFICIENCY["flops"]),
        "bytes": moved / (device.bytes_per_s * EFFICIENCY["bytes"]),
        "links": sum(size / device.between_bytes_per_s(extent) for extent, size in program.sent_bytes.items()) / EFFICIENCY["links"],
    }
    bound = max(seconds, key=seconds.get)
    return seconds[bound], bound
