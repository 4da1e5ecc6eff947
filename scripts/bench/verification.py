"""How often the rules of dk_jax.skills.verification let useless and useful skills into the library, and what a decision costs, by simulation.

    python scripts/bench/verification.py --out scripts/bench/results/verification.json [--records runs/demo_seed0 ...]

The draws are those of scripts/bench/simulated_skills.py. All rules see the same: the published one (daVinci-kernel, arXiv 2606.16497: one
greedy turn with the skill, 1.2 times eager and 1.2 times the trigger's first turn), once with that turn drawn like any other and once with
a turn that is the policy's mode; the paired test as configs/demo.py sets it; and the paired test at an error rate of 0.05 with up to 64
pairs, of differences and of ranks. A pair costs two rollouts, the published rule one; a candidate that is judged is one rollout.

In the result: `rows`, noise by kind of skill by rule; `search`, other settings of the paired test; `tasks`, skills that gain nothing on
average but something on the two tasks they are tried on; `curve`, by true effect. Intervals are 95 %, exact binomial (Clopper and
Pearson). `measured`: what records say of the noise that is assumed. --records: workdirs of finished runs, whose first turns on the
held-out tasks are compared with the draws. The chart beside the JSON needs matplotlib, which nothing else here does.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import betaincinv, stdtrit

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from dk_jax.skills.verification import PaperRule, SequentialTest  # noqa: E402
from scripts.bench.serving import provenance  # noqa: E402
from scripts.bench.simulated_skills import Draws, Noise, SkillKind, decide_many, draw, paper_accepts  # noqa: E402

# 0.8 with 0.4 is what the demo's policy does (`measured`), the others are assumed.
NOISES = [Noise(sample=s, failures=f) for s in (0.1, 0.2, 0.3, 0.6) for f in (0.0, 0.2, 0.4)] + [Noise(sample=0.8, failures=0.4)]
SHOWN = Noise(sample=0.3, failures=0.2)
"""The noise of the chart."""
USELESS, BETTER = SkillKind(name="useless", ratio=1.0, task=0.0), SkillKind(name="+20 %", ratio=1.2)
KINDS = [
    USELESS,
    SkillKind(name="useless on average", ratio=1.0),
    SkillKind(name="-5 %", ratio=0.95),
    SkillKind(name="-20 %", ratio=0.8),
    BETTER,
    SkillKind(name="+50 %", ratio=1.5),
]
LOOKS = (16, 32, 48, 64)
STATISTICS: dict[str, dict[str, Any]] = {"differences": {"mixed_ratio": 1.1}, "ranks": {"statistic": "ranks"}}
"""Each with what it does best with (`search`)."""
PAIRED = {"default": SequentialTest(), **{k: SequentialTest(alpha=0.05, looks=LOOKS, **v) for k, v in STATISTICS.items()}}
BUDGETS = ((8,), (8, 16), (16, 32), LOOKS)
SETTINGS = [
    *({**statistic, "looks": looks} for statistic in STATISTICS.values() for looks in BUDGETS),
    *({**statistic, **other} for statistic in STATISTICS.values() for other in ({"looks": (8, 16, 32, 64)}, {"fail_speedup": 0.5})),
    *({**statistic, "min_ratio": 1.05} for statistic in STATISTICS.values()),
    *({"mixed_ratio": 1.1, **other} for other in ({"spend_power": 2.0}, {"futility": 1.0})),
    {"mixed_ratio": 1.0},
    {"mixed_ratio": 1.4},
]
EFFECTS = (0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.6)


def binomial(count: int, n: int) -> dict[str, Any]:
    """A share and its exact 95 % interval."""
    low = float(betaincinv(count, n - count + 1, 0.025)) if count else 0.0
    high = float(betaincinv(count + 1, n - count, 0.975)) if count < n else 1.0
    return {"accepted": round(count / n, 4), "low": round(low, 4), "high": round(high, 4), "n": n}


def outcome(accepted: np.ndarray, rollouts: np.ndarray) -> dict[str, Any]:
    """Share accepted, and the rollouts until the decision: median, 90 % quantile and mean."""
    return {
        **binomial(int(accepted.sum()), len(accepted)),
        "rollouts_median": float(np.median(rollouts)),
        "rollouts_90": float(np.quantile(rollouts, 0.9)),
        "rollouts_mean": round(float(np.mean(rollouts)), 1),
    }


def paired(test: SequentialTest, draws: Draws) -> dict[str, Any]:
    """What the paired test makes of the draws."""
    accepted, pairs = decide_many(test, draws.control, draws.treated, draws.task)
    return outcome(accepted, 2 * pairs)


def by_rule(draws: Draws) -> dict[str, dict[str, Any]]:
    """What each rule makes of the same draws."""
    one = np.ones(len(draws.first))
    return {
        "paper": outcome(paper_accepts(PaperRule(), draws.first, draws.greedy), one),
        "paper, turn at the mode": outcome(paper_accepts(PaperRule(), draws.first, draws.greedy_mode), one),
        **{name: paired(test, draws) for name, test in PAIRED.items()},
    }


def level(noise: Noise) -> dict[str, float]:
    return {"s": noise.sample, "f": noise.failures}


def main_rows(n: int, seed: int) -> list[dict[str, Any]]:
    """Noise by kind of skill by rule; twice as many draws where the skill is useless."""
    out = []
    for i, noise in enumerate(NOISES):
        for j, kind in enumerate(KINDS):
            draws = draw(noise, kind, n * (2 if kind is USELESS else 1), LOOKS[-1], np.random.default_rng([seed, 0, i, j]))
            out += [{**level(noise), "skill": kind.name, "rule": rule, **row} for rule, row in by_rule(draws).items()]
    return out


def search(n: int, seed: int) -> list[dict[str, Any]]:
    """Settings of the paired test, at an error rate of 0.05: what they find of skills that gain 20 %, and accept of useless ones."""
    out = []
    for i, noise in enumerate(NOISES):
        draws = [draw(noise, kind, n, LOOKS[-1], np.random.default_rng([seed, 1, i, j])) for j, kind in enumerate((USELESS, BETTER))]
        for setting in SETTINGS:
            useless, better = (paired(SequentialTest(**{"alpha": 0.05, "looks": LOOKS, **setting}), d) for d in draws)
            out.append({**level(noise), "setting": setting, "useless": useless, "+20 %": better})
    return out


def affordable(rows: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By noise and statistic: of skills that gain 20 %, the share that each budget of rollouts finds, and the least that finds 80 %.

    At the largest budget the draws of `rows` and of `search` are taken together.
    """
    out = []
    for noise in NOISES:
        mine, shares = level(noise).items(), {}
        for name, statistic in STATISTICS.items():
            for looks in BUDGETS:
                cells = [r["+20 %"] for r in found if mine <= r.items() and r["setting"] == {**statistic, "looks": looks}]
                if looks == LOOKS:
                    cells += [r for r in rows if mine <= r.items() and r["rule"] == name and r["skill"] == BETTER.name]
                shares[name, 2 * looks[-1]] = binomial(sum(round(c["accepted"] * c["n"]) for c in cells), sum(c["n"] for c in cells))
        for name in STATISTICS:
            own = {budget: share for (other, budget), share in shares.items() if other == name}
            least = next((budget for budget, share in own.items() if share["accepted"] >= 0.8), None)
            out.append({**level(noise), "statistic": name, "least_budget": least, "by_budget": own})
    return out


