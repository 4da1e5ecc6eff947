"""The report's section on rollouts: some that are worth a look, and a chooser for any of those that the page carries.

Each rollout is a compressed piece of the page that a small script unpacks when it is chosen: a page of thousands stays as small as a
picture, and opens at once. Nothing is fetched. Without script, or in a browser that can't unpack, the examples are there and it is said how to
see the others.
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Literal

from dk_jax.evaluation.markup import missing, visible
from dk_jax.evaluation.report_rollout import MAX_PROMPT_CHARS, rollout_html
from dk_jax.evaluation.rollout_sources import Source
from dk_jax.rollout.trajectory import Trajectory

MAX_BYTES = 30_000_000
Amount = Literal["all", "best"] | int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
    """What a page carries of rollouts: the section's markup, and how many are in it and left out."""

    html: str
    there: int
    left_out: int


def rollouts_section(sources: Sequence[Source], *, amount: Amount = "all", max_bytes: int = MAX_BYTES) -> Packed:
    """The chooser and the rollouts that fit: of each task and source the best first, then the others, until `max_bytes` are full.

    Args:
        amount: "all"; "best" of each task and source; or so many.
    """
    pieces, rows, size, there, total = _Pieces(), [], 0, 0, 0
    most = amount if isinstance(amount, int) else None
    open_ = True
    for place, rank, source, t in _ordered(sources):
        total += 1
        open_ = open_ and (most is None or there < most)
        if not open_ or (amount == "best" and rank > 0):
            continue
        html = rollout_html(t, source.prompts(t), level=source.levels.get(t.task), prompt_html=pieces.prompt)
        at = pieces.add(html)
        size = pieces.size
        if size > max_bytes:
            pieces.drop_last()
            open_ = False
            continue
        there += 1
        rows.append([at, place, t.task, _label(t), _outcome(t), round(_worth(t)[1], 3)])
    if not total:
        return Packed(html=missing("No rollouts have been kept yet."), there=0, left_out=0)
    left = total - there
    told = f"{there:,} rollouts are in this page" + (f"; {left:,} more are left out: {_how(amount, max_bytes)}" if left else "") + "."
    index = json.dumps({"sources": [s.name for s in sources], "rows": rows}).replace("<", "\\u003c")
    html = (
        f'<p class="fine">{told}</p><noscript><p class="note">Choosing one needs JavaScript, which is off here. The examples above do not; '
        "scripts/trajectories.py shows a run's rollouts in a terminal.</p></noscript>"
        f'{_CHOOSER}<div id="rollout" aria-live="polite"></div>'
        f'<script type="application/json" id="rollout-index">{index}</script>{pieces.html()}'
    )
    return Packed(html=html, there=there, left_out=left)


def _how(amount: Amount, max_bytes: int) -> str:
    if amount != "all":
        return f"--rollouts={amount} was asked for, --rollouts=all takes all that fit"
    return f"the page is full at {max_bytes / 1e6:.0f} MB (--max_mb), or ask for fewer evaluations at once"


def _ordered(sources: Sequence[Source]) -> Iterator[tuple[int, int, Source, Trajectory]]:
    """All rollouts: the best one of every task, source by source; then the second best ones, and so on. (place of the source, rank, ...)."""
    ranked: dict[int, list[tuple[int, Source, Trajectory]]] = {}
    for place, source in enumerate(sources):
        groups: dict[tuple[str, str], list[Trajectory]] = {}
        for t in source.load():
            groups.setdefault((t.agent, t.task), []).append(t)
        for own in groups.values():
            for rank, t in enumerate(sorted(own, key=_worth, reverse=True)):
                ranked.setdefault(rank, []).append((place, source, t))
    for rank in sorted(ranked):
        yield from ((place, rank, source, t) for place, source, t in ranked[rank])


def _worth(t: Trajectory) -> tuple[bool, float, float]:
    best = t.best
    return best is not None, best.verdict.earned_speedup if best else 0.0, max(t.rewards, default=0.0)


def _outcome(t: Trajectory) -> str:
    """Of its best turn."""
    if t.best is not None:
        return "ok"
    verdicts = t.verdicts
    return verdicts[-1].outcome if verdicts else ("not usable" if any(turn.error for turn in t.turns) else "call")


def _label(t: Trajectory) -> str:
    agent = "" if t.agent == "policy" else f"{t.agent}, "
    scheme = f"scheme {t.scheme}, " if t.scheme > 0 else ""
    return f"{agent}{scheme}sample {t.member}, {len(t.turns)} {'turn' if len(t.turns) == 1 else 'turns'}"


