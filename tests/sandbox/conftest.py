"""One real server process for all tests of the sandbox, on a Unix socket, judging on the CPU."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.build.artifacts import ArtifactStore
from sandbox.client import SandboxClient
from sandbox.jail.spawn import Zygote
from sandbox.protocol import Options, TaskSpec
from tests.sandbox.helpers import ADD_BIAS, Server, running_server


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose path is short enough for a Unix socket."""
    with tempfile.TemporaryDirectory(prefix="sbt-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="sbt-", dir="/tmp") as name:
        with running_server(Path(name), "--workers", "2") as started:
            yield started


@pytest.fixture
def sandbox(server: Server) -> Iterator[SandboxClient]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def task() -> TaskSpec:
    return TaskSpec(reference=ADD_BIAS, name="add_bias_relu")


@pytest.fixture(scope="session")
def quick() -> Options:
    """Short deadlines, no timing."""
    return Options(timing="none", load_s=20, check_s=3, time_s=10, memory_bytes=1 << 30)


@pytest.fixture(scope="module")
def zygote(tmp_path_factory):
    """One that has imported nothing; files that need another have their own."""
    zygote = Zygote(modules=[], threads=1, directory=tmp_path_factory.mktemp("zygote"))
    yield zygote
    zygote.close()


@pytest.fixture(scope="session")
def built_headers(tmp_path_factory):
    """The store of all tests that build extensions: its precompiled headers take a minute and half a gigabyte."""
    root = tmp_path_factory.mktemp("headers")
    yield ArtifactStore(root / "cache")
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return ArtifactStore(tmp_path_factory.mktemp("store"))
