"""Two processes of four devices each do what one process of eight does; one of them writes; when one is lost, both go on later, or a
single process of other devices does.

This file run as a script is such a process, with the arguments OUTPUT WORKDIR [DIE_AT [FSDP]]; each writes what it found as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.dk_jax.emulated import ONE_PROGRAM_AT_A_TIME

ROOT = Path(__file__).parents[2]
LIMIT_S = 280
LOST = 3


def _main(out: str, workdir: str, die_at: int = 0, fsdp: int = 1) -> None:
    import jax

    from dk_jax import distributed

    distributed.initialize()
    number = jax.process_index()
    found = {"devices": jax.device_count(), "own": jax.local_device_count()}
    if jax.device_count() == 8 and not die_at:
        found |= _on_a_mesh()
    try:
        found |= _run(Path(workdir), die_at if number == 1 else 0, fsdp)
    except jax.errors.JaxRuntimeError as error:
        print(f"lost: {error}", file=sys.stderr, flush=True)
        os._exit(LOST)
    Path(f"{out}.{number}").write_text(json.dumps(found))


def _on_a_mesh() -> dict:
    """A few samples with heads on two devices each, and parameters after two updates with parameters cut along two axes."""
    import jax
    from jax.experimental.multihost_utils import process_allgather

    from dk_jax.generation.engine import Engine, make_programs
    from dk_jax.generation.requests import Drawing, Request
    from dk_jax.models.sharding import make_mesh, on_mesh, param_shardings
    from tests.dk_jax import test_on_mesh as parts

    static, params = parts._params()
    mesh = make_mesh(data=4, tensor=2)
    engine = Engine(static, parts.SIZES, make_programs(static, parts.SIZES, mesh))
    prompts = ([5, 9, 3], [5, 9, 3], list(range(2, 14)), [7], [8, 8])
    requests = [Request(tokens=p, agent=n % 3, key=n, max_new_tokens=3, drawing=Drawing(temperature=1.0)) for n, p in enumerate(prompts)]
    samples = engine.run(on_mesh(params, param_shardings(static, mesh)), requests)
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    updated = parts._updated(static, on_mesh(params, param_shardings(static, mesh)), mesh, "adamw")[1]
    updated = [np.asarray(leaf).ravel().tolist() for leaf in jax.tree.leaves(process_allgather(updated, tiled=True))]
    return {"tokens": [sample.tokens for sample in samples], "logps": [sample.logp_model.tolist() for sample in samples], "updated": updated}


def _run(workdir: Path, die_at: int, fsdp: int) -> dict:
    """A run with scripted verdicts and messages; the `die_at`-th update of all kills this process. `fsdp`: of the learner's mesh."""
    import jax

    from dk_jax.metrics import is_clocked, read_scalars
    from dk_jax.train.update import Updater
    from tests.end_to_end import scripted

    class Sampler(scripted.ScriptedSampler):
        """Messages depend on rows alone: parameters of different machines differ by rounding."""

        def _one(self, prompt, agent, key):
            return super()._one(prompt, agent, key[:1])

    class Run(scripted.ScriptedRun):
        def sampler(self, *, temperature, top_p=1.0):
            return Sampler(self.model.codec)

    update, calls = Updater.update, []

    def updated(self, *arguments, **named):
        calls.append(None)
        if len(calls) == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return update(self, *arguments, **named)

    Updater.update = updated
    cfg = scripted.tiny_config()
    cfg.learner.streams, cfg.learner.mesh.fsdp = 1, fsdp
    cfg.sft.update(dict(steps=1, batch=8, microbatch=8))
    cfg.rl.steps = 2
    cfg.rollout.update(dict(tasks=1, checked_tasks=0, selections=1, max_rows=40))
    client = scripted.ScriptedClient()
    run = Run(cfg, workdir, client)
    state = run.rl(run.sft().trainable)
    found = {
        "workdir": str(run.workdir), "judged": client.judged, "library": run.library.version,
        "params": [np.asarray(leaf).ravel().tolist() for leaf in jax.tree.leaves(state.trainable)],
        "rl": [
            {k: v for k, v in line.items() if k != "phase" and not is_clocked(k)} for line in read_scalars(run.workdir / "metrics.jsonl", "rl")
        ],
    }  # fmt: skip
    run.close()
    return found


