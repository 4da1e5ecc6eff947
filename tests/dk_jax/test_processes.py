"""What a run says of its processes before there are any: who they are, and that asking costs a single one nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dk_jax import distributed

ROOT = Path(__file__).parents[2]
ALONE = """
from dk_jax import distributed
assert not distributed.initialize({}) and distributed.is_first() and not distributed.several()
assert distributed.by_first(lambda: {"x": (1, float("inf"))}) == {"x": (1, float("inf"))}
distributed.meet("here")
assert distributed.for_all(len) is len
from jax._src import xla_bridge
assert not xla_bridge._backends, "JAX has started its threads"
"""


def test_a_process_alone_asks_nobody_and_starts_no_threads_of_jax():
    done = subprocess.run([sys.executable, "-c", ALONE], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("env", "says"),
    [({"JAX_PROCESS_ID": "0"}, "JAX_PROCESS_ID set without .*all three"),
     ({"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"}, "for each its own number from 0 on"),
     ({"JAX_COORDINATOR_ADDRESS": "host", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, "give host:port of the first"),
     ({"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"}, "JAX_NUM_PROCESSES='two'")],
)  # fmt: skip
def test_variables_that_make_no_sense_together_are_named(env, says):
    with pytest.raises(ValueError, match=says):
        distributed.initialize(env)


@pytest.mark.parametrize(
    "env",
    [{}, {"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, {"SLURM_PROCID": "0"},
     {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}],
)  # fmt: skip
def test_a_run_of_one_process_joins_nobody(env):
    assert not distributed.initialize(env)
