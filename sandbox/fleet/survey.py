"""What a node can judge and with which settings, found on the node itself.

`look` runs this module as a program, `python -m sandbox.fleet.survey WISHES`, so that the asking process (of Ray's, with many threads)
changes in nothing. It prints one line of JSON: a `Survey`, or {"error": why the node cannot serve}.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

import sandbox
from sandbox.build.artifacts import ArtifactStore
from sandbox.jail.probe import isolation
from sandbox.protocol import Capabilities
from sandbox.settings import SettingsError, capabilities, make_settings

LOOK_S = 180.0


class Wishes(BaseModel):
    """What `serve` was asked for, as it was asked: each node finds its own value for what is None. `code`: digest of the sandbox on the
    broker's host as it is when a node is looked at."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    code: str = ""
    device: str = "auto"
    workers: int | None = None
    threads: int | None = None
    cache: str | None = None
    isolation: str | None = None
    log_level: str = "WARNING"
    log_format: str = "text"


class Survey(BaseModel):
    """What a node offers.

    Attributes:
      workers: oracles that it has room for.
      cores: pieces of ordinary work that may run beside each other.
      settings: fields of the `WorkerSettings` of its oracles, without `scratch`.
      level, features, missing: how untrusted code is confined there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    workers: int
    cores: int
    settings: dict[str, Any]
    capabilities: Capabilities
    level: str
    features: tuple[str, ...]
    missing: tuple[str, ...]


def code_digest() -> str:
    """Digest of this installation's sources: two that judge alike have the same."""
    digest, root = hashlib.sha256(), Path(sandbox.__file__).resolve().parent
    for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".h", ".cpp")):
        for part in (str(path.relative_to(root)).encode(), path.read_bytes()):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:16]


def survey(wishes: Wishes) -> Survey:
    """Looks at this host.

    Raises:
      SettingsError: it cannot serve like this; the text says why.
    """
    own = code_digest()
    if own != wishes.code:
        raise SettingsError(
            f"its sandbox ({sandbox.__version__}, {own}) is not that of the broker's host ({wishes.code}): install the same on every node"
        )
    asked = wishes.model_dump(exclude={"code"})
    settings = make_settings(**asked)
    try:
        ArtifactStore(settings.cache).prune()
    except OSError as error:
        raise SettingsError(f"cannot use the cache {settings.cache}: {error}") from error
    confined = isolation(settings.isolation)
    return Survey(
        workers=settings.workers,
        cores=settings.cores,
        settings={
            "cache": str(settings.cache),
            "threads": settings.threads,
            "isolation": settings.isolation,
            "gpu": any(device.startswith("cuda") for device in settings.devices),
            "device_share": settings.device_share,
            "log_level": settings.log_level,
            "log_format": settings.log_format,
        },
        capabilities=capabilities(settings),
        level=confined.name,
        features=confined.features,
        missing=confined.missing,
    )


def look(wishes: str) -> str:
    """Runs `survey` in a process of its own; what Ray calls on a node.

    Returns:
      What the program prints.
    """
    root = str(Path(sandbox.__file__).resolve().parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-P", "-m", "sandbox.fleet.survey", wishes]
    try:
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LOOK_S)
    except (OSError, subprocess.SubprocessError) as error:
        return json.dumps({"error": f"what it offers cannot be found out: {error}"})
    said = done.stdout.strip()
    if done.returncode or not said:
        return json.dumps({"error": f"what it offers cannot be found out: {done.stderr.strip()[-500:]}"})
    return said.splitlines()[-1]


if __name__ == "__main__":
    try:
        print(survey(Wishes.model_validate_json(sys.argv[1])).model_dump_json())
    except SettingsError as problem:
        print(json.dumps({"error": str(problem)}))
