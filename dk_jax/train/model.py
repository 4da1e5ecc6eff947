"""The model of a run from its config: devices, codec, backbone with fresh or loaded weights, what of it is trained."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from dk_jax.generation.tokenizer import Codec, hf_codec, load_codec, train_codec
from dk_jax.interop.huggingface import check_vocabulary
from dk_jax.models.backbone import abstract_backbone, build_backbone
from dk_jax.models.config import BackboneConfig
from dk_jax.models.lora import partition, trainable_mask
from dk_jax.models.presets import PRESETS, preset
from dk_jax.models.sharding import build_sharded, make_mesh, on_mesh, param_shardings, row_share
from dk_jax.rollout.trajectory import derive_seed
from dk_jax.train.setup import ConfigError
from dk_jax.train.update import trained_labels

log = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True)
class Model:
    """Backbone, its split parameters, and the codec."""

    static: Any
    trainable: Any
    frozen: Any
    codec: Codec
    config: BackboneConfig
    mesh: Mesh


def trains_codec(cfg: ConfigDict, workdir: Path) -> bool:
    """Whether `make_codec` will need texts."""
    return cfg.codec.kind == "train" and not (workdir / "codec" / "done").exists()


def make_codec(cfg: ConfigDict, workdir: Path, texts: Callable[[], Sequence[str]]) -> Codec:
    """The codec of the run, kept in workdir/codec; trained on `texts()` the first time, or the model's own."""
    directory = workdir / "codec"
    if (directory / "done").exists():
        return load_codec(directory)
    if cfg.codec.kind == "train":
        codec = train_codec(list(texts()), cfg.codec.vocab_size, tuple(cfg.codec.idioms))
    elif cfg.codec.kind == "model" and cfg.model.init == "smollm2":
        from dk_jax.interop.smollm2 import load

        codec = load(cfg.model.source or None)[2]
    elif cfg.codec.kind == "model" and cfg.model.source:
        codec = hf_codec(cfg.model.source)
    else:
        raise ConfigError(
            f"codec.kind={cfg.codec.kind!r} with model.init={cfg.model.init!r} and model.source={cfg.model.source!r}: use 'train', or "
            "'model' where the weights bring a tokenizer"
        )
    directory.mkdir(parents=True, exist_ok=True)
    codec.save(directory)
    (directory / "done").touch()
    return codec


def scratch_config(m: ConfigDict, vocab_size: int, platform: str | None = None) -> BackboneConfig:
    """A fresh model's shapes and arithmetic, by the recipe's `model`, for JAX's platform or the one that is named. Raises ValueError where
    they don't fit together."""
    names = [field.name for field in dataclasses.fields(BackboneConfig) if field.name in m and field.name != "attention"]
    return with_attention(BackboneConfig(vocab_size=vocab_size, **{name: m[name] for name in names}), m, platform)


def with_attention(config: BackboneConfig, m: ConfigDict, platform: str | None = None) -> BackboneConfig:
    """The same with attention in training as `model.attention` says; "auto" is cuDNN's where the platform and the model allow it, else XLA's.

    Raises:
      ValueError: an attention that the model can't have.
    """
    asked = m.get("attention", "xla")
    if asked != "auto":
        return dataclasses.replace(config, attention=asked)
    if (platform or jax.default_backend()) != "gpu":
        return dataclasses.replace(config, attention="xla")
    try:
        return dataclasses.replace(config, attention="cudnn")
    except ValueError:  # not in this arithmetic, or not with such heads
        return dataclasses.replace(config, attention="xla")


def make_mesh_of(cfg: ConfigDict) -> Mesh:
    """The devices that the learner works on, by `learner.mesh`; data=0 takes all that fsdp and tensor leave.

    Raises:
      ConfigError: a mesh that this machine does not have.
    """
    sizes, devices = cfg.learner.mesh.to_dict(), jax.devices()
    within = sizes["fsdp"] * sizes["tensor"]
    if min(sizes["fsdp"], sizes["tensor"]) < 1 or sizes["data"] < 0:
        raise ConfigError(f"learner.mesh={sizes}: fsdp and tensor must be at least 1, data at least 0 (all devices that are left)")
    data = sizes["data"] or len(devices) // within
    if not 1 <= data * within <= len(devices) or (jax.process_count() > 1 and data * within < len(devices)):
        raise ConfigError(f"learner.mesh={sizes} needs {max(data, 1) * within} devices, JAX has {len(devices)}: {devices[0].platform}")
    return make_mesh(data=data, fsdp=sizes["fsdp"], tensor=sizes["tensor"], devices=devices[: data * within])


def named_config(m: ConfigDict, platform: str | None = None) -> BackboneConfig:
    """The shapes of a published model (`model.init`, of dk_jax.models.presets) with the recipe's arithmetic, heads and LoRA, for JAX's
    platform or the one that is named."""
    return with_attention(preset(m.init, **_overrides(m)), m, platform)


