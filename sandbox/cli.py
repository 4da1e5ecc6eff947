"""Command line: `serve` runs a server, `top` watches one, `bench` measures one, `eval` judges one file, `verify` decides between two lots
of files, `admit` looks at tasks themselves, `gateway` serves KernelGYM's clients, `doctor` reports on this machine."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from sandbox import admit as admitting
from sandbox.client import SandboxBusy, SandboxClient, SandboxRejected, SandboxUnavailable
from sandbox.jail.plan import LEVELS
from sandbox.lifeline import ends_with_parent
from sandbox.logs import LOG_FORMATS, configure
from sandbox.printed import readable, readable_decision
from sandbox.protocol import RULE_KINDS, Candidate, Options, TaskSpec, VerificationRequest

START_S = 120.0
RULE_NUMBERS = {"alpha": float, "min_ratio": float, "min_absolute": float, "bar": float, "fail_speedup": float, "statistic": str}
"""Fields of a rule that `verify` has options for."""


class UsageError(RuntimeError):
    """Something the user can put right; printed without a traceback, exit status 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status (0 whenever a verdict was reached, whatever it is)."""
    arguments = _parser().parse_args(argv)
    # A shell starts background commands with SIGINT ignored; Ctrl-C and its kin must still end this cleanly.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return arguments.run(arguments)
    except (UsageError, SandboxRejected, SandboxBusy, SandboxUnavailable) as error:
        print(f"sandbox: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    called = Path(sys.argv[0]).name
    prog = called if called == "kernel-sandbox" else "python -m sandbox"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="judge kernels for clients on a Unix socket")
    serve.add_argument("--socket", required=True, type=Path, help="path of the socket (made with mode 0600)")
    _server_arguments(serve)
    serve.add_argument(
        "--require",
        action="append",
        default=[],
        choices=["cpp", "triton", "cuda"],
        help="refuse to start when candidates of this language cannot be judged",
    )
    serve.add_argument(
        "--drain-s",
        type=float,
        default=0.0,
        help="told to end (SIGTERM, Ctrl-C), finish what is queued for up to so many seconds, and take no more; told again, end at "
        "once (default: %(default)s)",
    )
    serve.add_argument(
        "--fleet",
        choices=["ray"],
        help="judge on all nodes of a Ray cluster, of which this host is one; --device, --workers, --threads, --cache and --isolation hold "
        "for each of them",
    )
    serve.add_argument("--fleet-address", help="HOST:PORT of the cluster's head, or auto for the one that runs here (default: $RAY_ADDRESS, or auto)")
    serve.add_argument("--log-level", default="warning", choices=["debug", "info", "warning", "error"])
    serve.add_argument("--log-format", default="text", choices=LOG_FORMATS, help="json: an object a line, with evaluation ids")
    serve.set_defaults(run=_serve)

    evaluate = commands.add_parser("eval", help="judge one candidate file against one task file")
    evaluate.add_argument(
        "--task", required=True, type=Path, help="Python file with Model, get_inputs, get_init_inputs"
    )
    evaluate.add_argument("--candidate", required=True, type=Path)
    evaluate.add_argument(
        "--language", choices=["triton", "cuda", "cpp"], help="default: by the file's ending and text"
    )
    evaluate.add_argument(
        "--form", choices=["module", "kernel"], help="default: kernel for .cpp and .cc, else module"
    )
    evaluate.add_argument("--entry-point", default="ModelNew")
    evaluate.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    evaluate.add_argument("--timing", default="full", choices=["none", "quick", "full"])
    evaluate.add_argument("--trials", type=int, default=3, help="correctness trials")
    evaluate.add_argument(
        "--admit", action="store_true", help="reject a task that a trivial answer would pass"
    )
    evaluate.add_argument(
        "--profile",
        nargs="?",
        const="kernels",
        choices=["kernels", "ncu"],
        help="report kernels and coverage (GPU, where it is the default), with ncu the hardware's counters too",
    )
    evaluate.add_argument(
        "--socket", type=Path, help="use the server on this socket instead of a private one"
    )
    evaluate.add_argument("--json", action="store_true", help="print the result model alone")
    _server_arguments(evaluate)
    evaluate.set_defaults(run=_eval)

    verify = commands.add_parser("verify", help="decide whether treated candidate files are better than control ones, in pairs")
    verify.add_argument("--task", required=True, type=Path, help="Python file with Model, get_inputs, get_init_inputs")
    for side in ("control", "treated"):
        verify.add_argument(f"--{side}", required=True, type=Path, nargs="+", metavar="FILE", help="candidates, in the order of their pairs")
    verify.add_argument("--language", choices=["triton", "cuda", "cpp"], help="default: by each file's ending and text")
    verify.add_argument("--form", choices=["module", "kernel"], help="default: kernel for .cpp and .cc, else module")
    verify.add_argument("--entry-point", default="ModelNew")
    verify.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    verify.add_argument("--timing", default="full", choices=["quick", "full"])
    verify.add_argument("--rule", default="sequential", choices=RULE_KINDS, help="default: %(default)s, with one look at all pairs")
    for name, kind in RULE_NUMBERS.items():
        verify.add_argument(f"--{name.replace('_', '-')}", type=kind, help="of the rule (default: its own)")
    verify.add_argument("--socket", type=Path, help="use the server on this socket instead of a private one")
    verify.add_argument("--json", action="store_true", help="print the result model alone")
    _server_arguments(verify)
    verify.set_defaults(run=_verify)

    admit = commands.add_parser("admit", help="examine task files: would a trivial answer pass, what do they take")
    admitting.add_arguments(admit)
    _server_arguments(admit)
    admit.set_defaults(run=_admit)

    gateway = commands.add_parser("gateway", help="KernelGYM's HTTP API over TCP in front of a running server")
    gateway.add_argument("--socket", required=True, type=Path, help="of the server")
    gateway.add_argument("--listen", default="127.0.0.1:8000", help="HOST:PORT (default: %(default)s)")
    gateway.add_argument(
        "--token-file", type=Path, help="holds what clients must put before the host in their URL (default: $SANDBOX_TOKEN)"
    )
    gateway.add_argument("--log-level", default="warning", choices=["debug", "info", "warning", "error"])
    gateway.set_defaults(run=_gateway)

    top = commands.add_parser("top", help="watch a running server: queue, rates, outcomes, where the time goes")
    top.add_argument("--socket", required=True, type=Path, help="of the server")
    top.add_argument("--every", type=float, default=1.0, help="seconds between two looks (default: %(default)s)")
    top.add_argument("--once", action="store_true", help="print one view, of the first two looks, and end")
    top.set_defaults(run=_top)

    bench = commands.add_parser("bench", help="measure a server: cost of a call, time to a verdict, verdicts a second, spread")
    bench.add_argument("--socket", type=Path, help="of an idle server, instead of a private one with an empty cache")
    bench.add_argument("--candidates", type=int, default=16, help="new candidates for each measurement (default: %(default)s)")
    bench.add_argument("--json", action="store_true", help="print the numbers as JSON")
    _server_arguments(bench)
    bench.set_defaults(run=_bench)

    doctor = commands.add_parser("doctor", help="report what this machine offers and what is missing")
    doctor.set_defaults(run=_doctor)
    return parser


def _server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default=None, help="cpu, cuda:N or auto")
    parser.add_argument("--workers", type=int, help="evaluations in progress at once")
    parser.add_argument("--threads", type=int, help="OpenMP threads of candidates and references")
    parser.add_argument("--cache", help="directory of built artifacts (default: ~/.cache/dk_sandbox)")
    parser.add_argument("--max-queue", type=int, default=4096, help="evaluations that may wait")
    parser.add_argument(
        "--isolation",
        choices=LEVELS,
        help="refuse to start unless untrusted code is confined at this level (default: the best that works "
        "here; 'none' only if asked for)",
    )


def _serve(arguments: argparse.Namespace) -> int:
    from sandbox.fleet import FleetError
    from sandbox.server import ServerError, serve
    from sandbox.settings import SettingsError, capabilities, make_settings

    configure(arguments.log_level, arguments.log_format)
    if arguments.fleet_address is not None and not arguments.fleet:
        raise UsageError("--fleet-address is of use with --fleet=ray alone")
    fleet = None
    try:
        settings = make_settings(
            # Of a fleet's nodes each looks at itself for what is asked; the broker judges nothing then.
            device="cpu" if arguments.fleet else arguments.device or "auto",
            workers=arguments.workers,
            threads=arguments.threads,
            cache=arguments.cache,
            max_queue=arguments.max_queue,
            isolation="none" if arguments.fleet else arguments.isolation,
            drain_s=arguments.drain_s,
            log_level=arguments.log_level.upper(),
            log_format=arguments.log_format,
        )
        if arguments.fleet:
            fleet = _fleet(arguments)
            fleet.attach()
        languages = (fleet.offer.capabilities if fleet else capabilities(settings)).languages
        for language in arguments.require:
            if not languages[language].available:
                raise UsageError(
                    f"{language} candidates cannot be judged here: {languages[language].problem}"
                )
        if not languages["cpp"].available:
            logging.getLogger("sandbox").warning(
                "cpp candidates will be refused: %s", languages["cpp"].problem
            )
        serve(settings, arguments.socket, fleet=fleet, log_level=arguments.log_level)
    except (SettingsError, ServerError, FleetError) as error:
        raise UsageError(str(error)) from error
    finally:
        if fleet is not None:
            fleet.end()
    return 0


def _fleet(arguments: argparse.Namespace):
    from sandbox.fleet.fleet import Fleet
    from sandbox.fleet.survey import Wishes

    wishes = Wishes(
        device=arguments.device or "auto",
        workers=arguments.workers,
        threads=arguments.threads,
        cache=arguments.cache,
        isolation=arguments.isolation,
        log_level=arguments.log_level.upper(),
        log_format=arguments.log_format,
    )
    return Fleet(arguments.fleet_address or os.environ.get("RAY_ADDRESS") or "auto", wishes, arguments.max_queue)


def _top(arguments: argparse.Namespace) -> int:
    from sandbox.top import watch

    if not 0.1 <= arguments.every <= 3600:
        raise UsageError(f"--every is {arguments.every:g} seconds; it must be between 0.1 and 3600")
    with SandboxClient(arguments.socket) as client:
        watch(client, arguments.every, once=arguments.once)
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    from sandbox.bench import BenchError, run

    if not 1 <= arguments.candidates <= 1024:
        raise UsageError(f"--candidates is {arguments.candidates}; it must be between 1 and 1024")
    device = arguments.device if arguments.device not in (None, "auto") else _default_device("triton")
    say = (lambda text: print(f"... {text}", file=sys.stderr, flush=True)) if sys.stderr.isatty() else (lambda _: None)
    with tempfile.TemporaryDirectory(prefix="dk_sandbox_bench-") as cache:
        if arguments.socket is not None and arguments.isolation is not None:
            with SandboxClient(arguments.socket) as client:
                _check_level(client.health().level, arguments)
        arguments.cache = arguments.cache or cache
        with _server(arguments, device, workers=arguments.workers) as path, SandboxClient(path, retry_for_s=START_S) as client:
            try:
                report = run(client, device, arguments.candidates, say)
            except BenchError as error:
                raise UsageError(str(error)) from error
    print(json.dumps(report.as_dict(), indent=1) if arguments.json else "\n".join(report.lines()))
    return 0


def _gateway(arguments: argparse.Namespace) -> int:
    from sandbox.compat.kernelgym import GatewayError, serve

    token = _read(arguments.token_file).strip() if arguments.token_file else os.environ.get("SANDBOX_TOKEN")
    if arguments.token_file and not token:
        raise UsageError(f"{arguments.token_file} is empty")
    with SandboxClient(arguments.socket, retry_for_s=START_S) as client:
        client.health()
    try:
        serve(arguments.socket, arguments.listen, token or None, log_level=arguments.log_level)
    except GatewayError as error:
        raise UsageError(str(error)) from error
    return 0


def _doctor(_: argparse.Namespace) -> int:
    from sandbox.doctor import report

    print(report())
    return 0


def _eval(arguments: argparse.Namespace) -> int:
    task_text, source = _read(arguments.task), _read(arguments.candidate)
    language, form = _kind(arguments, arguments.candidate, source)
    device = arguments.device if arguments.device not in (None, "auto") else _default_device(language)
    try:
        task = TaskSpec(reference=task_text, name=arguments.task.stem, device=device, dtype=arguments.dtype)
        candidate = Candidate(source=source, language=language, form=form, entry_point=arguments.entry_point)
        options = Options(
            timing=arguments.timing,
            correctness_trials=arguments.trials,
            admit=arguments.admit,
            profile=arguments.profile or device != "cpu",
        )
    except ValidationError as error:
        raise _usage(error) from error
    with (
        _server(arguments, device, workers=1) as socket_path,
        SandboxClient(socket_path, retry_for_s=START_S) as sandbox,
    ):
        if arguments.socket is not None and arguments.isolation is not None:
            _check_level(sandbox.health().level, arguments)
        [result] = sandbox.evaluate(task, [candidate], options)
    print(result.model_dump_json(indent=2) if arguments.json else readable(result, arguments.candidate.name, arguments.task.name))
    return 0 if result.outcome != "infra_error" else 3


def _verify(arguments: argparse.Namespace) -> int:
    candidates = {}
    for side in ("control", "treated"):
        candidates[side] = []
        for path in getattr(arguments, side):
            source = _read(path)
            language, form = _kind(arguments, path, source)
            candidates[side].append({"source": source, "language": language, "form": form, "entry_point": arguments.entry_point})
    device = arguments.device if arguments.device not in (None, "auto") else _default_device(candidates["control"][0]["language"])
    task = {"reference": _read(arguments.task), "name": arguments.task.stem, "device": device, "dtype": arguments.dtype}
    given = {name: value for name in RULE_NUMBERS if (value := getattr(arguments, name)) is not None}
    try:
        request = VerificationRequest.model_validate({
            "arms": [{"task": task, **candidates}], "rule": {"kind": arguments.rule, **given},
            "options": {"timing": arguments.timing, "profile": device != "cpu"},
        })  # fmt: skip
    except ValidationError as error:
        raise _usage(error) from error
    with _server(arguments, device, workers=1) as path, SandboxClient(path, retry_for_s=START_S) as sandbox:
        if arguments.socket is not None and arguments.isolation is not None:
            _check_level(sandbox.health().level, arguments)
        result = sandbox.verify(request.arms, request.options, rule=request.rule)
    print(result.model_dump_json(indent=2) if arguments.json else readable_decision(result))
    return 0 if result.decision.status != "continue" else 3


def _admit(arguments: argparse.Namespace) -> int:
    device = arguments.device if arguments.device not in (None, "auto") else _default_device("triton")
    try:
        tasks, options = admitting.specs(arguments, [_read(path) for path in arguments.files], device)
    except ValidationError as error:
        raise _usage(error) from error
    with _server(arguments, device, workers=1) as path, SandboxClient(path, retry_for_s=START_S) as client:
        if arguments.socket is not None and arguments.isolation is not None:
            _check_level(client.health().level, arguments)
        admitting.run(client, arguments, tasks, options)
    return 0


def _usage(error: ValidationError) -> UsageError:
    first = error.errors()[0]
    return UsageError(f"{'.'.join(str(part) for part in first['loc'] if part not in RULE_KINDS)}: {first['msg']}")


def _check_level(level: str, arguments: argparse.Namespace) -> None:
    if level not in LEVELS[: LEVELS.index(arguments.isolation) + 1]:
        raise UsageError(
            f"--isolation {arguments.isolation}: the server on {arguments.socket} runs at level {level}; "
            "use another server, or leave --socket out"
        )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error


def _kind(arguments: argparse.Namespace, path: Path, source: str) -> tuple[str, str]:
    bare = path.suffix in (".cpp", ".cc", ".cxx", ".c")
    form = arguments.form or ("kernel" if bare else "module")
    if arguments.language:
        return arguments.language, form
    if form == "kernel":
        return "cpp", form
    if "cuda_sources" in source:
        return "cuda", form
    return ("cpp" if "cpp_sources" in source else "triton"), form


def _default_device(language: str) -> str:
    from sandbox.settings import count_gpus

    return "cuda:0" if language != "cpp" and count_gpus() else "cpu"


@contextmanager
def _server(arguments: argparse.Namespace, device: str, workers: int | None) -> Iterator[Path]:
    """The server that `--socket` names, else a private one that ends with this command.

    Args:
      workers: of a private one; its own choice if None.
    """
    if arguments.socket is not None:
        yield arguments.socket
        return
    with tempfile.TemporaryDirectory(prefix="dk_sandbox_eval-") as directory:
        path = Path(directory) / "socket"
        command = [
            sys.executable,
            "-m",
            "sandbox",
            "serve",
            "--socket",
            str(path),
            "--device",
            device,
            "--log-level",
            "error",
        ]
        if workers is not None:
            command += ["--workers", str(workers)]
        for name in ("threads", "cache", "isolation", "max-queue"):
            value = getattr(arguments, name.replace("-", "_"))
            if value is not None:
                command += [f"--{name}", str(value)]
        # A session of its own: Ctrl-C reaches this command, which then ends the server in good order.
        server = subprocess.Popen(
            command, stdout=sys.stderr, start_new_session=True, env=_with_package_path(), preexec_fn=ends_with_parent()
        )
        try:
            deadline = time.monotonic() + START_S
            while not path.exists():
                if server.poll() is not None:
                    raise UsageError("the private server did not start; see above")
                if time.monotonic() > deadline:
                    raise UsageError(f"the private server did not start within {START_S:g} s")
                time.sleep(0.02)
            yield path
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(15)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _with_package_path() -> dict[str, str]:
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
