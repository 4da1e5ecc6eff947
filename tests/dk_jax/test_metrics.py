"""Scalars are appended as JSON lines and TensorBoard events; readers see the last line of each step."""

import numpy as np
import pytest

from dk_jax.metrics import Metrics, read_scalars


@pytest.fixture
def metrics(tmp_path):
    made = Metrics(tmp_path)
    yield made
    made.close()


def test_what_is_written_is_read_back_by_phase_in_step_order(tmp_path, metrics):
    metrics.scalars("rl", 2, {"reward": 0.5})
    metrics.scalars("sft", 1, {"loss": 3.0})
    metrics.scalars("rl", 1, {"reward": 0.25, "fast_1.5": 0.0})
    path = tmp_path / "metrics.jsonl"
    found = read_scalars(path, "rl")
    assert [(e["step"], e["reward"]) for e in found] == [(1, 0.25), (2, 0.5)]
    assert found[0]["fast_1.5"] == 0.0 and found[0]["phase"] == "rl" and found[0]["time"] > 1e9
    assert [e["loss"] for e in read_scalars(path, "sft")] == [3.0]
    assert read_scalars(path, "eval") == []


def test_a_line_is_on_disk_before_the_run_ends(tmp_path, metrics):
    metrics.scalars("rl", 1, {"reward": 0.5})
    assert (tmp_path / "metrics.jsonl").read_text().endswith("}\n")


def test_a_step_done_again_after_a_restart_counts_once_with_its_last_values(tmp_path):
    for reward in (0.25, 0.75):
        metrics = Metrics(tmp_path)
        metrics.scalars("rl", 3, {"reward": reward})
        metrics.close()
    assert [e["reward"] for e in read_scalars(tmp_path / "metrics.jsonl", "rl")] == [0.75]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2, "nothing is erased"


def test_a_line_cut_short_by_a_crash_is_skipped(tmp_path, metrics):
    metrics.scalars("rl", 1, {"reward": 0.5})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"phase": "rl", "step": 2, "rew')
    assert [e["step"] for e in read_scalars(tmp_path / "metrics.jsonl", "rl")] == [1]


def test_the_line_after_one_that_was_cut_short_is_not_lost(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"phase": "rl", "step": 2, "rew')
    metrics = Metrics(tmp_path)
    metrics.scalars("rl", 2, {"reward": 0.5})
    metrics.close()
    assert [e["reward"] for e in read_scalars(tmp_path / "metrics.jsonl", "rl")] == [0.5]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("-inf")])
def test_a_number_that_is_not_finite_is_an_error_with_its_name(tmp_path, metrics, value):
    with pytest.raises(FloatingPointError, match=r"rl/loss .* step 7"):
        metrics.scalars("rl", 7, {"reward": 0.5, "loss": value})
    assert read_scalars(tmp_path / "metrics.jsonl", "rl") == []


def test_scalars_and_text_go_to_tensorboard(tmp_path, metrics):
    metrics.scalars("rl", 1, {"reward": 0.5})
    metrics.text("rl/best_kernel", 1, "void kernel() {}")
    metrics.close()
    written = b"".join(path.read_bytes() for path in metrics.directory.glob("events.*"))
    assert b"rl/reward" in written and b"void kernel() {}" in written


def test_a_run_that_has_not_begun_has_no_scalars(tmp_path):
    assert read_scalars(tmp_path / "metrics.jsonl", "rl") == []
