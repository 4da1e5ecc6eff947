"""A plan as text."""

from __future__ import annotations

from typing import Any

from dk_jax.models.presets import parameter_count
from dk_jax.plan.estimate import BEHIND, Fit, Plan
from dk_jax.plan.hardware import EFFICIENCY, USABLE

GIB = 2**30
_RECOMPUTED = {
    "none": "", "products": ", recomputed but for products and attention", "attention": ", recomputed but for attention", "full": ", recomputed",
}  # fmt: skip


def report(plan: Plan) -> str:
    """The whole report, lines of at most 120 characters."""
    step, cfg = plan.step, plan.step.config
    sizes = ", ".join(f"{name}={size}" for name, size in step.mesh.shape.items())
    stand_in = f"; attention {step.attention!r} compiled as {cfg.attention!r}" if step.attention != cfg.attention else ""
    lines = [
        f"{step.cfg.model.init}: {parameter_count(cfg) / 1e9:.2f} billion parameters ({step.cfg.model.train} training) on {step.mesh.size} "
        f"devices: {sizes}",
        f"compiled: the gradient of a microbatch ({cfg.n_layers} layers scanned{_RECOMPUTED[cfg.remat]}{stand_in}) and the "
        f"optimiser's step, in {plan.compile_s:.0f} s",
        "",
        "GiB on each device",
        *(f"  {name:34} {size / GIB:8.2f}" for name, size in memory_parts(plan).items()),
        f"  {'a microbatch: gathered, own gradient':34} {plan.base_bytes / GIB:6.2f}   + {1024 * plan.token_bytes / GIB:.2f} for each 1,024 tokens",
        "",
        f"{'':14}{'microbatch that fits':>26}{'GiB, of':>16}{'sampled at once':>17}{'PFLOP':>8}{'sent':>8}{'s':>7}{'by':>7}{'update':>14}",
        *(_line(fit, plan) for fit in plan.fits),
        "",
        f"GiB: training with that microbatch, of {USABLE:.0%} of the device. Sampled at once: rows of {plan.length:,} slots that fit; the recipe has",
        f"{plan.rows}, with which sampling takes {plan.fits[0].sampling_bytes / GIB:.1f} GiB. PFLOP: of a microbatch, all devices together. "
        "Sent: GB, by each device",
        f"to others for a microbatch, as this machine's compiler has it. Update: all {plan.sequences:,} sequences of a step at full length "
        f"({plan.length:,} tokens)",
        "and the optimiser; sampling and judging come on top"
        + (", or beside, as rl.staleness is 1: memory counts what both hold at once." if BEHIND in plan.parts else "."),
        f"Time: the largest of FLOPs, memory traffic and what is sent, at {EFFICIENCY['flops']:.0%}, {EFFICIENCY['bytes']:.0%} and "
        f"{EFFICIENCY['links']:.0%} of the data sheet's rates.",
    ]
    return "\n".join(lines)


def memory_parts(plan: Plan) -> dict[str, int]:
    """Bytes on each device by part."""
    g = plan.generation
    return {
        "parameters": plan.parts["parameters"],
        "optimiser": plan.parts["optimiser"],
        "gradient, summed": plan.parts["gradient"],
        **({"parameters that sample": plan.parts[BEHIND]} if BEHIND in plan.parts else {}),
        "optimiser's step": plan.update.temporary_bytes,
        "sampling: weights": g.weights,
        f"sampling: cache, {plan.rows} rows": g.cache,
        "sampling: logits or prefill": max(g.logits, g.prefill),
    }


def _line(fit: Fit, plan: Plan) -> str:
    room = f"{fit.training_bytes / GIB:.1f}, {USABLE * fit.device.memory_bytes / GIB:.1f}"
    if not fit.rows:
        return f"{fit.device.name:14}{'none':>26}{room:>16}{fit.sampling_rows:>17,}"
    batch = f"{fit.rows} x {fit.length:,} tokens"
    update = f"{fit.microbatches} x, {fit.update_s:,.0f} s"
    return (
        f"{fit.device.name:14}{batch:>26}{room:>16}{fit.sampling_rows:>17,}{fit.flops / 1e15:>8.1f}"
        f"{sum(fit.program.sent_bytes.values()) / 1e9:>8,.0f}{fit.microbatch_s:>7.1f}{fit.bound:>7}{update:>14}"
    )


def as_data(plan: Plan) -> dict[str, Any]:
    """The same as plain numbers, in bytes and seconds."""
    return {
        "model": plan.step.cfg.model.init,
        "mesh": dict(plan.step.mesh.shape),
        "parts_bytes": memory_parts(plan),
        "microbatch_bytes": {"base": plan.base_bytes, "per_token": plan.token_bytes},
        "devices": [
            {
                "device": fit.device.name, "rows": fit.rows, "length": fit.length, "training_bytes": fit.training_bytes,
                "sampling_bytes": fit.sampling_bytes, "sampling_rows": fit.sampling_rows, "flops": fit.flops, "model_flops": fit.model_flops,
                "sent_bytes": fit.program.sent_bytes if fit.program else {}, "microbatch_s": fit.microbatch_s, "bound": fit.bound,
                "microbatches": fit.microbatches, "update_s": fit.update_s,
            }
            for fit in plan.fits
        ],
    }  # fmt: skip
