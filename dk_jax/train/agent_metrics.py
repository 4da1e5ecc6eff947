"""What a step's rollouts came to for each agent; what the update saw of its tokens is in the update's own metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from dk_jax.models.config import AGENTS
from dk_jax.rollout.trajectory import Trajectory
from dk_jax.train.batch import Row


def agent_metrics(trajectories: Sequence[Trajectory], rows: Sequence[Row]) -> dict[str, float]:
    """For each AGENT that spoke:

        reward_AGENT      mean reward of a turn that has one
        length_AGENT      mean tokens of a message
        drop_share_AGENT  share of its sequences that are not in the update, for whatever reason (see dk_jax.train.credit)
        sequences_AGENT   sequences in the update; for all agents
        form_FORM_AGENT   share of its messages whose call is written so (dk_jax.agents.call_forms); unread_AGENT of those that say nothing
                          that can be used

    Args:
        trajectories: of one step, with rewards. rows: of the update.
    """
    found = {}
    for index, agent in enumerate(AGENTS):
        own = [t for t in trajectories if t.agent == agent]
        learnt = sum(row.agent == index for row in rows)
        found[f"sequences_{agent}"] = float(learnt)
        if not own:
            continue
        rewards = [reward for t in own for reward in t.rewards]
        if rewards:
            found[f"reward_{agent}"] = float(np.mean(rewards))
        sampled, messages = sum(turn >= 0 for t in own for turn in t.turn_index), sum(len(t.turns) for t in own)
        found[f"length_{agent}"] = sampled / max(messages, 1)
        if agent != "policy":
            last = [t.turns[-1] for t in own if t.turns]
            forms = Counter(turn.form for turn in last if turn.form)
            found |= {f"form_{form}_{agent}": count / len(last) for form, count in forms.items()}
            found[f"unread_{agent}"] = sum(bool(turn.error) for turn in last) / max(len(last), 1)
        found[f"drop_share_{agent}"] = 1.0 - learnt / sum(len(t.sequences) for t in own)
    return found
