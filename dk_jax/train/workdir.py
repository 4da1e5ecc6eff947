"""What a workdir remembers of the run that was started in it: its config, and the content of the weights it began with."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from ml_collections import ConfigDict

from dk_jax.train.setup import ConfigError

WEIGHTS = "weights.json"

# Numbers that say how long and where, not what is computed.
#   sandbox.isolation       how candidates are locked in; honest kernels get the same verdicts at every level
#   learner.memory_fraction what is left for candidates on a shared card
# In part (see `remember_config`): sandbox.device, model.source, and rl.steps where no schedule depends on it.
_MAY_CHANGE = frozenset(
    {
        "rl.steps",
        "sandbox.workers",
        "sandbox.retry_for_s",
        "sandbox.parallel_tasks",
        "sandbox.isolation",
        "learner.memory_fraction",
        "evaluation.max_tasks",
    }
)


def remember_config(cfg: ConfigDict, workdir: Path) -> None:
    """Writes the config to workdir/config.json, or checks that it is the one the workdir was started with.

    What says how long and where, and not what is computed, may change: besides the keys above `sandbox.device` from one card to
    another (not between CPU and card, whose speedups are not comparable), and `model.source` once the content of the weights is
    remembered (see `remember_weights`) or while no weights were loaded (no codec is there).

    Raises:
        ConfigError: names the keys that differ: a run is resumed with its own config, or started in another workdir.
    """
    path = workdir / "config.json"
    wanted = json.loads(json.dumps(cfg.to_dict(), sort_keys=True))
    if not path.exists():
        _write(path, wanted)
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    a, b = dict(_flat(found)), dict(_flat(wanted))
    free = set(_MAY_CHANGE)
    if cfg.rl.decay:
        free.remove("rl.steps")  # a schedule over the steps depends on their number
    if _kind(a.get("sandbox.device")) == _kind(b.get("sandbox.device")):
        free.add("sandbox.device")
    if (workdir / WEIGHTS).exists() or not (workdir / "codec").exists():
        free.add("model.source")
    differing = sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k) and k not in free)
    if differing:
        lines = ", ".join(f"{k}: {a.get(k, 'absent')} -> {b.get(k, 'absent')}" for k in differing)
        raise ConfigError(f"{workdir} was started with another config ({lines}). Use that config, or another --workdir.")
    _write(path, wanted)


def remember_weights(cfg: ConfigDict, workdir: Path) -> None:
    """Writes the SHA-256 of the weights file to workdir/weights.json, or checks that it is the one written there.

    The file may lie elsewhere than before, and have another name. Nothing is done for a model from scratch.

    Raises:
        ConfigError: a file of other content; names both.
        FileNotFoundError: there is no such file, or the package that holds it is not installed.
    """
    if cfg.model.init != "smollm2":
        return
    from dk_jax.interop.smollm2 import locate

    source = Path(cfg.model.source) if cfg.model.source else locate()
    with open(source, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    path = workdir / WEIGHTS
    if not path.exists():
        _write(path, {"sha256": digest, "file": source.name, "bytes": source.stat().st_size})
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["sha256"] != digest:
        raise ConfigError(
            f"{workdir} was started with the weights of {found['file']!r} (SHA-256 {found['sha256'][:16]}..., {found['bytes']} bytes), "
            f"but {source} holds others ({digest[:16]}..., {source.stat().st_size} bytes). Give that file as model.source, or another --workdir."
        )


def _write(path: Path, data: dict) -> None:
    """JSON, complete or not at all."""
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(data, indent=1, sort_keys=True), encoding="utf-8")
    partial.replace(path)


def _kind(device: str | None) -> str:
    """cuda of cuda:0."""
    return (device or "").partition(":")[0]


def _flat(data: dict, prefix: str = ""):
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
