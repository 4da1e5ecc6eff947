"""Runs a recipe: cold start, joint RL of the three agents, held-out evaluation, report.

    python scripts/train.py --config=configs/demo.py --workdir=runs/demo
    python scripts/train.py --config=configs/smollm2_triton.py --workdir=runs/smollm2 --config.rl.steps=20

Any number of the config can be overridden: --config.rl.lr=1e-4. Interrupted, the same command goes on where it stopped.
A sandbox is started as a child process unless --sandbox names the socket of one that runs already. Several processes on one or more
hosts make one run: under SLURM by srun, else by the variables that dk_jax.distributed names.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import app, flags  # noqa: E402
from ml_collections import config_flags  # noqa: E402

from dk_jax.command_line import interrupt_on_signals, parse_flags, sandbox_socket  # noqa: E402
from dk_jax.run_log import run_log  # noqa: E402

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8
"""Parameters of the GNU C library's mallopt."""

_CONFIG = config_flags.DEFINE_config_file("config", None, "Recipe: a file with get_config().", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; made if absent, gone on with if not.")
_MODE = flags.DEFINE_enum(
    "mode", "all", ["all", "check_corpus", "corpus", "sft", "eval_sft", "rl", "report", "rollout_only", "overfit_one"],
    "Which phases to run (earlier ones are done if missing).",
)
_SANDBOX = flags.DEFINE_string("sandbox", "", "Socket of a running sandbox; by default the run starts one of its own.")
_TRAIN_FROM = flags.DEFINE_string("train_from", "", "One update from this file of trajectories instead of new rollouts.")
_TASK = flags.DEFINE_string("task", "", "overfit_one: name of the task (default: the first of the first step).")
_OUTPUT = flags.DEFINE_string("output", "", "rollout_only: file for the trajectories (default: WORKDIR/trajectories.jsonl).")


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}: flags look like --workdir=DIR or --config.seed=1")
    for flag in (_CONFIG, _WORKDIR):
        if flag.value is None:
            raise app.UsageError(f"--{flag.name} is missing, e.g. --config=configs/demo.py --workdir=runs/demo")
    cfg = _CONFIG.value
    try:
        cfg.seed  # noqa: B018  a recipe that could not be loaded says so at its first use
    except OSError as error:
        raise app.UsageError(str(error).replace("\n", " ")) from None
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", force=True)
    _prepare_jax(cfg)
    try:
        several = _join_processes()
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    interrupt_on_signals()
    try:
        return _run(cfg, Path(_WORKDIR.value))
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on where it stopped", file=sys.stderr, flush=True)
        return _left(several, 130)
    except _expected_errors() as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            print(
                f"\nerror: no space left for {error.filename or _WORKDIR.value} ({error.strerror}). Free some, or quota, and run the same "
                "command again: verdicts and checkpoints that were written are kept.",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)  # buffered logs can't be written either, and each would say so with a traceback of its own at exit
        print(f"\nerror: {error}{_advice(error)}", file=sys.stderr, flush=True)
        return _left(several, 1)
    except _lost_process() as error:
        if not several:
            raise
        print(
            f"\nerror: the processes of this run lost each other ({str(error).splitlines()[0]}). Start all of them again by the same "
            "commands: they go on from the last checkpoint.",
            file=sys.stderr,
            flush=True,
        )
        return _left(several, 1)


def _join_processes() -> bool:
    """Whether this is one of several processes; see dk_jax.distributed."""
    from dk_jax import distributed

    several = distributed.initialize()
    if several and not distributed.is_first():
        os.environ["TQDM_DISABLE"] = "1"
    return several


def _left(several: bool, status: int) -> int:
    """The exit status; one of several processes ends at once, as at a usual end it would wait for the others, which wait for it."""
    if several:
        sys.stdout.flush()
        os._exit(status)
    return status


def _lost_process() -> type[BaseException]:
    import jax

    return jax.errors.JaxRuntimeError


def _advice(error: BaseException) -> str:
    """What else there is to say where the run's own sandbox is gone: nobody else started it, so nobody else can."""
    from sandbox.client import SandboxBusy, SandboxUnavailable

    if _SANDBOX.value or not isinstance(error, SandboxBusy | SandboxUnavailable):
        return ""
    log = Path(_WORKDIR.value) / "sandbox.log"
    return f"\nThis run's own sandbox is meant; its log is {log}. The same command starts another and goes on: what was judged is kept."


