"""The ablation in one command, from cold start to table, in pieces: each call works for a while and says whether there is more to do.

    until python scripts/reproduce.py --preset=ablation --workdir=runs/ablation; do [ $? -eq 75 ] || break; done
    python scripts/reproduce.py --preset=ablation --workdir=runs/ablation --arms=full,no_injection,no_skills --seeds=0,1,2
    python scripts/reproduce.py --preset=ablation --workdir=runs/ablation --export=state.tar     # then, on another machine:
    python scripts/reproduce.py --preset=ablation --workdir=runs/ablation --import=state.tar

Status: 0 all of it is done; 75 this piece is over and the same command goes on; 130 interrupted, the same command goes on; 1 an error, said in
one line; 2 a wrong flag. After each piece ablation.json, ablation.md and the plots in the workdir are of what there is, and say what is missing.
A piece ends after an RL step or a chunk of an evaluation, and has to be longer than loading, compiling and one of these; killed anywhere,
nothing that was judged is lost. A bundle is at most eight files of 16 MiB. Which card each piece had is remembered, and pieces from several are
told in the table. What the arms are and how their budgets are made equal: dk_jax.reproduce.arms. A sandbox is started as a child process unless
--sandbox names the socket of one that runs already.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import app, flags  # noqa: E402

from dk_jax.command_line import carried_out, parse_flags, sandbox_socket, take_folder  # noqa: E402

_BEGAN = time.monotonic()
_PRESET = flags.DEFINE_string("preset", "ablation", "What is compared: a file of configs/ with get_preset(scale).")
_SCALE = flags.DEFINE_string("scale", "smollm2", "Size of the preset.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the ablation; made if absent, gone on with if not.")
_MINUTES = flags.DEFINE_float("piece_minutes", 9.0, "How long this call works; ending the sandbox and the write-up come on top.", lower_bound=0.0)
_ARMS = flags.DEFINE_list("arms", [], "Only these arms; all by default.")
_SEEDS = flags.DEFINE_list("seeds", [], "These seeds for each of them; the preset's own by default.")
_CANDIDATES = flags.DEFINE_integer(
    "candidates", 0, "Budget of each arm and seed, in judged candidates, and in tokens in proportion; the preset's by default.", lower_bound=0
)
_EXPORT = flags.DEFINE_string("export", "", "Packs what another machine needs to go on into this file, or parts of it, and ends.")
_IMPORT = flags.DEFINE_string("import", "", "Unpacks such a file into the workdir, and ends.")
_TABLE_ONLY = flags.DEFINE_bool("table_only", False, "Writes the write-up of what is there, and ends.")
_RESAMPLES = flags.DEFINE_integer("resamples", 2000, "Of the bootstrap that gives intervals.", lower_bound=1)
_SANDBOX = flags.DEFINE_string("sandbox", "", "Socket of a running sandbox; by default one is started.")


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}: flags look like --workdir=DIR or --arms=full,no_skills")
    if _WORKDIR.value is None:
        raise app.UsageError("--workdir is missing, e.g. --workdir=runs/ablation")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str((Path(_WORKDIR.value) / "xla_cache").absolute()))
    return carried_out(lambda: _run(Path(_WORKDIR.value)), FloatingPointError)


def _preset():
    """With its budget as asked for; nothing here imports JAX, whose share of a GPU depends on it."""
    from dk_jax.reproduce.arms import load_preset

    preset = load_preset(_PRESET.value, _SCALE.value)
    if not _CANDIDATES.value:
        return preset
    tokens = round(preset.tokens * _CANDIDATES.value / preset.candidates)
    return dataclasses.replace(preset, candidates=_CANDIDATES.value, tokens=tokens)


def _seeds() -> list[int] | None:
    try:
        return [int(seed) for seed in _SEEDS.value] or None
    except ValueError:
        raise ValueError(f"--seeds={','.join(_SEEDS.value)}: give whole numbers, such as 0,1,2") from None


def _run(workdir: Path) -> int:
    from dk_jax.reproduce.arms import chosen, jobs

    preset, arms = _preset(), chosen(_ARMS.value)
    wanted = jobs(preset, arms, _seeds())
    if preset.base.learner.memory_fraction > 0:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(preset.base.learner.memory_fraction))
    workdir.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        take_folder(workdir, stack)
        if _IMPORT.value:
            from dk_jax.reproduce.bundle import import_

            print(f"{len(import_(Path(_IMPORT.value), workdir))} files -> {workdir}")
            return 0
        from dk_jax.reproduce.pieces import MORE_TO_DO
        from dk_jax.reproduce.work import Ablation

        if not (_EXPORT.value or _TABLE_ONLY.value):
            _work(preset, workdir, wanted, stack)
        ablation = Ablation(preset, workdir)
        if _EXPORT.value:
            from dk_jax.reproduce.bundle import export

            for path in export(ablation, wanted, Path(_EXPORT.value)):
                print(f"{path.stat().st_size / 2**20:7.2f} MiB  {path}")
            return 0
        _write_up(ablation, arms, wanted)
        left = [job for job in wanted if not ablation.is_done(job)]
        print(f"{len(wanted) - len(left)} of {len(wanted)} jobs are done" + ("; the same command goes on" if left else ""), flush=True)
        return MORE_TO_DO if left else 0


def _work(preset, workdir: Path, wanted, stack: contextlib.ExitStack) -> None:
    """One piece."""
    from dk_jax.reproduce.pieces import Piece, PieceLog, PieceOver, cards_of, read_pieces

    piece = Piece(60 * _MINUTES.value - (time.monotonic() - _BEGAN))
    with contextlib.ExitStack() as own:
        socket = sandbox_socket(preset.base, workdir, _SANDBOX.value, own)  # forked while JAX has no threads
        from dk_jax.reproduce.work import PIECES, Ablation, sandbox_tools

        ablation = Ablation(preset, workdir)
        pieces = PieceLog(workdir / PIECES, device=preset.base.sandbox.device)
        if others := sorted(set(cards_of(read_pieces(workdir / PIECES))) - {pieces.card}):
            logging.getLogger("dk_jax").warning(
                "this piece has %s, earlier ones had %s: their speedups are not comparable, and the table will say so", pieces.card, ", ".join(others)
            )
        with contextlib.suppress(PieceOver), piece.bounded():
            ablation.work(wanted, sandbox_tools(socket), piece, pieces)


def _write_up(ablation, arms, wanted) -> None:
    from dk_jax.reproduce.collected import collect
    from dk_jax.reproduce.write_up import PAGE, write

    data = collect(ablation, arms, wanted, resamples=_RESAMPLES.value)
    write(ablation.folder, data)
    print(f"write-up -> {ablation.folder / PAGE}")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
