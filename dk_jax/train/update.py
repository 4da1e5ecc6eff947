"""One update of the trainable parameters: gradients summed over microbatches, then one optimiser step.

Both phases use it. Each sequence carries its weight, so the sum over microbatches is exactly the loss: in RL

    L = sum_agents w_a * mean over a's sequences of (sum over tokens of clipped policy loss) / loss_scale        (DESIGN 3.4)

and in the cold start the token mean of the negative log-likelihood. Frozen parameters (LoRA training) never meet the optimiser.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers, muon

from dk_jax.models.config import AGENTS
from dk_jax.models.log_probs import token_log_probs
from dk_jax.models.lora import combine
from dk_jax.models.sharding import make_mesh, mesh_of, shard_batch
from dk_jax.rl.losses import clipped_policy_loss
from dk_jax.train.device_turns import Runner, at_once


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The loss of an update: "nll" (cold start) or "policy" (clipped policy gradient).

    `temperature` is that of the sampler: the policy that is improved is the one that acted. (At another temperature the ratio of
    new to old probability would not start at 1, and the gradient would belong to a policy that nobody sampled from.)
    """

    kind: Literal["nll", "policy"]
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 3.0
    temperature: float = 1.0


def make_optimizer(
    *, lr: float, warmup: int, steps: int, weight_decay: float, clip_norm: float, decay: bool, kind: str = "adamw", only: Sequence[str] = ()
) -> optax.GradientTransformation:
    """AdamW or Muon after global-norm clipping; linear warm-up, then constant or (`decay`) cosine to a tenth of `lr`.

    Muon (optax.contrib.muon) orthogonalises the updates of the layers' matrices, scaled to the size that Adam's would have, and
    leaves the rest to AdamW, so both take the same learning rates. It needs about half the steps of AdamW in a small model's
    cold start.

    Args:
        only: names of the modules that change, wherever they stand in the tree ("mlp", "heads"); all others stay as they are and
            count in no norm. () for everything.

    Raises:
        ValueError: an unknown `kind`. (On init: a name in `only` that no parameter has.)
    """
    if decay:
        warmup = min(max(warmup, 1), max(steps - 1, 1))
        schedule = optax.warmup_cosine_decay_schedule(0.0, lr, warmup, max(steps, warmup + 1), end_value=0.1 * lr)
    else:
        schedule = optax.linear_schedule(lr / max(warmup, 1), lr, max(warmup - 1, 1))
    if kind == "adamw":
        optimizer = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=weight_decay)
    elif kind == "muon":
        optimizer = muon(
            schedule,
            weight_decay=weight_decay,
            adam_b2=0.95,
            adam_learning_rate=schedule,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=_layer_matrices,
        )
    else:
        raise ValueError(f"optimizer kind is {kind!r}: use 'adamw' or 'muon'")
    optimizer = optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)
    if not only:
        return optimizer
    return optax.multi_transform({"trained": optimizer, "kept": optax.set_to_zero()}, partial(trained_labels, tuple(only)))


def trained_labels(only: tuple[str, ...], params: Any) -> Any:
    """A tree like `params`: "trained" for the parameters of modules named in `only`, "kept" for the others.

    Raises:
        ValueError: a name that no parameter has.
    """
    names = {entry.key for path, _ in jax.tree_util.tree_leaves_with_path(params) for entry in path}
    if unknown := sorted(set(only) - names):
        raise ValueError(f"no trainable parameter belongs to {', '.join(unknown)}: modules are {', '.join(sorted(names))}")
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "trained" if any(entry.key in only for entry in path) else "kept", params
    )


def _layer_matrices(params: Any) -> Any:
    """Muon's view of the parameters: matrices stacked over layers are its own, all else is AdamW's."""

    def spec(path, leaf):
        return MuonDimensionNumbers(1, 2) if path[0].key == "layers" and leaf.ndim == 3 else None

    return jax.tree_util.tree_map_with_path(spec, params)


_OF_AGENT = {"nll": "loss", "entropy": "entropy", "clip_fraction": "clip_fraction", "gap": "gap", "kl": "kl", "ratio": "ratio"}