def _prepare_jax(cfg) -> None:
    """Must run before jax is imported: how much of a shared GPU it may take, where compiled programs are kept, and that a CPU's
    learner keeps its memory."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        _keep_memory()
    if cfg.learner.memory_fraction > 0:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(cfg.learner.memory_fraction))
    cache = Path(_WORKDIR.value) / "xla_cache"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache.absolute()))


def _keep_memory() -> None:
    """Has the C library keep freed memory for the next allocation, where it can.

    Each run of a compiled program allocates its buffers anew. Fresh from the kernel, their pages are cleared and mapped one by
    one, which took 28 % of the cold start's processor time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 64 << 20)):
            mallopt(parameter, value)


def _expected_errors() -> tuple[type[BaseException], ...]:
    from dk_jax.distributed import FirstProcessFailed
    from dk_jax.rollout.supervise import SandboxStartError
    from dk_jax.sft.corpus import CorpusError
    from dk_jax.skills.library import LibraryError
    from dk_jax.train.setup import ConfigError
    from sandbox.client import SandboxBusy, SandboxRejected, SandboxUnavailable

    ours = (ConfigError, CorpusError, FirstProcessFailed, LibraryError, SandboxStartError, SandboxBusy, SandboxRejected, SandboxUnavailable)
    return (*ours, FloatingPointError, OSError, ValueError)


def _warn_of_idle_gpu(cfg) -> None:
    """A run that judges on a GPU and computes on the CPU takes days where it could take minutes, and would not say why."""
    import jax

    if cfg.sandbox.device != "cpu" and jax.default_backend() == "cpu" and "cpu" not in os.environ.get("JAX_PLATFORMS", ""):
        logging.getLogger("dk_jax").warning(
            "the sandbox judges on %s, but JAX sees no accelerator and trains on the CPU: install JAX for yours "
            '(for an NVIDIA GPU: pip install -U "jax[cuda12]"), or set JAX_PLATFORMS=cpu if that is meant',
            cfg.sandbox.device,
        )


def _run(cfg, workdir: Path) -> int:
    from dk_jax import distributed
    from dk_jax.train.checks import check_config
    from dk_jax.train.run import Run

    check_config(cfg)  # before a sandbox is started, which takes longer than all other checks
    workdir.mkdir(parents=True, exist_ok=True)
    _warn_of_idle_gpu(cfg)
    with contextlib.ExitStack() as stack:
        if not distributed.is_first():  # whose results and messages the first one has too
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        else:
            stack.enter_context(run_log(workdir))
        socket = ""
        if distributed.is_first():
            if _SANDBOX.value or _MODE.value != "report":
                socket = sandbox_socket(cfg, workdir, _SANDBOX.value, stack)
        run = Run(cfg, workdir, socket)
        stack.callback(run.close)
        if _TRAIN_FROM.value:
            print(f"one update from {_TRAIN_FROM.value}: {run.train_from(Path(_TRAIN_FROM.value))}")
        elif _MODE.value == "rollout_only":
            path = Path(_OUTPUT.value or workdir / "trajectories.jsonl")
            print(f"{run.rollout_only(path)} trajectories -> {path}")
        elif _MODE.value == "overfit_one":
            run.overfit_one(_TASK.value)
        elif _MODE.value == "report":
            from dk_jax.evaluation.report import write_report

            print(f"report: {write_report(workdir)}")
        elif _MODE.value == "check_corpus":
            print(f"verdicts on the untimed part of the corpus -> {run.check_corpus()}")
        elif _MODE.value == "corpus":
            print(f"{len(run.corpus())} judged kernels -> {workdir / 'corpus.jsonl'}")
        elif _MODE.value == "sft":
            print(f"cold start finished at step {run.sft().step}")
        elif _MODE.value == "eval_sft":
            scores = run.evaluate("eval_sft", run.sft().trainable, step=0)["last_turn"]
            print(f"cold start evaluated: {scores['correct']:.1%} correct of {scores['samples']} held-out samples -> {workdir / 'eval_sft.json'}")
        elif _MODE.value == "rl":
            print(f"RL finished at step {run.rl(run.sft().trainable).step}")
        else:
            from dk_jax.evaluation.table import final_table

            print(final_table(run.all()))
    return 0


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
