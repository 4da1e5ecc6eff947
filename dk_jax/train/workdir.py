"""What a workdir remembers of the run that was started in it: its config, and the content of the weights it began with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from dk_jax.train.setup import ConfigError

WEIGHTS = "weights.json"
_SAMPLE_BYTES = 1 << 20

# Numbers that say how long and where, not what is computed.
#   sandbox.isolation       how candidates are locked in; honest kernels get the same verdicts at every level
#   learner.memory_fraction what is left for candidates on a shared card
#   learner.mesh            the devices that share the work out; results differ by rounding
#   learner.mesh, .streams  where it is computed: sums are added in another order, so what follows is the same but for rounding
#   rl.max_grad_norm_spike  which steps are refused; what stopped a run may be let pass
# In part (see `remember_config`): sandbox.device, model.source, and rl.steps where no schedule depends on it.
_MAY_CHANGE = frozenset(
    {
        "rl.steps",
        "sandbox.workers",
        "sandbox.retry_for_s",
        "sandbox.parallel_tasks",
        "sandbox.isolation",
        "learner.memory_fraction",
        "learner.streams",
        "learner.mesh.data",
        "learner.mesh.fsdp",
        "learner.mesh.tensor",
        "rl.checkpoint_every",
        "rl.keep_checkpoints",
        "rl.keep_best",
        "rl.keep_rollouts",
        "rl.max_grad_norm_spike",
        "sft.checkpoint_every",
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
    differing = sorted(k for k in a.keys() & b.keys() if a[k] != b[k] and k not in free)
    if differing:
        lines = ", ".join(f"{k}: {a[k]} -> {b[k]}" for k in differing)
        raise ConfigError(f"{workdir} was started with another config ({lines}). Use that config, or another --workdir.")
    new, gone = (sorted(k for k in some.keys() - others.keys() if k not in free) for some, others in ((b, a), (a, b)))
    if new or gone:
        raise ConfigError(_of_another_version(path, {k: b[k] for k in new}, {k: a[k] for k in gone}))
    _write(path, wanted)


def _of_another_version(path: Path, new: dict[str, Any], gone: dict[str, Any]) -> str:
    """What to say of a workdir's config whose keys are not those of this version, its values being the same."""
    said = []
    if new:
        said.append(f"it lacks {', '.join(new)} (here {', '.join(map(repr, new.values()))})")
    if gone:
        said.append(f"it has {', '.join(f'{k} (then {v!r})' for k, v in gone.items())}, of which nothing is known here")
    return (
        f"{path.parent} was started by another version of this program, as its {path.name} shows: {'; '.join(said)}. A key that came later has, "
        "with its default in configs/demo.py, the effect of the version before. To go on in this workdir, see that the values given here "
        f"continue what was begun there, then delete {path}: this config is then remembered in its place, and nothing else is changed. "
        "Or finish with the version that began it, or use another --workdir."
    )


def remember_weights(cfg: ConfigDict, workdir: Path) -> None:
    """Writes the SHA-256 of the weights file to workdir/weights.json, or checks that it is the one written there.

    The file may lie elsewhere than before, and have another name. Nothing is done for a model from scratch.

    Raises:
        ConfigError: a file of other content; names both.
        FileNotFoundError: there is no such file, or the package that holds it is not installed.
    """
    if cfg.model.init == "scratch" or cfg.model.source == "random":
        return
    if cfg.model.init == "smollm2":
        from dk_jax.interop.smollm2 import locate

        source = Path(cfg.model.source) if cfg.model.source else locate()
        files = [source]
    else:
        source = Path(cfg.model.source)
        files = [source / "config.json", *sorted(source.glob("*.safetensors"))]
    digest, size = _digest(files), sum(file.stat().st_size for file in files)
    path = workdir / WEIGHTS
    if not path.exists():
        _write(path, {"sha256": digest, "file": source.name, "bytes": size})
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["sha256"] != digest:
        raise ConfigError(
            f"{workdir} was started with the weights of {found['file']!r} (SHA-256 {found['sha256'][:16]}..., {found['bytes']} bytes), "
            f"but {source} holds others ({digest[:16]}..., {size} bytes). Give that file as model.source, or another --workdir."
        )


def _digest(files: Sequence[Path]) -> str:
    """SHA-256 of one file's content; of a checkpoint's files, which may be hundreds of gigabytes, of names, sizes and samples of
    1 MiB: the beginning, which holds the header, the end, and seven places between."""
    if len(files) == 1:
        with open(files[0], "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with open(path, "rb") as file:
            for place in range(9):
                file.seek(max(size - _SAMPLE_BYTES, 0) * place // 8)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


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
