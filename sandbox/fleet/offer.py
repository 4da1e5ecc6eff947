"""What a server can judge and how it confines it: of this host, or of all nodes of a fleet together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sandbox.jail.plan import LEVELS
from sandbox.jail.probe import Isolation
from sandbox.protocol import Capabilities, LanguageSupport


@dataclass(frozen=True, kw_only=True)
class Served:
    """What requests are held against, and what /v1/capabilities and /v1/health tell."""

    capabilities: Capabilities
    isolation: Isolation


def merge(present: Sequence[Served], seen: Iterable[Served], max_queue: int) -> Served:
    """What a fleet serves.

    Args:
      present: its nodes' share, of those in service or else of the last that were; not empty.
      seen: of nodes that have left. What only they can judge is still taken, and waits for one like them.
      max_queue: the broker's.

    Returns:
      All their devices and languages, the weakest of the present nodes' isolation, and the sum of their workers.
    """
    everyone = [*present, *seen]
    levels = [one.isolation for one in present]
    limits = dict(present[0].capabilities.limits)
    limits["workers"] = sum(one.capabilities.limits["workers"] for one in present)
    limits["threads"] = min(one.capabilities.limits["threads"] for one in present)
    limits["max_queue"] = max_queue
    languages = {
        name: _any(served.capabilities.languages[name] for served in everyone) for name in present[0].capabilities.languages
    }
    return Served(
        capabilities=present[0].capabilities.model_copy(
            update={
                "languages": languages,
                "devices": _devices(one.capabilities.devices for one in everyone),
                "counters": max((one.capabilities.counters for one in everyone), key=lambda support: support.available),
                "limits": limits,
            }
        ),
        isolation=Isolation(
            name=max((level.name for level in levels), key=LEVELS.index),
            features=tuple(name for name in levels[0].features if all(name in level.features for level in levels)),
            missing=_once(name for level in levels for name in level.missing),
        ),
    )


def _any(supports: Iterable[LanguageSupport]) -> LanguageSupport:
    """A language where some of the hosts can judge it."""
    everyone = list(supports)
    able = [support for support in everyone if support.available]
    if not able:
        return everyone[0]
    return LanguageSupport(
        available=True,
        forms=list(_once(form for support in able for form in support.forms)),
        devices=_devices(support.devices for support in able),
        timing=any(support.timing for support in able),
    )


def _devices(lists: Iterable[Iterable[str]]) -> list[str]:
    """GPUs by number, then the CPU."""
    return sorted(_once(name for names in lists for name in names), key=lambda name: (name == "cpu", len(name), name))


def _once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
