"""Kills a small run with SIGKILL at random instants, starts it again each time, and compares what it comes to with an undisturbed run.

    python scripts/bench/kill_resume.py --kills=25 --seed=1 --out=scripts/bench/results/kill_resume.json

The run (tests/dk_jax/killed_run.py) is the real one but for the sandbox and the messages of two agents: verdicts are a function of the
candidate. Half of the instants are random moments of the RL phase, half random moments after the run has come to a place drawn from all:
sampling, judging, the update, the library's commit, the scalars, and the parts of writing a checkpoint. Each workdir is killed up to
five times. Compared are parameters and optimiser state, record, library, scalars, TensorBoard's events and rollouts, bit for bit, and that
nothing whose verdict had arrived was judged again.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import random
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from absl import app, flags  # noqa: E402

_KILLS = flags.DEFINE_integer("kills", 25, "How many times a process is killed.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the instants.")
_OUT = flags.DEFINE_string("out", "", "File for the result; by default it is only printed.")
KILLS_A_RUN = 5


def main(argv):
    cache = tempfile.mkdtemp(prefix="kill_resume-cache-")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    with tempfile.TemporaryDirectory(prefix="kill_resume-") as folder:
        result = measure(Path(folder), random.Random(_SEED.value))
    shutil.rmtree(cache)
    text = json.dumps(result, indent=1)
    if _OUT.value:
        Path(_OUT.value).write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0 if result["all_equal"] and not result["judged_again"] else 1


def measure(folder: Path, rng: random.Random) -> dict:
    from dk_jax.metrics import read_scalars
    from tests.dk_jax.killed_run import PLACES, judged, judged_again, outcome, spawn, without_rl

    whole = folder / "whole"
    assert spawn(whole) == 0, (whole / "output").read_text()[-3000:]
    again = without_rl(whole, folder / "again")  # with everything compiled: how long RL takes
    assert spawn(again) == 0
    longest_s = sum(line["step_s"] for line in read_scalars(again / "metrics.jsonl", "rl"))
    wanted, wanted_judged = outcome(whole), judged(whole)
    assert outcome(again) == wanted
    runs, kills = [], 0
    places = [(place, rng.randint(1, 3)) for _ in range(_KILLS.value) for place in rng.sample(PLACES, len(PLACES))]
    while kills < _KILLS.value:
        workdir, killed, status = without_rl(whole, folder / f"run{len(runs)}"), [], -9
        while len(killed) < KILLS_A_RUN and kills < _KILLS.value:
            how = ("rl", 1, rng.uniform(0.0, 0.8 * longest_s)) if kills % 2 else (*places.pop(), rng.uniform(0.0, 0.03))
            if (status := spawn(workdir, how)) != -9:  # it came to its end before
                if how[0] != "rl":
                    places.append((how[0], 1))
                break
            last = (workdir / "marks").read_text().splitlines()[-2].split()[0]
            killed.append({"armed_at": how[0], "count": how[1], "delay_s": round(how[2], 4), "after": last})
            kills += 1
        status = spawn(workdir) if status == -9 else status
        found = outcome(workdir) if status == 0 else {}
        extra = judged_again(workdir, wanted_judged) if status == 0 else {}
        run = {"status": status, "kills": killed, "equal": {k: found.get(k) == wanted[k] for k in wanted}, "judged_again": sum(extra.values())}
        run["in_flight"] = sum((judged(workdir) - wanted_judged).values())
        runs.append(run)
        print(json.dumps(run), file=sys.stderr, flush=True)
        shutil.rmtree(workdir)
    return {
        "command": " ".join(["python", "scripts/bench/kill_resume.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "orbax-checkpoint", "optax")},
        "python": platform.python_version(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "kills": kills,
        "killed_after": {place: sum(k["after"] == place for r in runs for k in r["kills"]) for place in ("rl", *PLACES)},
        "candidates_judged": sum(wanted_judged.values()),
        "judged_again": sum(r["judged_again"] for r in runs),
        "all_equal": all(all(r["equal"].values()) for r in runs),
        "undisturbed": wanted["result"],
        "runs": runs,
    }


if __name__ == "__main__":
    app.run(main)
