"""One real server for the whole red team."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.redteam.attacks_channel import plant_secret, remove_secret
from tests.redteam.case import RedTeam
from tests.sandbox.helpers import running_server


@pytest.fixture(scope="session")
def red_team() -> Iterator[RedTeam]:
    with tempfile.TemporaryDirectory(prefix="sbt-", dir="/tmp") as name:
        plant_secret()
        try:
            with running_server(Path(name), "--workers", "1") as server, server.client() as client:
                yield RedTeam(client)
        finally:
            remove_secret()