def over_tasks(n: int, seed: int) -> list[dict[str, Any]]:
    """Skills that gain nothing on average over tasks, by how much their effect differs, where little else is noisy."""
    noise, out = Noise(sample=0.1, failures=0.0), []
    for i, task in enumerate((0.0, 0.05, 0.1, 0.2)):
        draws = draw(noise, SkillKind(name="useless on average", ratio=1.0, task=task), n, LOOKS[-1], np.random.default_rng([seed, 2, i]))
        for min_ratio in (1.0, 1.05, 1.1):
            row = paired(dataclasses.replace(PAIRED["ranks"], min_ratio=min_ratio), draws)
            out.append({**level(noise), "task": task, "min_ratio": min_ratio, **row})
    return out


def curve(n: int, seed: int) -> list[dict[str, Any]]:
    """Share accepted by true effect, and where each decision fell, under the chart's noise."""
    out = []
    for i, ratio in enumerate(EFFECTS):
        kind = SkillKind(name=f"{ratio:g}x", ratio=ratio, task=0.0 if ratio == 1.0 else 0.05)
        draws = draw(SHOWN, kind, n, LOOKS[-1], np.random.default_rng([seed, 3, i]))
        accepted, pairs = decide_many(PAIRED["ranks"], draws.control, draws.treated, draws.task)
        at = {str(2 * k): [int((accepted & (pairs == k)).sum()), int((~accepted & (pairs == k)).sum())] for k in LOOKS}
        out.append({"ratio": ratio, "task": kind.task, "rules": by_rule(draws), "ranks_accepted_rejected_at": at})
    return out


