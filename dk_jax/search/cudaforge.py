"""CudaForge (arXiv 2511.01884): a Coder and a Judge take turns on one kernel, without any training.

    round 1: the Coder writes a kernel from the task
    round t: the Judge reads the kernel of the round before and its verdict, and names one thing
             (wrong: the fault to mend; right: the bottleneck to remove);
             the Coder rewrites that kernel by this one instruction
    the fastest right kernel of all rounds is what counts

Neither remembers earlier rounds: a prompt holds the task, the current kernel and what was said of it. A right kernel that becomes wrong is
corrected from where it is; the sandbox's verdict on the best is kept beside. Both agents are the policy that is evaluated.

Ours, as the paper does not say: a message without a kernel leaves the current one, its verdict and its judgement as they are, and the Coder
is told why it could not be read. Where a judgement can't be read, or does not fit, the Coder gets the verdict alone. Where a prompt does not
fit, skills and then feedback are left out; if the kernel itself has no room, the rounds end.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dk_jax.agents import policy
from dk_jax.agents.text import TaskView
from dk_jax.rollout.episode import RolloutConfig, task_view
from dk_jax.rollout.judge import Judge
from dk_jax.rollout.speaker import Speaker
from dk_jax.rollout.trajectory import Trajectory, Verdict, derive_seed
from dk_jax.search import cudaforge_judge
from dk_jax.search.cudaforge_cards import CARDS
from dk_jax.search.cudaforge_judge import Judgement
from dk_jax.search.fresh_turn import fresh_turn, refuse_compact
from dk_jax.search.strategy import check_whole
from dk_jax.skills.record import Skill
from dk_jax.tasks.task import Task

log = logging.getLogger(__name__)
NAME = "cudaforge"


@dataclasses.dataclass(kw_only=True)
class _Work:
    """A sample's current state: its turns, the Judge's, and the kernel in work, of which there is none before one could be read."""

    trajectory: Trajectory
    judged: Trajectory
    task: Task
    view: TaskView
    skills: Sequence[Skill]
    source: str | None = None
    verdict: Verdict | None = None
    judgement: Judgement | None = None
    unread: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CudaForge:
    """The strategy: called as dk_jax.rollout.episode.policy_turns.

    Attributes:
        card: whose data sheet the Judge reads, a name of CARDS; "" for none, as where kernels run on a CPU.
        judge_tokens: longest answer of the Judge; 0 for rollout.max_policy_tokens.
    """

    card: str
    judge_tokens: int

    def __call__(
        self,
        speaker: Speaker,
        judge: Judge,
        trajectories: Sequence[Trajectory],
        tasks: Sequence[Task],
        skills: Sequence[Sequence[Skill]],
        *,
        config: RolloutConfig,
        seed_of: Callable[[Trajectory, int], int],
        phase: str,
        turns: int,
        timed: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> list[Trajectory]:
        """Runs all rounds of the given trajectories together, in place.

        Returns:
            The Judge's messages, one trajectory for each that has any; a turn whose judgement could not be read says so in `error`.

        Raises:
            ValueError: style "compact", or judge_tokens that the sampler is not made for.
        """
        refuse_compact(NAME, config.style)
        if self.judge_tokens > config.max_policy_tokens:
            raise ValueError(
                f"evaluation.search.judge_tokens={self.judge_tokens} is more than rollout.max_policy_tokens={config.max_policy_tokens}"
            )
        works = [
            _Work(
                trajectory=t, task=task, view=task_view(task, language=config.language, form=config.form), skills=own,
                judged=Trajectory(agent=t.agent, task=t.task, group=f"{t.group}/judge", scheme=t.scheme, member=t.member),
            )
            for t, task, own in zip(trajectories, tasks, skills, strict=True)
        ]  # fmt: skip
        alive = works
        for turn in range(turns):
            if turn:
                alive = self._judge(speaker, alive, config, seed_of, turn)
            prompts = [_coder_prompt(speaker, work, config) for work in alive]
            spoke = fresh_turn(
                speaker, judge, [w.trajectory for w in alive], prompts, [w.task for w in alive], [seed_of(w.trajectory, turn) for w in alive],
                previous=[w.source for w in alive], config=config, phase=f"{phase}/turn{turn}", timed=timed, progress=progress,
            )  # fmt: skip
            alive = [work for work, found in zip(alive, spoke, strict=True) if found]
            for work in alive:
                _take(work)
        return [work.judged for work in works if work.judged.turns]

    def _judge(self, speaker: Speaker, works: Sequence[_Work], config: RolloutConfig, seed_of: Callable, turn: int) -> list[_Work]:
        """Asks for a judgement of each kernel that has none, all together.

        Returns those that go on: without an answer that an endpoint may still give (its budget is spent) a sample is unfinished.
        """
        max_new, asked, prompts = self.judge_tokens or config.max_policy_tokens, [], []
        for work in works:
            if work.source is None or work.judgement is not None:
                continue
            if prompt := self._judge_prompt(speaker, work, max_new):
                asked.append(work)
                prompts.append(prompt)
            else:
                _without(work, f"the Judge's prompt and {max_new} new tokens pass rollout.max_context_tokens={config.max_context_tokens}")
        if not asked:
            return list(works)
        seeds = [derive_seed(seed_of(work.trajectory, turn), "judge") for work in asked]
        answered = speaker.speak([work.judged for work in asked], prompts, seeds, max_new=max_new, fresh=True)
        waiting = []
        for work, found in zip(asked, answered, strict=True):
            if found:
                last = work.judged.turns[-1]
                work.judgement = cudaforge_judge.parse(last.text, correct=work.verdict.correct)
                if last.stop != "eos":
                    work.judgement = Judgement(error=last.error or f"the judgement was cut at {max_new} tokens")
                last.form, last.error = work.judgement.form, work.judgement.error
            elif reason := _unanswered(speaker, work.judged):
                speaker.unfinished.append((work.trajectory, reason))
                waiting.append(work)
            else:
                _without(work, "the Judge's prompt is too long for the endpoint's model")
        return [work for work in works if not any(work is other for other in waiting)]

    def _judge_prompt(self, speaker: Speaker, work: _Work, max_new: int) -> str:
        """The fullest prompt that fits: with the card, without it, without the profile too; "" if none does."""
        sheet = CARDS[self.card].sheet() if self.card else ""
        for options in ({"sheet": sheet}, {}, {"profile": False}):
            prompt = cudaforge_judge.render(work.view, work.source, work.verdict, **options)
            if speaker.fits(prompt, max_new):
                return prompt
        return ""


def make(options: Mapping[str, Any]) -> CudaForge:
    """The strategy with the numbers of a recipe's `evaluation.search`. Raises ValueError: names the key that is missing or wrong."""
    for key in ("card", "judge_tokens"):
        if key not in options:
            raise ValueError(f"evaluation.search.{key} is missing, which name={NAME!r} reads: see configs/cudaforge.py")
    if options["card"] != "" and options["card"] not in CARDS:
        raise ValueError(f"evaluation.search.card is {options['card']!r}: use one of {', '.join(map(repr, CARDS))}, or '' to tell of none")
    return CudaForge(card=options["card"], judge_tokens=check_whole(options, "judge_tokens", least=0))


