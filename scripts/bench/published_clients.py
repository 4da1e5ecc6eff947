"""Drives the published clients of other kernel projects against this sandbox: their code, unchanged, on our verdicts.

    python scripts/bench/published_clients.py [--device cuda:0] [--kernelgym DIRECTORY] [--kernelbench DIRECTORY] [--out FILE]

(1) KernelGYM's reward client (drkernel/kernel/rewards/reward_client.py of a checkout of hkust-nlp/KernelGYM) computes rewards for a right,
    a wrong, a broken and a PyTorch-only kernel, over TCP through `python -m sandbox gateway` with a token in its URL. Of its framework
    Ray's actors and verl's token bucket are stubs on threads.
(2) KernelBench's scripts/run_and_check.py (a checkout of ScalingIntelligence/KernelBench) judges the same kernels with
    `eval_kernel_against_ref` replaced by ours; its command-line and cloud libraries are stubs.

Exits with 1 if a client understands a verdict otherwise than it was meant.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from serving import ROOT, private_server, provenance

from sandbox.compat import kernelbench

TOKEN = "published-clients"
TASK = """
import torch

class Model(torch.nn.Module):
    def forward(self, x, y):
        return x + y

def get_inputs():
    return [torch.randn(2048, 512), torch.randn(2048, 512)]

def get_init_inputs():
    return []
"""
RIGHT = (ROOT / "tests/gpu/kernels/add_triton.py").read_text()
KERNELS = {
    "right": RIGHT,
    "wrong": RIGHT.replace(" + tl.load(y_ptr", " - tl.load(y_ptr"),
    "broken": RIGHT.replace("class ModelNew", "class ModelNew(\n"),
    "PyTorch alone": "import torch\n\nclass ModelNew(torch.nn.Module):\n    def forward(self, x, y):\n        return x + y\n",
}


class _Handle:
    """A Ray actor's handle: each method's `remote` runs on a thread and returns a future."""

    def __init__(self, actor: Any):
        self._actor, self._pool = actor, ThreadPoolExecutor(16)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._actor, name)
        return types.SimpleNamespace(remote=lambda *args, **kwargs: self._pool.submit(method, *args, **kwargs))


class _Remote:
    """What `ray.remote` makes of a class."""

    def __init__(self, actor_class: type):
        self._class = actor_class

    def options(self, **_: Any) -> _Remote:
        return self

    def remote(self, *args: Any, **kwargs: Any) -> _Handle:
        return _Handle(self._class(*args, **kwargs))


class _TokenBucket:
    def __init__(self, rate_limit: int):
        self._in_use = 0

    def acquire(self) -> None:
        self._in_use += 1

    def release(self) -> None:
        self._in_use -= 1

    def get_current_count(self) -> int:
        return self._in_use


def _wait(references: list[Future], num_returns: int = 1, timeout: float | None = None) -> tuple[list[Future], list[Future]]:
    done = list(wait_for(references, timeout, FIRST_COMPLETED).done)[:num_returns]
    return done, [reference for reference in references if reference not in done]


def _module(name: str, **members: Any) -> None:
    sys.modules[name] = module = types.ModuleType(name)
    vars(module).update(members)


def _loaded(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Options(types.SimpleNamespace):
    """An OmegaConf node, as far as the client uses it."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


@contextmanager
def gateway(server_socket: Path) -> Iterator[str]:
    """The URL of a gateway in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "sandbox", "gateway", "--socket", str(server_socket), "--listen", f"127.0.0.1:{port}"],
        cwd=ROOT, env={**os.environ, "SANDBOX_TOKEN": TOKEN},
    )  # fmt: skip
    url = f"http://{TOKEN}@127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                httpx.get(f"{url}/health").raise_for_status()
                break
            except httpx.TransportError:
                time.sleep(0.1)
        else:
            raise SystemExit(f"the gateway does not answer on port {port}")
        yield url
    finally:
        process.terminate()
        process.wait(30)


def kernelgym_rows(checkout: Path, url: str) -> dict[str, dict]:
    """What KernelGYM's reward client makes of each kernel."""
    _module("ray", remote=_Remote, wait=_wait, get=lambda future: future.result(), ObjectRef=Future)
    for name in ("verl", "verl.tools"):
        _module(name)
    _module("verl.tools.sandbox_fusion_tools", TokenBucketWorker=_Remote(_TokenBucket))
    client_module = _loaded(checkout / "drkernel/kernel/rewards/reward_client.py")
    config = _Options(
        server_url=url, timeout=120, max_retries=3, rate_limit=8, max_concurrent=8, acquire_timeout=60,
        reward_func_name="calculate_reward_speedup", init_correct_weight=1.0, init_performance_weight=1.0, speedup_eps=0.05,
        reward_policy=_Options(penalties=_Options(penalty_score=-1.0)), speedup_reward_upper_bound=3.0,
        speedup_reward_lower_bound=0.0, coverage_reward=_Options(enable=True, weight=0.5, reward_type="time_coverage"),
    )  # fmt: skip
    client = client_module.KernelRewardClient(reward_config=config)
    tasks = [{"reference_code": TASK, "kernel_code": source, "entry_point": "Model"} for source in KERNELS.values()]
    start = time.monotonic()
    found = asyncio.run(client.compute_batch_rewards(tasks))
    print(f"KernelGYM's client: {len(found)} kernels in {time.monotonic() - start:.1f} s")
    keep = ("status", "compiled", "correctness", "decoy_kernel", "speedup", "reward", "num_custom_kernel", "num_total_kernels", "error")
    return {name: {key: row.get(key) for key in keep} for name, row in zip(KERNELS, found, strict=True)}


