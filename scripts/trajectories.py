"""Shows trajectories in the terminal: what was asked, answered and judged, with rewards, advantages and log-probs.

    python scripts/trajectories.py runs/demo/rollouts/step_00003.jsonl --task=softmax --turn=0
    python scripts/trajectories.py runs/demo/rollouts/eval_rl.jsonl --best

Paged and coloured on a terminal, plain text in a pipe.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import app, flags  # noqa: E402

_TASK = flags.DEFINE_string("task", "", "Only tasks whose name holds this.")
_AGENT = flags.DEFINE_enum("agent", "", ["", "selection", "policy", "summary"], "Only this agent's.")
_TURN = flags.DEFINE_integer("turn", None, "Only this turn; 0 is the first.", lower_bound=0)
_BEST = flags.DEFINE_bool("best", False, "Of each task only its best policy rollout, the best of them first.")
_FULL = flags.DEFINE_bool("full", False, "Whole prompts; by default the lines in their middle are folded.")
_CODEC = flags.DEFINE_string("codec", "", "Folder of the codec (default: the one of the run that the file lies in).")


def main(argv):
    if len(argv) < 2:
        raise app.UsageError("which file? e.g. runs/demo/rollouts/step_00001.jsonl")
    from rich.console import Console

    from dk_jax.generation.tokenizer import load_codec
    from dk_jax.rollout.trajectory import load_trajectories
    from dk_jax.rollout.viewer import View, show

    os.environ.setdefault("LESS", "-RFX")
    console = Console(highlight=False)
    shown = 0
    try:
        files = [(Path(name), load_trajectories(Path(name))) for name in argv[1:]]
        with console.pager(styles=True) if console.is_terminal else nullcontext():
            for path, trajectories in files:
                workdir = _workdir(path)
                folder = Path(_CODEC.value) if _CODEC.value else workdir and workdir / "codec"
                view = View(
                    task=_TASK.value, agent=_AGENT.value, turn=_TURN.value, best=_BEST.value, full=_FULL.value, language=_language(workdir)
                )  # fmt: skip
                console.print(str(path), style="bold", soft_wrap=True)
                shown += show(trajectories, console, view, load_codec(folder) if folder else None)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0 if shown else 3


def _workdir(path: Path) -> Path | None:
    """The run's folder: the nearest one above the file with a finished codec."""
    return next((folder for folder in path.absolute().parents if (folder / "codec" / "done").exists()), None)


def _language(workdir: Path | None) -> str:
    try:
        return json.loads((workdir / "config.json").read_text(encoding="utf-8"))["sandbox"]["language"] if workdir else "cpp"
    except (OSError, ValueError, KeyError):
        return "cpp"


if __name__ == "__main__":
    app.run(main)
