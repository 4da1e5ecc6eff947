"""The programs of a recipe's training step, lowered and compiled for a mesh from shapes alone: no weight is made.

The mesh's devices are whatever JAX has; scripts/plan.py has it emulate as many as are asked for. Its CPU compiler can't do everything
as a GPU's or TPU's would, and where it can't this errs on the large side:

    attention "cudnn" is compiled as "blocks", whose scores of a block are extra
    products of bfloat16 are taken in float32, so some copies of weights and activations are twice as large
    gradients that end up cut are reduced whole, not reduce-scattered
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from dk_jax.models.backbone import abstract_backbone
from dk_jax.models.config import BackboneConfig
from dk_jax.models.lora import partition, trainable_mask
from dk_jax.models.presets import PRESETS
from dk_jax.models.sharding import batch_sharding, make_mesh, param_shardings, row_share
from dk_jax.plan.counting import bytes_per_device, collective_bytes, product_flops
from dk_jax.train import model as models
from dk_jax.train import updaters
from dk_jax.train.batch import Row, microbatches
from dk_jax.train.setup import ConfigError
from dk_jax.train.update import Updater, state_shardings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One compiled program, on each device.

    Attributes:
      temporary_bytes: memory that it needs besides arguments and results, or for results that are not written over arguments.
      sent_bytes: to other devices, in one run, by extent (`counting.collective_bytes`).
      seconds: that compiling took.
    """

    temporary_bytes: int
    sent_bytes: dict[int, int]
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A recipe's training step on a mesh, as shapes.

    Attributes:
      model: its leaves are `jax.ShapeDtypeStruct`s with shardings.
      state: the optimiser's, likewise. gradient: as it is summed up over microbatches.
      attention: that of the recipe; `model.config` has the one that is compiled.
    """

    cfg: ConfigDict
    model: models.Model
    updater: Updater
    state: Any
    gradient: Any
    attention: str

    @property
    def config(self) -> BackboneConfig:
        return self.model.config

    @property
    def mesh(self) -> Mesh:
        return self.model.mesh


def backbone_config(cfg: ConfigDict) -> BackboneConfig:
    """Shapes and arithmetic of the recipe's model, without its weights.

    Raises:
      ConfigError: a model whose shapes only its files say.
    """
    m = cfg.model
    try:
        if m.init == "scratch":
            return models.scratch_config(m, max(cfg.codec.vocab_size, 1), "gpu")
        if m.init in PRESETS:
            return models.named_config(m, "gpu")
    except ValueError as error:
        raise ConfigError(f"model: {error}") from error
    raise ConfigError(f"model.init is {m.init!r}, whose shapes are not known without its files: use one of {', '.join(PRESETS)}")


def make_step(cfg: ConfigDict, sizes: dict[str, int], devices: Sequence[jax.Device] | None = None) -> Step:
    """The step of a recipe on a mesh of these sizes.

    Raises:
      ConfigError: a mesh that does not divide the model, or for which there are not enough devices.
    """
    config = backbone_config(cfg)
    attention = config.attention
    if attention == "cudnn":
        config = dataclasses.replace(config, attention="blocks")
    try:
        mesh = make_mesh(**sizes, devices=devices)
        static, shapes = abstract_backbone(config)
        lies = param_shardings(static, mesh)
    except ValueError as error:
        raise ConfigError(f"mesh {', '.join(f'{name}={size}' for name, size in sizes.items())}: {error}") from error
    params = _placed(shapes, lies)
    trainable, frozen = partition(params, trainable_mask(static, params, cfg.model.train))
    model = models.Model(static=static, trainable=trainable, frozen=frozen, codec=None, config=config, mesh=mesh)
    cfg = cfg.copy_and_resolve_references()
    with cfg.unlocked():
        cfg.learner.streams = 1
    updater = updaters.for_rl(cfg, model)
    state = jax.eval_shape(updater.optimizer.init, trainable)
    state = _placed(state, state_shardings(state, trainable, mesh))
    gradient = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding), trainable)
    return Step(cfg=cfg, model=model, updater=updater, state=state, gradient=gradient, attention=attention)


def _placed(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings)


def batch_shapes(step: Step, rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """A microbatch of so many rows of so many tokens, spread over the mesh.

    Raises:
      ConfigError: rows that the mesh does not divide.
    """
    if rows % row_share(step.mesh):
        raise ConfigError(f"{rows} rows can't be spread over a mesh {dict(step.mesh.shape)}: use a multiple of {row_share(step.mesh)}")
    row = Row(tokens=[0] * length, loss=[1.0] * length, advantage=[0.0] * length, old_logp=[0.0] * length, agent=0, weight=1.0)
    (one,) = microbatches([row], size=1, step=length)
    lies: NamedSharding = batch_sharding(step.mesh)
    return {name: jax.ShapeDtypeStruct((rows, *value.shape[1:]), value.dtype, sharding=lies) for name, value in one.items()}


def compile_gradient(step: Step, rows: int, length: int) -> Program:
    """The program that adds a microbatch's gradient to the sum."""
    return _compile(_traced(step, rows, length)[0])


