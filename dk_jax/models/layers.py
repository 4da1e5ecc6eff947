"""The parts every layer is made of: linear maps with an optional LoRA branch, RMSNorm, rotary embeddings."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from dk_jax.models.config import BackboneConfig


def product_precision(dtype) -> jax.lax.Precision:
    """Keeps float32 products in float32 on accelerators, whose default for them is TF32."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


class Linear(nnx.Module):
    """y = x W (+ lora_alpha / r * (x A) B). W is [in, out]; B and so LoRA start at zero.

    `name` is one of PROJECTIONS; the LoRA branch is there where `cfg.lora_targets` has it and `cfg.lora_rank` is not 0.
    """

    def __init__(self, cfg: BackboneConfig, name: str, n_in: int, n_out: int, rngs: nnx.Rngs, scale: float = 1.0):
        self.kernel = nnx.Param(_normal(rngs, (n_in, n_out), scale * cfg.init_std, cfg.param_dtype))
        adapted = cfg.lora_rank and name in cfg.lora_targets
        self.lora_scale = cfg.lora_alpha / cfg.lora_rank if adapted else None
        if adapted:
            # LoRA is small and trained: always float32, whatever the frozen weights are stored in.
            self.lora_a = nnx.Param(_normal(rngs, (n_in, cfg.lora_rank), n_in**-0.5, "float32"))
            self.lora_b = nnx.Param(jnp.zeros((cfg.lora_rank, n_out), "float32"))

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        y = matmul(x, self.kernel[...])
        if self.lora_scale is not None:
            y = y + self.lora_scale * matmul(matmul(x, self.lora_a[...]), self.lora_b[...])
        return y


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis, in float32, returned in the compute dtype. `shape`: of the scale, its last axis x's."""

    def __init__(self, cfg: BackboneConfig, *shape: int):
        self.scale = nnx.Param(jnp.ones(shape, cfg.param_dtype))
        self.eps = cfg.norm_eps
        self.dtype = cfg.dtype

    def __call__(self, x: Float[Array, "... W"]) -> Float[Array, "... W"]:
        x32 = on_own_rows(x.astype(jnp.float32))
        inverse_rms = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (x32 * inverse_rms * self.scale[...].astype(jnp.float32)).astype(self.dtype)


class Table(nnx.Module):
    """A [V, D] table: embeds token ids, and turns hidden states into logits."""

    def __init__(self, cfg: BackboneConfig, rngs: nnx.Rngs):
        self.table = nnx.Param(_normal(rngs, (cfg.vocab_size, cfg.d_model), cfg.init_std, cfg.param_dtype))
        self.dtype = cfg.dtype

    def embed(self, tokens: Int[Array, " ..."]) -> Float[Array, "... D"]:
        """Rows of the table as rounded to the compute dtype, in float32: the start of the residual stream."""
        return on_own_rows(_rows_whole(self.table[...])[tokens].astype(self.dtype).astype(jnp.float32))

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Logits in float32, accumulated in float32 whatever the compute dtype."""
        flat = jnp.einsum(
            "rd,vd->rv",
            hidden.reshape(-1, hidden.shape[-1]),
            self.table[...].astype(hidden.dtype),
            precision=product_precision(hidden.dtype),
            preferred_element_type=jnp.float32,
        )
        return flat.reshape(*hidden.shape[:-1], -1)


def matmul(x: Float[Array, "... I"], kernel: Float[Array, "I O"]) -> Float[Array, "... O"]:
    """x W in x's dtype; the weight is cast to it on the way in.

    As a plain product of two matrices: XLA's CPU backend takes the weight gradient of a product over several leading axes
    ten times slower.
    """
    rows = x.reshape(-1, x.shape[-1])
    y = jnp.matmul(rows, kernel.astype(x.dtype), precision=product_precision(x.dtype))
    return y.reshape(*x.shape[:-1], kernel.shape[-1])


def on_own_rows(x: Float[Array, "B *rest W"]) -> Float[Array, "B *rest W"]:
    """Keeps each row of the batch on the devices that its tokens are on, its last axis whole; the identity but for that.

    Takes effect under `jax.set_mesh` of a mesh with axes "data" and "fsdp" (dk_jax.models.sharding) that divide B. XLA then
    gathers the weights that are cut along D; left alone it adds up partial products of all rows instead, and every device
    attends in all rows.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not {"data", "fsdp"} <= mesh.shape.keys() or x.shape[0] % (mesh.shape["data"] * mesh.shape["fsdp"]):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(("data", "fsdp"), *(PartitionSpec.UNCONSTRAINED,) * (x.ndim - 2), None))


def _rows_whole(table: Float[Array, "V D"]) -> Float[Array, "V D"]:
    """The table with rows gathered along D, as looking up whole embeddings needs them; see `on_own_rows`."""
    if "fsdp" not in jax.sharding.get_abstract_mesh().shape:
        return table
    return jax.lax.with_sharding_constraint(table, PartitionSpec(PartitionSpec.UNCONSTRAINED, None))


def rope_angles(
    cfg: BackboneConfig, positions: Int[Array, "B T"]
) -> tuple[Float[Array, "B T 1 H"], Float[Array, "B T 1 H"]]:
    """cos and sin of the rotary angles, float32, with an axis for heads.

    Frequencies follow Su et al. 2021 (arXiv:2104.09864) in the half-split layout of Hugging Face: component i
    is paired with i + H/2, so both halves carry the same H/2 angles.
    """
    half = cfg.head_dim // 2
    frequencies = cfg.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    angles = jnp.concatenate([angles, angles], axis=-1)[..., None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "B T N H"], cos: Float[Array, "B T 1 H"], sin: Float[Array, "B T 1 H"]
) -> Float[Array, "B T N H"]:
    """Applies the rotary embedding in float32 and returns x's dtype."""
    x32 = x.astype(jnp.float32)
    first, second = jnp.split(x32, 2, axis=-1)
    return (x32 * cos + jnp.concatenate([-second, first], axis=-1) * sin).astype(x.dtype)


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float, dtype: str):
    return (std * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype)
