"""Which rules a library's skills live by: those of the run that it belongs to, or the defaults, with some of them given by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from dk_jax.skills.lifecycle import LifecycleRules

RULES = {
    "least_gain": "speedup ratio from which a skill helps",
    "dormant_below": "probability of helping below which it rests",
    "least_effects": "measured effects, aged, below which it is left alone",
    "ignored_after": "times shown, aged, without ever being selected, after which it rests; 0 never",
    "most_active": "active skills beyond which the least promising rest; 0 for any number",
    "alike": "likeness of two skills' code from which they are one; above 1 nothing is merged",
}
"""Rules of the lifecycle that may be given by hand."""


def rules_of(config: Path | None, given: Mapping[str, float]) -> tuple[LifecycleRules, str]:
    """The rules, and where they are from in words.

    Args:
        config: a run's config.json, which may not be there or hold no such rules; None for the defaults.
        given: rules that take the place of these.

    Raises:
        ValueError: a config that can't be read, or a rule that makes no sense; the message names it.
    """
    told, where = {}, "the default rules"
    if config is not None and config.exists():
        try:
            told = dict(json.loads(config.read_text(encoding="utf-8"))["skills"].get("lifecycle", {}))
            told.pop("on", None)
            LifecycleRules(**told)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{config}: no rules for what becomes of skills: {error}") from error
        where = f"the rules of {config}" if told else where
    return LifecycleRules(**told | dict(given)), where