def compile_update(step: Step) -> Program:
    """The optimiser's step."""
    return _compile(_traced(step, row_share(step.mesh), 2)[1])


def _traced(step: Step, rows: int, length: int) -> tuple[jax.stages.Traced, jax.stages.Traced]:
    model = step.model
    return step.updater.traced(model.trainable, model.frozen, step.state, batch_shapes(step, rows, length))


def _compile(traced: jax.stages.Traced) -> Program:
    started = time.monotonic()
    compiled = traced.lower().compile()
    memory = compiled.memory_analysis()
    sent: dict[int, int] = {}
    for (_, extent), size in collective_bytes(compiled.as_text()).items():
        sent[extent] = sent.get(extent, 0) + size
    new = max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0)
    return Program(
        temporary_bytes=memory.temp_size_in_bytes + new,
        sent_bytes=sent,
        seconds=time.monotonic() - started,
    )


def microbatch_flops(step: Step, rows: int, length: int) -> tuple[float, float]:
    """(model FLOPs, FLOPs done) of one microbatch's gradient, on all devices together; the second with what rematerialisation repeats.

    Products with weights are counted in the traced program. Attention is causal: half of all pairs, 4 N H FLOPs a pair forward, 2.5
    times as many backward (Dao 2023, arXiv:2307.08691, section 4.1), and forward once more where it is recomputed.
    """
    cfg = step.config
    pairs = rows * length * length / 2
    attention = cfg.n_layers * 4 * cfg.n_heads * cfg.head_dim * pairs
    found = []
    for remat in ("none", cfg.remat):
        static, _ = abstract_backbone(dataclasses.replace(cfg, remat=remat))
        model = dataclasses.replace(step.model, static=static)
        again = dataclasses.replace(step, model=model, updater=updaters.for_rl(step.cfg, model))
        traced, _ = _traced(again, rows, length)
        plain, _ = product_flops(traced.jaxpr)
        twice = remat == "full" or (remat != "none" and step.attention != "cudnn")
        found.append(plain + attention * (4.5 if twice else 3.5))
    # Log-probs recompute the logits of each chunk in the backward pass whether layers are recomputed or not.
    logits = 2 * rows * (length - 1) * cfg.vocab_size * cfg.d_model
    return found[0] - logits, found[1]


def parts_of(step: Step) -> dict[str, int]:
    """Bytes on each device of what a training step holds throughout: parameters, optimiser state, the summed gradient."""
    return {
        "parameters": bytes_per_device((step.model.trainable, step.model.frozen)),
        "optimiser": bytes_per_device(step.state),
        "gradient": bytes_per_device(step.gradient),
    }