def measured(records: list[Path], seed: int) -> dict[str, Any]:
    """What records say of the noise: verifications and timings among the results, and first turns of the runs that are given."""
    out: dict[str, Any] = {"verifications": [], "timings": [], "first_turns": None}
    results = ROOT / "scripts/bench/results"
    for line in (results / "smollm2_triton/library.jsonl").read_text().splitlines():
        skill = json.loads(line)
        for e in skill["evidence"]:
            half = (math.log(e["high"]) - math.log(e["low"])) / 2
            deviation = half * math.sqrt(e["n"]) / float(stdtrit(e["n"] - 1, 0.975))
            row = {"skill": skill["name"], "pairs": e["n"], "effect": round(e["effect"], 3), "arm_sd": round(deviation / math.sqrt(2), 3)}
            out["verifications"].append({"run": "smollm2_triton", **row})
    for kernel in json.loads((results / "context_noise.json").read_text())["kernels"]:
        for load in ("idle", "churning"):
            logs = [math.log(run["speedup"]) for run in kernel[load]["runs"]]
            out["timings"].append({"kernel": kernel["kernel"], "host": load, "runs": len(logs), "sd": round(float(np.std(logs, ddof=1)), 4)})
    if records:
        out["first_turns"] = first_turns(records, seed)
    return out


