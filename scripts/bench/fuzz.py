"""Requests drawn from the server's own OpenAPI schema, valid and not: does it ever fail, leak or fall over?

    python scripts/bench/fuzz.py --requests 10000 --out scripts/bench/results/fuzz.json

Every operation of the schema gets its share, half of the requests valid and half violating the schema (schemathesis draws
them). Any 5xx but 503, an error body without the fields of `ErrorReply`, a connection that breaks, a broker that no longer
answers, or open files and memory that stay behind are failures, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from schemathesis import GenerationMode
from serving import private_server, provenance

ALLOWED_5XX = (503,)
SLOW_S = 20.0
LEAK_BYTES = 128 << 20
LEAK_FILES = 8


def draw(document: dict[str, Any], count: int, number: int) -> list[dict[str, Any]]:
    """`count` requests as keyword arguments of `httpx.Client.request`, over all operations and both modes.

    Operations that have few different requests give the same ones again.

    Args:
      document: the server's OpenAPI document.
      number: seed.
    """
    operations = [found.ok() for found in schemathesis.openapi.from_dict(document).get_all_operations()]
    each = -(-count // (len(operations) * len(GenerationMode)))
    requests: list[dict[str, Any]] = []
    for at, operation in enumerate(operations):
        for mode in GenerationMode:
            found = list(_draw(operation, mode, each, number + at))
            requests += [found[n % len(found)] for n in range(each)] if found else []
    random.Random(number).shuffle(requests)
    return (requests + random.Random(number).choices(requests, k=count))[:count]


def _draw(operation: Any, mode: GenerationMode, count: int, number: int) -> Iterator[dict[str, Any]]:
    cases: list[Any] = []
    try:
        strategy = operation.as_strategy(generation_mode=mode)
    except Exception as error:  # an operation without parameters cannot be violated
        if "negative" not in str(mode).lower():
            raise
        print(f"{operation.label}: no request violates its schema ({type(error).__name__})")
        return

    @seed(number)
    @settings(max_examples=count, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def collect(case: Any) -> None:
        cases.append(case)

    try:
        collect()
    except Exception as error:
        if mode is GenerationMode.POSITIVE or cases:
            raise
        print(f"{operation.label}: no request violates its schema ({type(error).__name__})")
    for case in cases[:count]:
        arguments = case.as_transport_kwargs(base_url="http://sandbox")
        body = arguments.pop("data", None)
        content = {} if body is None else {"content": body if isinstance(body, (bytes, str)) else json.dumps(body)}
        headers = {str(k): str(v) for k, v in (arguments.get("headers") or {}).items()}
        if not all(_latin(text) for pair in headers.items() for text in pair):
            continue
        yield {
            "method": arguments["method"], "url": arguments["url"], "params": arguments.get("params") or {},
            "headers": headers, **content, **({"json": arguments["json"]} if "json" in arguments else {}),
        }  # fmt: skip


def _latin(text: str) -> bool:
    try:
        text.encode("latin-1")
    except UnicodeEncodeError:
        return False
    return True


def send(
    socket: str, requests: list[dict[str, Any]], threads: int, progress: Callable[[int], None] = lambda done: None
) -> tuple[Counter, list[dict[str, Any]]]:
    """Sends all requests; returns how often each status came, and what was wrong."""
    statuses: Counter = Counter()
    problems: list[dict[str, Any]] = []
    lock, rest = threading.Lock(), list(reversed(requests))

    def work() -> None:
        with httpx.Client(transport=httpx.HTTPTransport(uds=socket), timeout=90.0) as client:
            while True:
                with lock:
                    if not rest:
                        return
                    request = rest.pop()
                problem, status = _send(client, request)
                with lock:
                    statuses[status] += 1
                    if problem:
                        problems.append({"problem": problem, "status": status, "request": repr(request)[:2000]})
                    progress(sum(statuses.values()))

    pool = [threading.Thread(target=work) for _ in range(threads)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    return statuses, problems


def _send(client: httpx.Client, request: dict[str, Any]) -> tuple[str, int]:
    started = time.monotonic()
    try:
        # A long poll for an unknown id answers at once; a stream ends with its evaluations.
        response = client.request(**request)
    except (httpx.InvalidURL, httpx.LocalProtocolError, UnicodeError, ValueError):
        return "", 0  # this client cannot write it, so the server never saw it
    except httpx.TransportError as error:
        return f"the connection broke: {type(error).__name__}: {error}", -1
    if time.monotonic() - started > SLOW_S + float(_wait_s(request)):
        return f"answered after {time.monotonic() - started:.0f} s", response.status_code
    if response.status_code >= 500 and response.status_code not in ALLOWED_5XX:
        return f"server error: {response.text[:300]}", response.status_code
    if response.status_code >= 400 and response.status_code not in (404, 405):
        try:
            named = "error" in response.json()
        except ValueError:
            named = False
        if not named:
            return f"an error without its reason: {response.text[:300]}", response.status_code
    return "", response.status_code


def _wait_s(request: dict[str, Any]) -> float:
    try:
        return min(60.0, max(0.0, float(request["params"].get("wait_s", 0))))
    except (TypeError, ValueError):
        return 0.0


def main() -> int:
    """Fuzzes a private server and writes the report; 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with private_server(arguments.device, 2) as server:
        broker = psutil.Process(server.process.pid)
        with httpx.Client(transport=httpx.HTTPTransport(uds=server.socket)) as client:
            document = client.get("http://sandbox/openapi.json").json()
        requests = draw(document, arguments.requests, arguments.seed)
        files_before, bytes_before = broker.num_fds(), broker.memory_info().rss
        started = time.monotonic()
        statuses, problems = send(server.socket, requests, arguments.threads, _say(len(requests)))
        seconds = time.monotonic() - started
        alive = broker.is_running() and server.client.health().status in ("ok", "degraded")
        waiting = server.client.health().queue
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and (waiting.waiting or waiting.running):
            time.sleep(0.5)
            waiting = server.client.health().queue
        files_after, bytes_after = broker.num_fds(), broker.memory_info().rss
        restarts = server.log.read_text().count("starting another")
    leaked = files_after - files_before > LEAK_FILES or bytes_after - bytes_before > LEAK_BYTES
    report = {
        **provenance(), "schemathesis": schemathesis.__version__, "requests": len(requests), "seconds": seconds,
        "statuses": {str(k): v for k, v in sorted(statuses.items())}, "problems": problems, "alive": alive,
        "oracle_restarts": restarts, "left_in_queue": waiting.waiting + waiting.running,
        "open_files": {"before": files_before, "after": files_after},
        "resident_bytes": {"before": bytes_before, "after": bytes_after},
    }  # fmt: skip
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({**report, "problems": len(problems)}, indent=1))
    for problem in problems[:10]:
        print("PROBLEM", problem)
    return int(bool(problems) or not alive or leaked)


def _say(total: int) -> Callable[[int], None]:
    def progress(done: int) -> None:
        if done % 500 == 0:
            print(f"{done}/{total}", flush=True)

    return progress


if __name__ == "__main__":
    raise SystemExit(main())