class _Pieces:
    """Compressed pieces of markup, each an element of the page; equal prompts are kept once."""

    def __init__(self):
        self.size = 0
        self._packed: list[str] = []
        self._prompts: dict[str, int] = {}
        self._marks = (0, 0)

    def add(self, html: str) -> int:
        """Its number."""
        packed = base64.b64encode(gzip.compress(html.encode("utf-8"), compresslevel=6, mtime=0)).decode("ascii")
        self._packed.append(packed)
        self.size += len(packed) + 60
        return len(self._packed) - 1

    def prompt(self, text: str) -> str:
        """The element that is filled with a prompt when it is opened."""
        key = hashlib.sha256(text.encode("utf-8", errors="replace")).hexdigest()
        if key not in self._prompts:
            self._prompts[key] = self.add(f"<pre>{visible(text, MAX_PROMPT_CHARS)}</pre>")
        return f'<div data-piece="{self._prompts[key]}"></div>'

    def drop_last(self) -> None:
        self.size -= len(self._packed.pop()) + 60

    def html(self) -> str:
        return "".join(f'<script type="text/plain" id="piece-{i}">{packed}</script>' for i, packed in enumerate(self._packed))


_CHOOSER = (
    '<form class="chooser" id="chooser" hidden>'
    '<label>Evaluation<select id="by-source"></select></label>'
    '<label>Task<select id="by-task"></select></label>'
    '<label>Outcome<select id="by-outcome"></select></label>'
    '<label>Order<select id="by-order"><option value="task">by task</option><option value="fast">fastest first</option>'
    '<option value="slow">slowest first</option></select></label>'
    '<div class="which"><label>Rollout<select id="which"></select></label>'
    '<button type="button" id="back">← previous</button><button type="button" id="on">next →</button></div></form>'
)
SCRIPT = """
(() => {
  const held = document.getElementById("rollout-index");
  if (!held) return;
  const { sources, rows } = JSON.parse(held.textContent);
  const at = (id) => document.getElementById(id), shown = at("rollout"), which = at("which");
  const say = (text) => { const p = document.createElement("p"); p.className = "missing"; p.textContent = text; shown.replaceChildren(p); };
  if (typeof DecompressionStream === "undefined") {
    say("This browser can't unpack rollouts: Chrome 80, Firefox 113, Safari 16.4 or newer can.");
    return;
  }
  const unpack = async (number) => {
    const bytes = Uint8Array.from(atob(at("piece-" + number).textContent), (c) => c.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };
  const fill = (select, all, values) => {
    select.replaceChildren(...[["", all], ...values].map(([value, text]) => {
      const option = document.createElement("option"); option.value = value; option.textContent = text; return option;
    }));
  };
  const distinct = (column) => [...new Set(rows.map((row) => row[column]))].sort().map((v) => [v, String(v).replaceAll("_", " ")]);
  fill(at("by-source"), "all", sources.map((name, i) => [String(i), name]).filter(([i]) => rows.some((row) => row[1] === Number(i))));
  fill(at("by-task"), "all", distinct(2));
  fill(at("by-outcome"), "all", distinct(4));
  let turn = 0;
  const show = async () => {
    const mine = ++turn;
    at("back").disabled = which.selectedIndex <= 0;
    at("on").disabled = which.selectedIndex >= which.options.length - 1;
    if (!which.value) { say("No rollout is like this."); return; }
    const html = await unpack(which.value);
    if (mine !== turn) return;
    shown.innerHTML = html;
    for (const part of shown.querySelectorAll("[data-piece]")) {
      part.closest("details").addEventListener("toggle", async () => {
        if (!part.hasChildNodes()) part.innerHTML = await unpack(part.dataset.piece);
      }, { once: true });
    }
    history.replaceState(null, "", "#rollout-" + which.value);
  };
  const list = (wanted) => {
    const [source, task, outcome, order] = ["by-source", "by-task", "by-outcome", "by-order"].map((id) => at(id).value);
    const some = rows.filter((row) => (!source || row[1] === Number(source)) && (!task || row[2] === task) && (!outcome || row[4] === outcome));
    const name = (row) => row[2] + "\\n" + String(row[1]).padStart(4, "0") + row[3];
    const compare = { task: (a, b) => (name(a) < name(b) ? -1 : 1), fast: (a, b) => b[5] - a[5], slow: (a, b) => a[5] - b[5] }[order];
    which.replaceChildren(...some.sort(compare).map((row) => {
      const option = document.createElement("option"); option.value = String(row[0]);
      const speed = row[5] > 0 ? ", " + row[5].toFixed(2) + " ×" : "";
      option.textContent = row[2] + ": " + (sources.length > 1 ? sources[row[1]] + ", " : "") + row[3] + ": " + row[4].replaceAll("_", " ") + speed;
      return option;
    }));
    if (wanted !== undefined && some.some((row) => row[0] === wanted)) which.value = String(wanted);
    show();
  };
  for (const id of ["by-source", "by-task", "by-outcome", "by-order"]) at(id).addEventListener("change", () => list());
  which.addEventListener("change", show);
  at("back").addEventListener("click", () => { which.selectedIndex -= 1; show(); });
  at("on").addEventListener("click", () => { which.selectedIndex += 1; show(); });
  at("chooser").addEventListener("submit", (event) => event.preventDefault());
  at("chooser").hidden = false;
  const wanted = /^#rollout-(\\d+)$/.exec(location.hash);
  if (wanted) { list(Number(wanted[1])); shown.scrollIntoView(); } else list();
})();
"""


def script_digest() -> str:
    """Of SCRIPT, as a content security policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