def _started(directory: Path, workdir: Path, processes: int, *more: str, devices: int = 8) -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    started = []
    for number in range(processes):
        env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **ONE_PROGRAM_AT_A_TIME}
        env |= {"JAX_COMPILATION_CACHE_DIR": str(directory / f"compiled{processes}")}
        flags = f"{env.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices // processes}"
        env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "XLA_FLAGS": flags}
        if processes > 1:
            env |= {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_NUM_PROCESSES": str(processes), "JAX_PROCESS_ID": str(number)}
        command = [sys.executable, __file__, str(directory / f"found{processes}"), str(workdir), *more]
        started.append(subprocess.Popen(command, cwd=ROOT, env=env, stderr=open(directory / f"{processes}.{number}.log", "w")))
    return started


def _ended(started: list[subprocess.Popen]) -> list[int]:
    """Their exit statuses; whoever takes too long is killed."""
    until = time.monotonic() + LIMIT_S
    try:
        return [process.wait(max(0.1, until - time.monotonic())) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    directory = tmp_path_factory.mktemp("one")
    assert _ended(_started(directory, directory / "run", 1)) == [0], (directory / "1.0.log").read_text()[-3000:]
    return json.loads((directory / "found1.0").read_text())


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What each of two processes found, after a try in which the second died in the update of the second RL step."""
    directory = tmp_path_factory.mktemp("two")
    first, second = _ended(_started(directory, directory / "run", 2, "3"))
    left = first, second, (directory / "2.0.log").read_text()
    committed = sorted(int(path.name) for path in (directory / "run" / "checkpoints" / "rl").glob("[0-9]*"))
    shutil.copytree(directory / "run", directory / "elsewhere")
    assert _ended(_started(directory, directory / "run", 2)) == [0, 0], (directory / "2.0.log").read_text()[-3000:]
    return directory, [json.loads((directory / f"found2.{n}").read_text()) for n in range(2)], left, committed


def test_samples_and_updates_on_a_mesh_of_two_processes_are_those_of_one(one, two):
    for found in two[1]:
        assert (found["devices"], found["own"]) == (8, 4) and (one["devices"], one["own"]) == (8, 8)
        assert found["tokens"] == one["tokens"]
        np.testing.assert_allclose(np.concatenate(found["logps"]), np.concatenate(one["logps"]), atol=2e-5)
        for got, wanted in zip(found["updated"], one["updated"], strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_a_run_of_two_processes_learns_what_one_does_though_one_was_lost_on_the_way(one, two):
    _, found, (first, second, log), committed = two
    assert second == -signal.SIGKILL and first not in (0, -signal.SIGKILL), log[-2000:]
    assert committed[-1] == 1, "the step before was committed, that of the loss was not"
    for process in found:
        assert process["library"] == one["library"] and [line["step"] for line in process["rl"][-2:]] == [1, 2]
        for got, wanted in zip(process["params"], one["params"], strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-5)
        for got, wanted in zip(process["rl"][-1:], one["rl"][-1:], strict=True):
            assert got == pytest.approx(wanted, rel=1e-3, abs=1e-4)


def test_what_two_processes_of_eight_devices_began_one_of_four_ends_with_its_parameters_cut(one, two):
    directory = two[0]
    assert _ended(_started(directory, directory / "elsewhere", 1, "0", "2", devices=4)) == [0], (directory / "1.0.log").read_text()[-3000:]
    found = json.loads((directory / "found1.0").read_text())
    assert (found["devices"], found["library"]) == (4, one["library"]) and found["judged"] < one["judged"]
    assert [line["step"] for line in found["rl"]] == [1, 2]
    for got, wanted in zip(found["params"], one["params"], strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_one_process_judges_and_writes(one, two):
    directory, (first, second), _, _ = two
    assert first["workdir"] == str(directory / "run") and not second["workdir"].startswith(str(directory))
    assert not Path(second["workdir"]).exists(), "its own folder is gone with it"
    assert second["judged"] == 0 and first["judged"] < one["judged"], "what the try before it had been told is not asked again"
    lines = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["phase"] == "rl"] == [1, 2]


if __name__ == "__main__":
    _main(*sys.argv[1:3], *map(int, sys.argv[3:]))
