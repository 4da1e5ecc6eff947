"""The parameters that arms begin with: kept once when a cold start has ended, and planted into the folder of each arm.

A start is a folder: `checkpoints/STEP` holds the trainable parameters alone, written and sealed as all of the trainer's checkpoints are;
`codec` and, where weights were loaded, `weights.json` are those of the cold start's run; `start.json`, written last, names it by a digest of
the parameters. An arm's folder gets codec and weights.json, so that its run reads them as its own, and a copy of start.json; the parameters
are handed to its RL, which is what a run does with those of its own cold start.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dk_jax.evaluation.policies import restore_trainable
from dk_jax.evaluation.results import save_json
from dk_jax.reproduce.arms import AblationError
from dk_jax.train import manifest
from dk_jax.train.state import Checkpoints, TrainState
from dk_jax.train.workdir import WEIGHTS

MARK = "start.json"


def keep(run: Any, state: TrainState, folder: Path) -> None:
    """Keeps what a run's cold start has ended with.

    Args:
        run: dk_jax.train.run.Run whose `sft` returned `state`.
        folder: the start's; whatever a crash has left there is taken away.
    """
    shutil.rmtree(folder, ignore_errors=True)
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(TrainState(step=state.step, trainable=state.trainable, opt_state={}, record={}))
    _copy(run.workdir, folder)
    save_json(folder / MARK, {"step": state.step, "digest": digest(state.trainable)})


def is_kept(folder: Path) -> bool:
    return (folder / MARK).exists()


def plant(folder: Path, workdir: Path) -> None:
    """Makes an arm's folder what a run with this cold start would go on from, or checks that it is.

    Raises:
        AblationError: the arm began with other parameters than this start has now.
    """
    mark = json.loads((folder / MARK).read_text(encoding="utf-8"))
    if (workdir / MARK).exists():
        found = json.loads((workdir / MARK).read_text(encoding="utf-8"))
        if found != mark:
            raise AblationError(f"{workdir} began with another cold start ({found}) than {folder} is ({mark}): use another --workdir")
        return
    _copy(folder, workdir)
    save_json(workdir / MARK, mark)


def load(folder: Path, like: Any) -> Any:
    """The start's parameters, with the shapes and shardings of `like`.

    Raises:
        AblationError: the folder is damaged.
    """
    mark = json.loads((folder / MARK).read_text(encoding="utf-8"))
    checkpoint = folder / "checkpoints" / str(mark["step"])
    if problem := manifest.problem(checkpoint):
        raise AblationError(f"{checkpoint} is damaged ({problem}): import it again, or delete {folder} to make this cold start anew")
    found = restore_trainable(checkpoint, like)
    if digest(found) != mark["digest"]:
        raise AblationError(f"{checkpoint} holds other parameters than {folder / MARK} says")
    return found


def digest(trainable: Any) -> str:
    """Of all parameters: their places, types and content."""
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(trainable):
        array = np.asarray(leaf)
        found.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode() + array.tobytes())
    return found.hexdigest()[:32]


def _copy(source: Path, target: Path) -> None:
    """Codec and weights.json; the codec's mark comes last, without which it is copied again."""
    target.mkdir(parents=True, exist_ok=True)
    if not (target / "codec" / "done").exists():
        shutil.copytree(source / "codec", target / "codec", ignore=shutil.ignore_patterns("done"), dirs_exist_ok=True)
        (target / "codec" / "done").touch()
    if (source / WEIGHTS).exists():
        partial = target / f"{WEIGHTS}.part"
        shutil.copyfile(source / WEIGHTS, partial)
        partial.replace(target / WEIGHTS)