class GradientSpike(FloatingPointError):
    """A gradient far larger than those before it; it was not applied."""


class Updater:
    """Compiled gradient and optimiser steps for one backbone.

    Rows of a microbatch are spread over the mesh (axes "data" and "fsdp"); parameters, gradients and optimiser state lie as the
    parameters come (see dk_jax.models.sharding). On a CPU, XLA runs most of a small model's operations on one thread, so `streams`
    microbatches are worked on at a time, each stream adding up its own gradient. (Several CPU devices would do the same, but their
    all-reduce can starve for threads on few cores.)

    Args:
        static: the backbone's static part (dk_jax.models.backbone.build_backbone).
        optimizer: an optax transformation.
        loss: which loss.
        streams: microbatches in work at once; more than 1 needs more memory and helps on a CPU only.
        mesh: of `sharding.make_mesh`; all devices along "data" by default.
        run: how each program is run; `DeviceTurns.learn` where another thread uses the devices too.

    Raises:
        ValueError: several streams on several devices: their collectives would meet in different orders and wait for each other.
    """

    def __init__(
        self, static: Any, optimizer: optax.GradientTransformation, loss: LossConfig, streams: int = 1, mesh: jax.sharding.Mesh | None = None,
        run: Runner = at_once,
    ):  # fmt: skip
        self.mesh = mesh or make_mesh(data=jax.device_count())
        if streams > 1 and self.mesh.size > 1:
            raise ValueError(f"streams={streams} on a mesh of {self.mesh.size} devices: use streams=1, a mesh shares the work out itself")
        self.optimizer, self._static, self._loss, self._streams, self._run = optimizer, static, loss, streams, run
        self._compiled: tuple | None = None
        self._steps: dict[bool, Any] = {}

    def start(self, trainable: Any) -> Any:
        """The optimiser's state before the first update, every part of it where the parameter lies that it belongs to."""
        shapes = jax.eval_shape(self.optimizer.init, trainable)
        return jax.jit(self.optimizer.init, out_shardings=state_shardings(shapes, trainable, self.mesh))(trainable)

    def _programs(self, trainable: Any) -> tuple:
        """(gradient, zeros, add): compiled for parameters that lie so."""
        if self._compiled is None:
            self._compiled = _gradient_programs(self._static, self._loss, *_places(trainable))
        return self._compiled

    def _applied(self, trainable: Any, opt_state: Any, *, keep: bool = False) -> Any:
        """The optimiser's step, compiled for parameters and state that lie so; with `keep` the parameters are not overwritten."""
        if keep not in self._steps:
            self._steps[keep] = _optimizer_program(self.optimizer, keep, *_places((trainable, opt_state)))
        return self._steps[keep]

    def traced(self, trainable: Any, frozen: Any, opt_state: Any, batch: dict[str, Any]) -> tuple[jax.stages.Traced, jax.stages.Traced]:
        """The two programs of an update, a microbatch's gradient and the optimiser's step, traced and not run; for planning.

        Args: may be `jax.ShapeDtypeStruct`s with shardings.
        """
        total = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding), trainable)
        with self._on_mesh():
            gradient = self._programs(trainable)[0].trace(total, trainable, frozen, batch)
            return gradient, self._applied(trainable, opt_state).trace(trainable, opt_state, total)

    def gradient(
        self, trainable: Any, frozen: Any, batches: Iterable[dict[str, np.ndarray]]
    ) -> tuple[Any, dict[str, Any]]:
        """The gradient of the loss, summed over microbatches, and the sums that the loss tells; nothing is donated."""
        batches = list(batches)
        if not batches:
            raise ValueError("a gradient needs at least one microbatch")

        one, zeros, add = self._programs(trainable)

        def run(stream: int) -> tuple[Any, dict[str, Any]]:
            with self._on_mesh():
                own, sums = batches[stream :: self._streams], {}
                total = self._run(zeros, trainable) if len(own) > 1 else None  # there is nothing to add one's gradient to, and memory to be saved
                for batch in own:
                    total, stats = self._run(one, total, trainable, frozen, shard_batch(self.mesh, batch))
                    sums = {k: sums[k] + v if k in sums else v for k, v in stats.items()}
                return jax.block_until_ready((total, sums))

        used = min(self._streams, len(batches))
        if used == 1:
            total, sums = run(0)
        else:
            with ThreadPoolExecutor(used) as pool:
                parts = list(pool.map(run, range(used)))
            # Added in stream order: the same result whichever stream ends first.
            total, sums = parts[0]
            for more, stats in parts[1:]:
                total = self._run(add, total, more)
                sums = {k: sums[k] + stats[k] for k in sums}
        return total, sums

    def update(
        self,
        trainable: Any,
        frozen: Any,
        opt_state: Any,
        batches: Iterable[dict[str, np.ndarray]],
        *,
        largest_norm: float | None = None,
        keep: bool = False,
    ) -> tuple[Any, Any, dict[str, float]]:
        """Returns new (trainable, opt_state) and metrics. `opt_state` is donated, and `trainable` unless it is to be kept: somebody still
        uses it, which costs its memory once more.

        Metrics: grad_norm, loss, tokens, and means over tokens of what the loss tells (entropy, ...). For each AGENT with tokens also
        tokens_AGENT and means over them: in the cold start loss_AGENT, the negative log-likelihood; in RL entropy_AGENT, and of the ratio
        of probability now to probability when sampled ratio_AGENT, gap_AGENT (its logarithm's absolute value, in nats), kl_AGENT (the
        estimate of KL(sampled || now) in nats) and clip_fraction_AGENT (tokens whose gradient clipping cut off).

        Raises FloatingPointError, leaving nothing applied, when gradient or loss is not finite, and GradientSpike, likewise, when the
        gradient's norm is above `largest_norm`.
        """
        total, sums = self.gradient(trainable, frozen, batches)
        norm = float(self._run(_norm, total))  # one program: of many small ones each would wait for the other processes
        if not np.isfinite(norm):
            raise FloatingPointError(
                f"the gradient is not finite (norm {norm}). Lower the learning rate, or look for a broken row in the last batch."
            )
        if not np.isfinite(loss := float(sums["loss"])):
            raise FloatingPointError(f"the loss is {loss}. Look for a broken row in the last batch.")
        if largest_norm is not None and norm > largest_norm:
            raise GradientSpike(f"the gradient's norm is {norm:.4g}, above {largest_norm:.4g}")
        with self._on_mesh():
            trainable, opt_state = self._run(self._applied(trainable, opt_state, keep=keep), trainable, opt_state, total)
        found = {k: float(v) for k, v in sums.items()}
        tokens = max(found.pop("tokens"), 1.0)
        metrics = {"grad_norm": norm, "loss": found.pop("loss"), "tokens": tokens}
        for agent in AGENTS:
            own = found.pop(f"tokens_{agent}", 0.0)
            means = {name: found.pop(f"{key}_{agent}", None) for key, name in _OF_AGENT.items()}
            if own > 0:
                metrics |= {f"tokens_{agent}": own} | {f"{name}_{agent}": v / own for name, v in means.items() if v is not None}
        metrics |= {name: value / tokens for name, value in found.items()}
        return trainable, opt_state, metrics

    def _on_mesh(self) -> Any:
        """Keeps rows on their devices while something is traced; see `dk_jax.models.sharding`."""
        return jax.set_mesh(self.mesh) if self.mesh.size > 1 else nullcontext()