def _overrides(m: ConfigDict) -> dict[str, Any]:
    """What a recipe says of loaded weights: how they are stored and used, and what is added to them."""
    names = ("compute_dtype", "param_dtype", "head_rank", "lora_rank", "lora_alpha", "lora_targets", "remat")
    return {name: tuple(m[name]) if name == "lora_targets" else m[name] for name in names if name in m}


def make_model(cfg: ConfigDict, codec: Codec) -> Model:
    """Backbone with fresh or loaded weights on the learner's devices, split into what is trained and what is frozen.

    `model.init` is "scratch" (the recipe's own shapes), "smollm2" (the package's weights), "huggingface" (the checkpoint in the
    directory `model.source`), or the name of a published model, whose checkpoint `model.source` has to hold ("random" draws weights,
    for benchmarks).

    Raises:
      ConfigError: an unknown `model.init`, a checkpoint of another model. ValueError: a mesh that does not divide the model.
    """
    m, mesh = cfg.model, make_mesh_of(cfg)
    check_rows(cfg, mesh)
    key = jax.random.key(derive_seed(cfg.seed, "init") & 0xFFFFFFFF)
    if m.init == "scratch" or (m.init in PRESETS and m.source == "random"):
        config = scratch_config(m, codec.vocab_size) if m.init == "scratch" else named_config(m)
        if mesh.size > 1:
            static, params = build_sharded(config, key, mesh)
        else:
            static, params = build_backbone(config, key)
    elif m.init == "smollm2":
        from dk_jax.interop.smollm2 import load

        config, params, _ = load(m.source or None, **_overrides(m))
        config = with_attention(config, m)
        static, _ = abstract_backbone(config)
    elif m.init == "huggingface" or m.init in PRESETS:
        from dk_jax.interop.huggingface import load

        config, params = load(m.source, mesh=mesh if mesh.size > 1 else None, key=key, **_overrides(m))
        config = with_attention(config, m)
        if m.init in PRESETS and config != (named := named_config(m)):
            differ = [f.name for f in dataclasses.fields(config) if getattr(config, f.name) != getattr(named, f.name)]
            raise ConfigError(f"model.source={m.source!r} is no {m.init}: it differs in {', '.join(differ)}. Use model.init='huggingface'")
        static, _ = abstract_backbone(config)
    else:
        raise ConfigError(f"model.init is {m.init!r}: use 'scratch', 'smollm2', 'huggingface' or one of {', '.join(PRESETS)}")
    log.info("attention in training: %s", config.attention)
    check_vocabulary(config, codec)
    params = on_mesh(params, param_shardings(static, mesh))
    trainable, frozen = partition(params, trainable_mask(static, params, m.train))
    return Model(static=static, trainable=trainable, frozen=frozen, codec=codec, config=config, mesh=mesh)


def check_rows(cfg: ConfigDict, mesh: Mesh) -> None:
    """Whether rows can be spread evenly over the mesh, and one process works on it at a time. Raises ConfigError."""
    share = row_share(mesh)
    for key in ("rollout.max_rows", "sft.microbatch", "rl.microbatch"):
        group, name = key.split(".")
        rows = cfg[group][name]
        if rows % share:
            raise ConfigError(f"{key}={rows} rows can't be spread over learner.mesh={dict(mesh.shape)}: use a multiple of {share}")
    if mesh.size > 1 and cfg.learner.streams > 1:
        raise ConfigError(f"learner.streams={cfg.learner.streams} with {mesh.size} devices: use 1, the mesh shares the work out itself")


def check_source(m: ConfigDict) -> None:
    """Whether weights can be had where a recipe says. Raises ConfigError."""
    if m.init in PRESETS and not m.source:
        raise ConfigError(
            f"model.init={m.init!r} needs its weights: --config.model.source=DIRECTORY of the Hugging Face checkpoint, or 'random' for "
            "a benchmark"
        )
    if (m.init == "huggingface" or m.init in PRESETS) and m.source != "random" and not (Path(m.source) / "config.json").is_file():
        raise ConfigError(f"model.source={m.source!r} has no config.json: give the directory of a Hugging Face checkpoint")


def check_modules(cfg: ConfigDict) -> None:
    """Raises ConfigError where `rl.only` names a module of which this config's RL trains nothing."""
    m, size = cfg.model, dict(vocab_size=8, d_model=8, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=8, d_ff=8)
    # Loaded weights bring their own family; the modules that can be named are the same in all.
    config = BackboneConfig(family=m.get("family", "llama"), head_rank=m.head_rank, lora_rank=m.lora_rank, **size)
    static, params = abstract_backbone(config)
    trainable, _ = partition(params, trainable_mask(static, params, m.train))
    try:
        trained_labels(tuple(cfg.rl.only), trainable)
    except ValueError as error:
        raise ConfigError(f"rl.only={tuple(cfg.rl.only)}: {error}; () trains everything") from error