def kernelbench_rows(checkout: Path, device: str) -> dict[str, dict]:
    """What KernelBench's run_and_check.py makes of each kernel."""

    def decorated(*_: Any, **__: Any) -> Any:
        return lambda wrapped: wrapped

    class Image:
        def __getattr__(self, _: str) -> Any:
            return lambda *args, **kwargs: self

    app = types.SimpleNamespace(cls=decorated, function=decorated, local_entrypoint=decorated)
    image = types.SimpleNamespace(from_registry=lambda *args, **kwargs: Image())
    _module("modal", App=lambda *args, **kwargs: app, Image=image, method=decorated)
    _module("pydra", REQUIRED=None, Config=object, main=decorated)
    for name in ("dotenv", "openai", "litellm", "together", "datasets", "requests", "tomli"):
        if importlib.util.find_spec(name) is None:
            _module(name, load_dotenv=lambda *a, **k: None, OpenAI=object, Together=object, completion=None, load_dataset=None)
    sys.path[:0] = [str(checkout / "src"), str(checkout / "scripts")]
    script = _loaded(checkout / "scripts/run_and_check.py")
    script.kernel_eval.eval_kernel_against_ref = kernelbench.eval_kernel_against_ref
    configs = {
        "build_dir_prefix": "", "clear_cache": False, "num_correct_trials": 5, "num_perf_trials": 100, "verbose": False,
        "measure_performance": True, "timing_method": "cuda_event", "backend": "triton", "precision": "fp32",
    }  # fmt: skip
    found = {}
    for name, source in KERNELS.items():
        start = time.monotonic()
        result = script.evaluate_single_sample_src(TASK, source, configs, device)
        found[name] = {
            "compiled": result.compiled, "correctness": result.correctness, "runtime": result.runtime,
            "ref_runtime": result.ref_runtime, "seconds": time.monotonic() - start,
            "outcome": result.metadata.get("outcome"),
        }  # fmt: skip
    return found


def mistakes(rows: dict[str, dict], timed: bool) -> list[str]:
    """Kernels whose verdict came out otherwise than it was meant."""
    meant = {"right": (True, True), "wrong": (True, False), "broken": (False, False)}
    wrong = [name for name, verdict in meant.items() if (rows[name]["compiled"], rows[name]["correctness"]) != verdict]
    if timed:  # where nothing is timed, as in Triton's interpreter, no kernel is asked for
        cheat = rows["PyTorch alone"]
        if cheat["correctness"] and not cheat.get("decoy_kernel"):
            wrong.append("PyTorch alone")
        if not (rows["right"].get("speedup") or rows["right"].get("runtime", 0)) > 0:
            wrong.append("the right one's speed")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kernelgym", type=Path, help="checkout of KernelGYM")
    parser.add_argument("--kernelbench", type=Path, help="checkout of KernelBench")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    report, wrong = provenance(), []
    with private_server(arguments.device, 2) as server:
        os.environ[kernelbench.SOCKET_VARIABLE] = str(server.socket)
        if arguments.kernelgym:
            with gateway(server.socket) as url:
                report["kernelgym"] = kernelgym_rows(arguments.kernelgym, url)
            wrong += [f"KernelGYM: {name}" for name in mistakes(report["kernelgym"], arguments.device != "cpu")]
        if arguments.kernelbench:
            report["kernelbench"] = kernelbench_rows(arguments.kernelbench, arguments.device)
            wrong += [f"KernelBench: {name}" for name in mistakes(report["kernelbench"], arguments.device != "cpu")]
    report["misunderstood"] = wrong
    print(json.dumps({name: report[name] for name in ("kernelgym", "kernelbench") if name in report}, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"misunderstood: {wrong or 'nothing'}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
