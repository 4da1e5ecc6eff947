"""The page of an ablation, Markdown with tables and plots. Every sentence follows from numbers; what is not there yet is said to be missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dk_jax.evaluation.results import save_json
from dk_jax.reproduce import plots, published
from dk_jax.reproduce.collected import HIGHEST, PARTS
from dk_jax.reproduce.plots import title_of
from dk_jax.reproduce.scores import METRICS, RISES, SHARE_OF_EXPERT, sign

JSON, PAGE = "ablation.json", "ablation.md"
WANTED = {"Fast_1": 0.10, "Fast_1.5": 0.05}
"""Rises of the full arm over its cold start that are asked for."""
LEAST_SEEDS = 3
_SHOWN = 6


def write(folder: Path, data: Mapping[str, Any]) -> list[Path]:
    """Writes ablation.json, ablation.md and the plots; returns their paths."""
    names = plots.write(folder, data)
    save_json(folder / JSON, data)
    partial = folder / f"{PAGE}.part"
    partial.write_text(page(data, names), encoding="utf-8")
    partial.replace(folder / PAGE)
    return [folder / name for name in (JSON, PAGE, *names)]


def page(data: Mapping[str, Any], images: Sequence[str]) -> str:
    """The whole text. `images`: names of the plots beside it."""
    sections = [
        [f"# Ablation {data['preset']}", ""], _state(data), _scores(data, images), _rises(data), _order(data), _budget(data), _paper(data),
        _curves(images), _skills(data, images), _kernels(data), _integrity(data),
    ]  # fmt: skip
    return "\n".join(line for section in sections for line in section).rstrip() + "\n"


def _state(data: Mapping[str, Any]) -> list[str]:
    lines = [f"Written {data['written']}; {data['pieces']} pieces."]
    if data["partial"]:
        more = f" and {len(data['open']) - _SHOWN} more" if len(data["open"]) > _SHOWN else ""
        jobs = f"{', '.join(data['open'][:_SHOWN])}{more}"
        lines += ["", f"**Partial**: {_count(len(data['open']), 'job')} not done: {jobs}. What follows is of those that are."]
    if len(data["cards"]) > 1:
        said = "; ".join(f"{card}: {', '.join(jobs)}" for card, jobs in data["cards"].items())
        lines += ["", f"**Pieces from different cards**, whose speedups are not comparable: {said}."]
    elif data["cards"]:
        lines += ["", f"All pieces on {next(iter(data['cards']))}."]
    for problem in data["unequal"]:
        lines += ["", f"**Not equal**: {problem}."]
    return [*lines, ""]


def _scores(data: Mapping[str, Any], images: Sequence[str]) -> list[str]:
    lines = []
    for part, title in PARTS.items():
        rows = data["scores"][part]
        lines += [f"## {title[0].upper()}{title[1:]}", ""]
        if not rows:
            none = data["tasks"][part] == 0
            lines += [f"There are no {title} in this task set." if none else "Nothing has been evaluated yet.", ""]
            continue
        names = [*METRICS, SHARE_OF_EXPERT]
        lines += ["| | seeds | " + " | ".join(_head(name) for name in names) + " |", "|---" * (len(names) + 2) + "|"]
        for arm, row in rows.items():
            cells = " | ".join(_cell(name, row["metrics"].get(name)) for name in names)
            lines.append(f"| {title_of(data, arm)} | {len(row['seeds'])} | {cells} |")
        some = next(iter(rows.values()))
        lines += [
            "",
            f"{_count(some['tasks'], 'task')}; % but for the mean speedup. Last turn, over eager; in brackets the bootstrap interval of 95 % over "
            "tasks, samples and clock, after ± that of Student's t over seeds, where there are several.",
        ]
        expert = data["expert"]
        if expert["right"]:
            lines.append(
                f"Of all held-out tasks the expert has a right kernel for {expert['right']} of {expert['tasks']}, {expert['geomean']:.2f} x in the "
                "geometric mean; the share of its speedup is over these."
            )
        lines += ["", *([f"![Fast_p]({image})", ""] if (image := f"scores_{part}.svg") in images else [])]
    return lines


def _head(name: str) -> str:
    return name.replace("Fast_", "Fast<sub>") + "</sub>" if name.startswith("Fast_") else name


def _cell(name: str, cell: Mapping[str, Any] | None) -> str:
    if cell is None or cell["value"] is None:
        return "–"
    scale, digits = (1.0, 2) if name == "mean speedup" else (100.0, 1)

    def say(value: float) -> str:
        return f"{scale * value:.{digits}f}"

    interval = f" [{say(cell['low'])}, {say(cell['high'])}]" if cell["low"] is not None else ""
    seeds = f" ± {say(cell['half'])}" if cell["half"] is not None else ""
    return f"{say(cell['value'])}{interval}{seeds}"


def _points(cell: Mapping[str, Any]) -> str:
    """A difference of shares in points."""
    interval = f" [{100 * cell['low']:+.1f}, {100 * cell['high']:+.1f}]" if cell["low"] is not None else ""
    seeds = f" ± {100 * cell['half']:.1f}" if cell["half"] is not None else ""
    return f"{100 * cell['value']:+.1f}{interval}{seeds}"


def _rises(data: Mapping[str, Any]) -> list[str]:
    lines = ["## Rise over the cold start", ""]
    for part, title in PARTS.items():
        rows = {arm: row for arm, row in data["scores"][part].items() if row["rises"]}
        if not rows:
            continue
        lines += [f"| {title}, points | " + " | ".join(_head(name) for name in RISES) + " |", "|---" * (len(RISES) + 1) + "|"]
        lines += [f"| {title_of(data, arm)} | " + " | ".join(_points(row["rises"][name]) for name in RISES) + " |" for arm, row in rows.items()]
        lines.append("")
        if (full := rows.get("full")) is not None:
            for name, wanted in WANTED.items():
                rise = full["rises"][name]
                met = "meets" if rise["value"] >= wanted and sign(rise) > 0 else "does not meet"
                said = met if len(rise["seeds"]) >= LEAST_SEEDS else f"has too few seeds, of {LEAST_SEEDS}, to tell whether it meets"
                lines.append(
                    f"- {title}: full training {said} the rise of {100 * wanted:.0f} points {name} outside of the intervals: {_points(rise)} over "
                    f"{_count(len(rise['seeds']), 'seed')}."
                )
            lines.append("")
    return lines if len(lines) > 2 else [*lines, "Nothing to compare yet.", ""]


def _order(data: Mapping[str, Any]) -> list[str]:
    lines = [f"## Order at the highest threshold, {HIGHEST}", ""]
    for part, title in PARTS.items():
        for arm, found in data["orders"][part].items():
            word = {1: "above", -1: "below", 0: "not told apart from"}[found["sign"]]
            lines.append(
                f"- {title}: full is {word} {title_of(data, arm)}: {_points(found)} points over {_count(len(found['seeds']), 'seed')} and "
                f"{_count(found['tasks'], 'task')}."
            )
    return [*(lines if len(lines) > 2 else [*lines, "Not evaluated yet."]), ""]


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _budget(data: Mapping[str, Any]) -> list[str]:
    budget, own = data["budget"], data["ledger"]
    lines = [
        "## Budget", "",
        f"Each arm and seed trains to the end of the first RL step at which {budget['candidates']:,} candidates are judged, of rollouts and "
        f"verifications alike, or {budget['tokens']:,} tokens sampled. Rollouts a step are as many in all arms, so an arm that verifies less makes "
        "more steps, from the same sequence of tasks. Nothing is trained for no injection at inference.", "",
    ]  # fmt: skip
    spent = {name: line for name, line in own.items() if line["steps"]}
    if not spent:
        return [*lines, "Nothing has been spent yet.", ""]
    lines += ["| arm, seed | RL steps | candidates judged | of which verification | tokens sampled |", "|---|---|---|---|---|"]
    lines += [
        f"| {title_of(data, name.rpartition(' ')[0])}, {name.rpartition(' ')[2]} | {line['steps']} | {line['candidates']:,} | "
        f"{100 * line['verification_share']:.1f} % | {line['all_tokens']:,} |"
        for name, line in spent.items()
    ]
    tokens = [line["all_tokens"] for line in spent.values()]
    lines += ["", f"Most tokens over least: {max(tokens) / max(min(tokens), 1):.2f}."]
    if not data["unequal"]:
        lines.append("Of the arms that have ended, each stopped at that step, and the steps that they share have the same tasks.")
    return [*lines, ""]


def _paper(data: Mapping[str, Any]) -> list[str]:
    lines = [
        "## Beside the paper", "", "daVinci-kernel, 8B, KernelBench, last turn over eager, %, as published (other model, tasks, card and judge):", "",
        "| | " + " | ".join(published.COLUMNS) + " |", "|---" * (len(published.COLUMNS) + 1) + "|",
    ]  # fmt: skip
    for arm, figures in published.FIGURES.items():
        lines.append(f"| {arm.replace('_', ' ')} | " + " | ".join(f"{figures[c]:.1f}" if c in figures else "–" for c in published.COLUMNS) + " |")
    lines += ["", "Full less the other arm, in points; ours by the same threshold, over all held-out tasks, whichever the level:", ""]
    rows = [(arm, figure, own) for arm, figures in data["published"].items() for figure, own in figures.items()]
    if not rows:
        return [*lines, "Not evaluated yet.", ""]
    lines += ["| full less | paper | ours | |", "|---|---|---|---|"]
    lines += [f"| {title_of(data, arm)}, {figure} | {own['paper']:+.1f} | {_points(own['ours'])} | {own['said']} |" for arm, figure, own in rows]
    counts = {said: sum(own["said"] == said for _, _, own in rows) for said in ("agrees", "disagrees", "not told apart here")}
    lines += ["", f"Of {len(rows)} differences in direction {counts['agrees']} agree, {counts['disagrees']} disagree, and "
              f"{counts['not told apart here']} are not told apart here."]  # fmt: skip
    return [*lines, ""]


def _curves(images: Sequence[str]) -> list[str]:
    own = [name for name in images if name.startswith(("reward_", "fast_1_5_"))]
    if not own:
        return []
    return ["## Curves", "", "Training tasks, means over seeds.", "", *(f"![{name.removesuffix('.svg')}]({name})" for name in own), ""]


def _skills(data: Mapping[str, Any], images: Sequence[str]) -> list[str]:
    lines = ["## Skills", ""]
    if not data["skills"]:
        return [*lines, "No library holds a skill yet.", ""]
    lines += ["| arm, seed | proposed | verified | acceptance | active | used of the verified |", "|---|---|---|---|---|---|"]
    for arm, told in data["skills"].items():
        for seed, c in told["by_seed"].items():
            rate = f"{100 * c['acceptance']:.0f} %" if c["acceptance"] is not None else "–"
            lines.append(f"| {title_of(data, arm)}, {seed} | {c['proposed']} | {c['verified']} | {rate} | {c['active']} | {c['used']} |")
    lines.append("")
    for arm, told in data["skills"].items():
        if effect := told["effect"]:
            interval = f" [{effect['low']:.3f}, {effect['high']:.3f}]" if effect["low"] is not None else ""
            unclear = effect["low"] is None or effect["low"] <= 1 <= effect["high"]
            word = "not told apart from none" if unclear else "positive" if effect["low"] > 1 else "negative"
            lines.append(
                f"- {title_of(data, arm)}: chosen skills against the null scheme of the same task and step: {effect['ratio']:.3f} x{interval} over "
                f"{_count(effect['comparisons'], 'comparison')}: {word}."
            )
    lines += ["", *(["![library](library.svg)", ""] if "library.svg" in images else [])]
    for arm, told in data["skills"].items():
        if "early" in told:
            lines += [f"Early and late skills of {title_of(data, arm)} (first and last third of the verified):", ""]
            lines += ["| | early | late |", "|---|---|---|"]
            lines += [f"| {name} | {told['early'][name]:.4g} | {told['late'][name]:.4g} |" for name in told["early"]]
            lines.append("")
    for when, examples in data["skills"].get("full", {}).get("examples", {}).items():
        for skill in examples:
            lines += [
                f"**{skill['name']}** ({when}; step {skill['step']}, from {skill['task']}; verified {skill['verified effect']:.2f} x, selected "
                f"{skill['selected']} times): {skill['description']}",
                "",
                *(f"    {line}" for line in skill["content"].splitlines()),
                "",
            ]
    return lines


def _kernels(data: Mapping[str, Any]) -> list[str]:
    lines = ["## The full arm's fastest kernels", ""] if data["kernels"] else []
    for kernel in data["kernels"]:
        skills = f"with {', '.join(kernel['skills'])}" if kernel["skills"] else "without skills"
        lines += [f"{kernel['task']} ({PARTS[kernel['part']]}), {kernel['speedup']:.2f} x, {skills}:", ""]
        lines += [*(f"    {line}" for line in kernel["source"].splitlines()), ""]
    return lines


def _integrity(data: Mapping[str, Any]) -> list[str]:
    lines = ["## Integrity", ""]
    if not data["integrity"]:
        return [*lines, "No steps yet.", ""]
    lines += ["| arm | turns with a violation | in the last quarter of the steps | rules |", "|---|---|---|---|"]
    for arm, told in data["integrity"].items():
        rules = ", ".join(f"{rule} {count}" for rule, count in told["rules"].items()) or "none fired"
        lines.append(f"| {title_of(data, arm)} | {100 * told['all']:.2f} % | {100 * told['end']:.2f} % | {rules} |")
    if (full := data["integrity"].get("full")) is not None:
        lines += ["", f"At the end {'under' if full['end'] < 0.01 else 'not under'} 1 % of the full arm's turns violate a rule."]
    return [*lines, ""]