def first_turns(records: list[Path], seed: int) -> dict[str, Any]:
    """Spread of the first turns of evaluations within a task, beside that of the draws.

    Raises:
        SystemExit: a workdir holds no evaluated run.
    """
    out: dict[str, Any] = {"runs": [path.name for path in records]}
    quantiles = (0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 0.95, 0.98)
    for phase in ("eval_sft", "eval_rl"):
        groups, asked = [], 0
        for path in records:
            file = path / "rollouts" / f"{phase}.jsonl"
            if not file.is_file():
                raise SystemExit(f"{file} is not there: --records takes workdirs of finished runs that kept their rollouts")
            tasks = defaultdict(list)
            for line in file.read_text().splitlines():
                row = json.loads(line)
                verdict, asked = row["turns"][0]["verdict"], asked + 1
                if verdict["outcome"] == "ok" and verdict["speedup"] > 0:
                    tasks[row["task"]].append(math.log(verdict["speedup"]))
            groups += [np.array(x) for x in tasks.values()]
        several = [x for x in groups if len(x) > 1]
        sd = math.sqrt(sum(((x - x.mean()) ** 2).sum() for x in several) / sum(len(x) - 1 for x in several))
        from_median = np.concatenate([x - np.median(x) for x in groups if len(x) > 3]) / sd
        model = Noise(sample=1.0, failures=0.0).samples(np.random.default_rng([seed, 4]), (4000, 5))
        out[phase] = {
            "turns": asked,
            "failed": round(1 - sum(map(len, groups)) / asked, 3),
            "sample_sd": round(sd, 3),
            "median_task_sd": round(float(np.median([x.std(ddof=1) for x in several])), 3),
            "base_mean": round(float(np.mean([x.mean() for x in groups])), 3),
            "base_sd": round(float(np.std([x.mean() for x in groups])), 3),
            "quantiles": quantiles,
            "from_median_in_sd": np.quantile(from_median, quantiles).round(2).tolist(),
            "drawn": np.quantile(model - np.median(model, axis=1, keepdims=True), quantiles).round(2).tolist(),
        }
    return out


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text: per cent accepted, median and 90 % of rollouts."""
    rules = list(dict.fromkeys(r["rule"] for r in rows))
    lines = [f"{'s':>4}{'f':>5}  {'skill':20}" + "".join(f"{rule:>26}" for rule in rules)]
    for noise, kind in dict.fromkeys(((r["s"], r["f"]), r["skill"]) for r in rows):
        own = {r["rule"]: r for r in rows if (r["s"], r["f"]) == noise and r["skill"] == kind}
        cells = [f"{100 * r['accepted']:.1f} % {r['rollouts_median']:.0f}, {r['rollouts_90']:.0f}" for r in (own[rule] for rule in rules)]
        lines.append(f"{noise[0]:4g}{noise[1]:5g}  {kind:20}" + "".join(f"{cell:>26}" for cell in cells))
    return "\n".join(lines)


def lines_of(result: dict[str, Any]) -> str:
    """The result as JSON with a line a row."""

    def block(value: Any) -> str:
        rows = isinstance(value, list) and value and isinstance(value[0], dict)
        return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]" if rows else json.dumps(value)

    return "{\n" + ",\n".join(f" {json.dumps(key)}: {block(value)}" for key, value in result.items()) + "\n}\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON; the chart is written beside it")
    parser.add_argument("--verifications", type=int, default=1000, help="simulated for each noise and kind of skill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", type=Path, nargs="*", default=[])
    options = parser.parse_args(arguments)
    begun, n, seed = time.monotonic(), options.verifications, options.seed
    facts = {"what": __doc__.split("\n\n")[0], **provenance(("numpy", "scipy")), "seed": seed, "measured": measured(options.records, seed)}
    rows = main_rows(n, seed)
    print(table(rows), flush=True)
    found = search(max(n // 2, 1), seed)
    result = {
        **facts,
        "noise": {k: v for k, v in dataclasses.asdict(SHOWN).items() if k not in ("sample", "failures")},
        "kinds": [dataclasses.asdict(kind) for kind in KINDS],
        "rules": {"paper": dataclasses.asdict(PaperRule()), **{name: dataclasses.asdict(test) for name, test in PAIRED.items()}},
        "pooled_useless": pooled(rows),
        "affordable": affordable(rows, found),
        "rows": rows,
        "search": found,
        "tasks": over_tasks(n, seed),
        "curve": {**level(SHOWN), "points": curve(n, seed)},
        "seconds": None,
    }
    result["seconds"] = round(time.monotonic() - begun, 1)
    options.out.write_text(lines_of(result))
    for row in result["affordable"]:
        shares = ", ".join(f"{100 * share['accepted']:.1f} % in {budget}" for budget, share in row["by_budget"].items())
        print(f"{row['s']:4g}{row['f']:5g}  {row['statistic']:12} +20 %: {shares}; 80 % in {row['least_budget']}")
    if importlib.util.find_spec("matplotlib") is None:
        print("no chart: matplotlib is not installed", file=sys.stderr)
        return
    from scripts.bench.verification_chart import chart

    chart(result, options.out.with_suffix(".png"))


def pooled(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Share of useless skills accepted over all levels of noise, by rule."""
    out = {}
    for rule in dict.fromkeys(r["rule"] for r in rows):
        own = [r for r in rows if r["rule"] == rule and r["skill"] == USELESS.name]
        out[rule] = binomial(sum(round(r["accepted"] * r["n"]) for r in own), sum(r["n"] for r in own))
        out[rule]["highest"] = max(r["accepted"] for r in own)
    return out


if __name__ == "__main__":
    main()