def state_shardings(state: Any, params: Any, mesh: jax.sharding.Mesh) -> Any:
    """Where each part of an optimiser's state goes: to the parameter whose place and shape it has, else whole to every device.

    Args:
        state: shapes, of `jax.eval_shape(optimizer.init, params)`.
        params: arrays.
    """
    whole = NamedSharding(mesh, PartitionSpec())
    known = {_names(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}

    def sharding(path, leaf):
        names = _names(path)
        for start in range(len(names)):
            owner = known.get(names[start:])
            if owner is not None and owner.shape == leaf.shape:
                return owner.sharding
        return whole

    return jax.tree_util.tree_map_with_path(sharding, state)


def _names(path: Sequence[Any]) -> tuple[str, ...]:
    return tuple(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))


def for_sampling(tree: Any) -> Any:
    """Parameters as a sampler takes them: spread over several devices they stay where they are, else the one device's own arrays."""
    return tree if mesh_of(tree) is not None else jax.tree.map(lambda leaf: leaf.addressable_data(0), tree)


_norm = jax.jit(optax.global_norm)


def _places(tree: Any) -> tuple[Any, tuple[Any, ...]]:
    """Where the leaves of a tree lie, as something that can be compared: its structure, and their shardings."""
    leaves, structure = jax.tree.flatten(jax.tree.map(lambda leaf: leaf.sharding, tree))
    return structure, tuple(leaves)


