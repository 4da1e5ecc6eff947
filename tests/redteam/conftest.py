"""One real server for the whole red team."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sandbox.build.artifacts import ArtifactStore
from sandbox.build.headers import Headers
from sandbox.build.toolchain import find_toolchain
from sandbox.jail.spawn import Zygote
from tests.redteam.attacks_channel import plant_secret, remove_secret
from tests.redteam.case import RedTeam
from tests.sandbox.helpers import extensions_problem, running_server

FLAGS = (("-O3",), ("-O3", "-fopenmp"))
"""What the cases' extensions are compiled with."""


def precompile_headers(directory: Path) -> None:
    """Puts the headers of all cases' extensions into the cache of `running_server`, all at once on several
    cores; the cases would do so one after the other, each for half a minute."""
    store = ArtifactStore(directory / "cache")

    def precompile(flags: Sequence[str]) -> None:
        scratch = Path(tempfile.mkdtemp(dir=directory))
        zygote = Zygote(modules=[], threads=1, directory=scratch)
        try:
            Headers(store, find_toolchain(), scratch, time.sleep).lean(flags, zygote)
        finally:
            zygote.close()

    with ThreadPoolExecutor(len(FLAGS)) as pool:
        list(pool.map(precompile, FLAGS))


class Careful(RedTeam):
    """Skips the test where a case needs an extension and none can be built here."""

    def _fresh(self, candidate):
        if "load_inline" in candidate.source and extensions_problem():
            pytest.skip(extensions_problem())
        return super()._fresh(candidate)


@pytest.fixture(scope="session")
def red_team() -> Iterator[RedTeam]:
    with tempfile.TemporaryDirectory(prefix="sbt-", dir="/tmp") as name:
        if not extensions_problem():
            precompile_headers(Path(name))
        plant_secret()
        try:
            with running_server(Path(name), "--workers", "1") as server, server.client() as client:
                yield Careful(client)
        finally:
            remove_secret()
