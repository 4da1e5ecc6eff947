"""Ended by SIGKILL and started again, a run comes to what an undisturbed one comes to; damaged checkpoints; other device counts."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.demo import get_config
from dk_jax.metrics import Metrics, read_scalars
from dk_jax.metrics_events import read_events
from dk_jax.models.sharding import make_mesh
from dk_jax.rollout.judge import Journal
from dk_jax.train.setup import ConfigError
from dk_jax.train.state import CheckpointError, Checkpoints, TrainState
from dk_jax.train.workdir import remember_config
from tests.dk_jax import killed_run
from tests.dk_jax.emulated import on_eight_devices

# --- a run that is killed --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an undisturbed run."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert killed_run.spawn(folder) == 0, (folder / "output").read_text()[-3000:]
    return folder


def test_killed_in_judging_commit_and_checkpoint_a_run_continues_bit_for_bit(whole, tmp_path):
    wanted, judged = killed_run.outcome(whole), killed_run.judged(whole)
    assert wanted["result"]["skills"]["active"] >= 1 and len(wanted["scalars"]) == 4
    assert all(line["grad_norm"] > 0 for line in wanted["scalars"])
    workdir = killed_run.without_rl(whole, tmp_path / "run")
    for kill in (("seal", 2, 0.0), ("commit", 2, 0.0), ("judge", 7, 0.001)):
        assert killed_run.spawn(workdir, kill) == -9, (workdir / "output").read_text()[-3000:]
    assert killed_run.spawn(workdir) == 0, (workdir / "output").read_text()[-3000:]
    assert killed_run.outcome(workdir) == wanted
    assert not killed_run.judged_again(workdir, judged)


def test_killed_while_rollouts_and_updates_overlap_a_run_continues_bit_for_bit(whole, tmp_path):
    ahead = dict(staleness=1)
    undisturbed = killed_run.without_rl(whole, tmp_path / "undisturbed")
    (undisturbed / "config.json").unlink()
    assert killed_run.spawn(undisturbed, **ahead) == 0, (undisturbed / "output").read_text()[-3000:]
    wanted, judged = killed_run.outcome(undisturbed), killed_run.judged(undisturbed)
    assert [line["staleness"] for line in wanted["scalars"]] == [0.0, 1.0, 1.0, 1.0] and wanted["result"]["skills"]["active"] >= 1
    assert all(line["gap_policy"] > 1e-4 for line in wanted["scalars"][2:]), "the first update's rate is 0, from the second on they differ"
    workdir = killed_run.without_rl(undisturbed, tmp_path / "run")
    for kill in (("update", 2, 0.0), ("judge", 6, 0.001), ("seal", 1, 0.0), ("commit", 1, 0.0)):
        assert killed_run.spawn(workdir, kill, **ahead) == -9, (workdir / "output").read_text()[-3000:]
    assert killed_run.spawn(workdir, **ahead) == 0, (workdir / "output").read_text()[-3000:]
    assert killed_run.outcome(workdir) == wanted
    assert not killed_run.judged_again(workdir, judged, **ahead)


def test_where_the_newest_checkpoint_is_damaged_the_one_before_and_the_journal_lead_to_the_same(whole, tmp_path):
    wanted, workdir = killed_run.outcome(whole), tmp_path / "run"
    shutil.copytree(whole, workdir)
    for path in (workdir / "result.json", workdir / "marks"):
        path.unlink()
    newest = workdir / "checkpoints" / "rl" / "4"
    largest = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    with open(largest, "r+b") as file:
        file.truncate(largest.stat().st_size // 2)
    assert killed_run.spawn(workdir) == 0
    said = (workdir / "output").read_text()
    assert f"checkpoint {newest} is damaged ({largest.relative_to(newest)} has" in said and f"and {newest.with_name('3')} is used" in said
    assert "are judged again" not in said and not killed_run.judged(workdir), "the journal still held the last step's verdicts"
    assert killed_run.outcome(workdir) == wanted


# --- checkpoints -----------------------------------------------------------------------------------------------------------


def state(step, trainable=None):
    arrays = {"a": jnp.arange(64.0).reshape(8, 8) + step} if trainable is None else trainable
    return TrainState(step=step, trainable=arrays, opt_state={"m": jnp.full((8,), step / 3)}, record={"third": step / 3})


def write(folder, steps, **how):
    with Checkpoints(folder, **how) as checkpoints:
        for step in steps:
            checkpoints.save(state(step))
    return folder


def same(found, wanted):
    for a, b in zip(jax.tree.leaves((found.trainable, found.opt_state)), jax.tree.leaves((wanted.trainable, wanted.opt_state)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    return (found.step, found.record) == (wanted.step, wanted.record)


def test_a_checkpoint_holds_what_was_saved_though_its_arrays_were_donated_meanwhile(tmp_path):
    spoil = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0 - 1, tree), donate_argnums=0)
    with Checkpoints(tmp_path / "rl") as checkpoints:
        for step in range(4):
            saved = state(step, {"a": jnp.full((256, 256), float(step))})
            checkpoints.save(saved)
            spoil(saved.trainable)
        checkpoints.wait()
        assert checkpoints.steps == [2, 3]
        for step in (2, 3):
            wanted = state(step, {"a": jnp.full((256, 256), float(step))})
            assert same(checkpoints.restore(wanted, step), wanted)


def files_of(checkpoint):
    return sorted(str(p.relative_to(checkpoint)) for p in checkpoint.rglob("*") if p.is_file())


def test_damage_of_any_file_is_found_and_the_checkpoint_before_is_used(tmp_path, caplog):
    written = write(tmp_path / "written" / "rl", (1, 2))
    unsealed = ("_CHECKPOINT_METADATA", "commit_success.txt")  # Orbax writes these last, and nothing of the state is in them
    for number, name in enumerate(files_of(written / "2")):
        # Each way meets each sort of file; all three would take three times as long.
        for how in ("cut", "gone", "changed") if name in unsealed or name == "manifest.json" else (("cut", "gone", "changed")[number % 3],):
            folder = tmp_path / "again" / "rl"
            shutil.rmtree(folder.parent, ignore_errors=True)
            shutil.copytree(written, folder)
            path = folder / "2" / name
            content = path.read_bytes()
            if how == "gone":
                path.unlink()
            else:
                path.write_bytes(content[: len(content) // 2] if how == "cut" else bytes([content[0] ^ 1]) + content[1:])
            caplog.clear()
            with caplog.at_level(logging.WARNING, "dk_jax.train.state"), Checkpoints(folder) as checkpoints:
                found = checkpoints.restore(state(0))
                assert same(found, state(found.step)), (name, how)
                if name in unsealed and not (name == "_CHECKPOINT_METADATA" and how == "gone"):
                    assert found.step == 2, (name, how)
                    continue
                assert found.step == 1, (name, how)
                assert f"{folder / '2'} is damaged" in caplog.text and f"{folder / '1'} is used instead" in caplog.text, (name, how)
                checkpoints.save(state(2))
            assert (folder.with_name("rl_damaged") / "2").is_dir()
            with Checkpoints(folder) as checkpoints:
                assert same(checkpoints.restore(state(0)), state(2))


def test_when_all_checkpoints_are_damaged_nothing_is_begun_anew(tmp_path):
    folder = write(tmp_path / "rl", (1, 2))
    for step in ("1", "2"):
        (folder / step / "record" / "metadata").unlink()
    with Checkpoints(folder) as checkpoints:
        with pytest.raises(CheckpointError, match=r"all checkpoints in .* damaged \(2: record/metadata is missing; 1: .*delete that folder"):
            checkpoints.restore(state(0))
        with pytest.raises(CheckpointError, match="checkpoint .*/2 is damaged"):
            checkpoints.restore(state(0), 2)
    assert sorted(p.name for p in folder.glob("[0-9]*")) == ["1", "2"]


def test_checkpoints_from_before_there_were_manifests_are_used(tmp_path):
    folder = write(tmp_path / "rl", (1, 2))
    for path in folder.glob("*/manifest.json"):
        path.unlink()
    with Checkpoints(folder) as checkpoints:
        assert same(checkpoints.restore(state(0)), state(2))


def test_what_a_kill_left_of_a_checkpoint_is_cleared_away(tmp_path):
    folder = write(tmp_path / "rl", (1,))
    shutil.copytree(folder / "1", folder / "2.orbax-checkpoint-tmp")
    with Checkpoints(folder) as checkpoints:
        assert same(checkpoints.restore(state(0)), state(1))
        checkpoints.save(state(2))
    assert sorted(p.name for p in folder.iterdir()) == ["1", "2"]


def test_the_best_checkpoint_outlives_newer_ones(tmp_path):
    with Checkpoints(tmp_path / "rl", keep=2) as checkpoints:
        for step in range(1, 5):
            checkpoints.save(state(step))
            checkpoints.wait()
            if step in (1, 2):
                checkpoints.keep_as_best(step)
        assert checkpoints.steps == [3, 4] and [p.name for p in checkpoints.best_directory.iterdir()] == ["2"]
    with Checkpoints(tmp_path / "rl_best") as best:
        assert same(best.restore(state(0)), state(2))


def test_a_state_of_another_model_is_refused_by_name(tmp_path):
    folder = write(tmp_path / "rl", (1,))
    with Checkpoints(folder) as checkpoints, pytest.raises(ValueError, match="/1 does not fit this model"):
        checkpoints.restore(TrainState(step=0, trainable={"b": jnp.zeros(3)}, opt_state={}, record={}))


# --- other device counts ---------------------------------------------------------------------------------------------------


def spread(step, devices):
    """The state with its rows spread over the devices."""
    mesh = make_mesh(data=1, fsdp=len(devices), devices=devices)
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    made = state(step)
    return TrainState(
        step=step, trainable=jax.device_put(made.trainable, place), opt_state=jax.device_put(made.opt_state, place), record=made.record
    )


def measure(out):
    """On eight devices: what one device saved goes to four, what four saved is left for one."""
    folder, four = Path(out).parent, jax.devices()[:4]
    with Checkpoints(folder / "one") as checkpoints:
        found = checkpoints.restore(spread(0, four))
    shards = found.trainable["a"].addressable_shards
    write(folder / "eight", ())
    with Checkpoints(folder / "four") as checkpoints:
        checkpoints.save(spread(6, four))
    json.dump(
        {
            "step": found.step, "a": np.asarray(found.trainable["a"]).tolist(), "m": np.asarray(found.opt_state["m"]).tolist(),
            "shards": [list(s.data.shape) for s in shards], "devices": len({s.device for s in shards}),
        }, open(out, "w"),
    )  # fmt: skip


def test_a_checkpoint_moves_between_device_counts(tmp_path):
    write(tmp_path / "one", (5,))
    found = on_eight_devices(__file__, tmp_path)
    assert (found["step"], found["devices"], found["shards"]) == (5, 4, [[2, 8]] * 4)
    np.testing.assert_array_equal(np.float32(found["a"]), np.asarray(state(5).trainable["a"]))
    np.testing.assert_array_equal(np.float32(found["m"]), np.asarray(state(5).opt_state["m"]))
    with Checkpoints(tmp_path / "four") as checkpoints:
        assert same(checkpoints.restore(state(0)), state(6))


# --- what else is made whole -------------------------------------------------------------------------------------------------


def test_a_phase_that_goes_on_from_a_checkpoint_has_each_step_once(tmp_path):
    metrics = Metrics(tmp_path)
    for step in (1, 2, 3):
        metrics.scalars("rl", step, {"reward": step / 3})
        metrics.scalars("sft", step, {"loss": 1.0})
        metrics.text("rl/best", step, f"of step {step}")
    metrics.flush()
    events = read_events(tmp_path / "tensorboard")
    assert ("rl/reward", 3) in events and len(events) == 9, "all is on disk before a checkpoint is written"
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"phase": "rl", "ste')  # cut by a kill
    metrics.rewind("rl", 1)
    metrics.scalars("rl", 2, {"reward": 0.5})
    metrics.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert sorted((e["phase"], e["step"]) for e in map(json.loads, lines)) == [("rl", 1), ("rl", 2), ("sft", 1), ("sft", 2), ("sft", 3)]
    assert [e["reward"] for e in read_scalars(tmp_path / "metrics.jsonl", "rl")] == [1 / 3, 0.5]
    kept = sorted((tag, step) for tag, step in read_events(tmp_path / "tensorboard") if tag.startswith("rl/"))
    assert [(tag.removesuffix("/text_summary"), step) for tag, step in kept] == [("rl/best", 1), ("rl/reward", 1), ("rl/reward", 2)]


def test_an_event_that_a_kill_cut_short_goes_with_the_forgotten_ones(tmp_path):
    metrics = Metrics(tmp_path)
    for step in (1, 2):
        metrics.scalars("rl", step, {"reward": 0.5})
    metrics.close()
    [path] = (tmp_path / "tensorboard").glob("events.*")
    path.write_bytes(path.read_bytes()[:-3])
    metrics = Metrics(tmp_path)
    metrics.rewind("rl", 0)
    metrics.scalars("rl", 1, {"reward": 0.25})
    metrics.close()
    assert read_events(tmp_path / "tensorboard") == [("rl/reward", 1)]


def verdict(speedup):
    from dk_jax.rollout.trajectory import Verdict

    return Verdict(outcome="ok", stage="timed", reward=1.0, speedup=speedup, noisy=False, coverage=None, feedback="")


def test_a_journal_forgets_some_and_goes_on(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    for step in range(3):
        journal.put(f"rl/{step}/turn0", verdict(float(step)))
    journal.forget(lambda key: key.startswith(("rl/0/", "rl/1/")))
    journal.put("rl/3/turn0", verdict(3.0))
    for found in (journal, Journal(journal.path)):
        assert sorted(found.keys()) == ["rl/2/turn0", "rl/3/turn0"] and found.get("rl/2/turn0") == verdict(2.0)


def test_verdicts_of_one_verification_are_kept_all_or_none(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.put("a", verdict(1.0))
    journal.put_together({"control": verdict(2.0), "treated": verdict(3.0)})
    assert sorted(Journal(journal.path).keys()) == ["a", "control", "treated"]
    whole = journal.path.read_bytes()
    for cut in (1, len(whole.splitlines()[-1]) - 5):
        journal.path.write_bytes(whole[:-cut])
        assert Journal(journal.path).keys() == ["a"]


def test_a_workdir_of_another_version_is_named_with_its_keys_and_how_to_go_on(tmp_path):
    cfg = get_config()
    remember_config(cfg, tmp_path)
    path = tmp_path / "config.json"
    older = json.loads(path.read_text())
    del older["rl"]["gamma"], older["rl"]["keep_best"]
    older["rl"]["entropy_bonus"] = 0.5
    path.write_text(json.dumps(older))
    with pytest.raises(ConfigError, match=r"another version .* it lacks rl\.gamma \(here 1\.0\); it has rl\.entropy_bonus \(then 0\.5\)") as error:
        remember_config(cfg, tmp_path)
    assert f"then delete {path}" in str(error.value) and json.loads(path.read_text()) == older, "nothing was changed"
    older["rl"]["lr"] = 1.0
    path.write_text(json.dumps(older))
    with pytest.raises(ConfigError, match=r"rl\.lr: 1\.0 -> 0\.\d+\)\. Use that config"):
        remember_config(cfg, tmp_path)
    path.unlink()
    remember_config(cfg, tmp_path)
    assert "gamma" in json.loads(path.read_text())["rl"]


def test_what_says_how_often_and_where_may_change(tmp_path):
    cfg = get_config()
    remember_config(cfg, tmp_path)
    for key, value in {
        "rl.keep_checkpoints": 5, "rl.keep_best": "", "rl.checkpoint_every": 3, "rl.max_grad_norm_spike": 10.0, "learner.mesh.fsdp": 4,
        "learner.streams": 1,
    }.items():  # fmt: skip
        cfg.update_from_flattened_dict({key: value})
        remember_config(cfg, tmp_path)


if __name__ == "__main__":
    measure(sys.argv[1])