@lru_cache(maxsize=16)
def _gradient_programs(static: Any, loss: LossConfig, structure: Any, places: tuple[Any, ...]) -> tuple:
    """(gradient, zeros, add) for parameters that lie so: updaters of the same kind share them, and what was compiled of them."""
    lies = jax.tree.unflatten(structure, places)
    return (
        jax.jit(partial(_gradient, static, loss), donate_argnums=(0,), out_shardings=(lies, None)),
        jax.jit(lambda tree: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), tree), out_shardings=lies),
        jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=(0,), out_shardings=lies),
    )


@lru_cache(maxsize=16)
def _optimizer_program(optimizer: optax.GradientTransformation, keep: bool, structure: Any, places: tuple[Any, ...]) -> Any:
    """The optimiser's step for parameters and state that lie so; with `keep` the parameters are not overwritten."""
    lies = jax.tree.unflatten(structure, places)
    return jax.jit(partial(_apply, optimizer), donate_argnums=(1,) if keep else (0, 1), out_shardings=lies)


def _gradient(static, loss: LossConfig, total, trainable, frozen, batch):
    def objective(trainable):
        params = combine(trainable, frozen)
        logp, entropy = token_log_probs(
            static, params, batch["tokens"], batch["lengths"], batch["agents"], temperature=loss.temperature
        )
        mask = batch["mask"]
        stats = {"tokens": mask.sum(), "entropy": (jax.lax.stop_gradient(entropy) * mask).sum()}
        if loss.kind == "nll":
            per_token = -logp
            stats |= _by_agent({"nll": per_token}, mask, batch["agents"])
        else:
            per_token, info = clipped_policy_loss(
                logp, batch["old_logp"], batch["advantage"], mask,
                clip_low=loss.clip_low, clip_high=loss.clip_high, dual_clip=loss.dual_clip,
            )  # fmt: skip
            stats |= {name: (value * mask).sum() for name, value in info.items()}
            seen = {"entropy": entropy, "gap": jnp.abs(logp - batch["old_logp"])} | info
            stats |= _by_agent(seen, mask, batch["agents"])
        per_row = (per_token * mask).sum(-1)
        value = (per_row * batch["weight"]).sum()
        return value, stats | {"loss": value}

    (_, stats), grads = jax.value_and_grad(objective, has_aux=True)(trainable)
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    total = grads if total is None else jax.tree.map(jnp.add, total, grads)
    return total, jax.tree.map(jax.lax.stop_gradient, stats)


def _by_agent(values: dict[str, jax.Array], mask: jax.Array, agents: jax.Array) -> dict[str, jax.Array]:
    """Sums of each value (f32[B, T-1]) where `mask`, and of `mask`, over the rows of each agent (i32[B]); without gradient."""
    rows = {name: (jax.lax.stop_gradient(value) * mask).sum(-1) for name, value in values.items()} | {"tokens": mask.sum(-1)}
    return {f"{name}_{agent}": jnp.where(agents == i, row, 0.0).sum() for name, row in rows.items() for i, agent in enumerate(AGENTS)}


def _apply(optimizer, trainable, opt_state, grads):
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, trainable)
    updates, opt_state = optimizer.update(grads, opt_state, trainable)
    return optax.apply_updates(trainable, updates), opt_state