def _take(work: _Work) -> None:
    """What the last turn means for the kernel in work."""
    last = work.trajectory.turns[-1]
    work.unread = last.error
    if last.source is not None:
        work.source, work.verdict, work.judgement = last.source, last.verdict, None
    elif work.source is None:
        work.verdict = last.verdict


def _coder_prompt(speaker: Speaker, work: _Work, config: RolloutConfig) -> str:
    """The fullest prompt that fits, or the shortest there is. Left out are skills, the last first, then the sandbox's feedback."""
    verdict, skills = work.verdict, list(work.skills)
    while True:
        if work.verdict is None:
            prompt = policy.render_first(work.view, skills, style=config.style)
        else:
            attempt = policy.Attempt(source=work.source, summary="", verdict=verdict)
            prompt = cudaforge_judge.render_coder(work.view, skills, attempt, work.judgement, unread=work.unread if work.source else "")
        if speaker.fits(prompt, config.max_policy_tokens):
            return prompt
        if skills:
            skills.pop()
        elif verdict is not None and verdict.feedback:
            verdict = dataclasses.replace(verdict, feedback="")
        else:
            return prompt


def _without(work: _Work, reason: str) -> None:
    """There will be no judgement of the kernel in work."""
    log.warning("task %s, sample %d: a kernel is not judged: %s", work.task.name, work.trajectory.member, reason)
    work.judgement = Judgement(error=reason)


def _unanswered(speaker: Any, judged: Trajectory) -> str:
    """Why an endpoint may still give a judgement (dk_jax.evaluation.asked_speaker); "" where it will not."""
    return next((reason for other, reason in reversed(getattr(speaker, "unfinished", ())) if other is judged), "")
