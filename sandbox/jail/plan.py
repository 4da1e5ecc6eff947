"""What a jail is to be (`Plan`), and what all jails of one zygote have in common (`Host`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sandbox.jail import namespaces, syscalls, view
from sandbox.jail.cgroup import Cgroups, NoCgroups
from sandbox.jail.limits import Limits

Level = Literal["strict", "standard", "none"]
LEVELS: tuple[Level, ...] = ("strict", "standard", "none")
"""From the strictest down; see `sandbox.jail.confine`."""


class JailSetupError(RuntimeError):
    """A jail could not be entered; the text names the step and the reason."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One jail.

    Attributes:
      directory: the private directory on the host.
      on_disk: the process works in that directory itself, under its own path (a compiler, whose output is
        fetched from there); without, level strict gives it memory at `view.PRIVATE` in its place.
      readable: files and directories to show beyond the host's view.
      memory_bytes: bound of all its processes together, where control groups can be had.
      loopback: its processes may talk to each other over the network that is theirs alone; at level strict only, where there is one.
    """

    level: Level
    directory: str
    on_disk: bool
    limits: Limits
    memory_bytes: int
    readable: tuple[str, ...] = ()
    loopback: bool = False

    @property
    def inner_directory(self) -> str:
        """The private directory's path inside the jail."""
        return view.PRIVATE if self.level == "strict" and not self.on_disk else self.directory


@dataclass(frozen=True, kw_only=True)
class Host:
    """What jails of this process have in common.

    Attributes:
      root: an empty directory on which each jail's view is mounted, in that jail's namespace only.
      own_users: each jail can get a user of its own.
      privileged: mounts can be made before the user namespace is entered.
      no_cgroups: why there are none, when `cgroups` is None.
    """

    view: view.HostView
    root: str
    own_users: bool
    privileged: bool
    cgroups: Cgroups | None
    no_cgroups: str = ""

    @staticmethod
    def find(root: str, extra: tuple[str, ...] = ()) -> Host:
        """Looks at this machine; `extra` are further paths for the view."""
        own_users = namespaces.own_users_possible()
        cgroups, reason = None, ""
        try:
            cgroups = Cgroups.find()
        except NoCgroups as error:
            reason = str(error)
        return Host(
            view=view.HostView.find(extra),
            root=root,
            own_users=own_users,
            privileged=own_users and syscalls.has_capability(syscalls.CAP_SYS_ADMIN),
            cgroups=cgroups,
            no_cgroups=reason,
        )

    def may_have_user(self, plan: Plan) -> bool:
        """Whether the jail can work under a user of its own without a view of its own: that user must get to
        the private directory and, if need be with CAP_DAC_READ_SEARCH, to Python and its kind."""
        if not view.others_may_reach(plan.directory):
            return False
        return not self.needs_search_right(plan) or syscalls.has_capability(syscalls.CAP_DAC_READ_SEARCH)

    def needs_search_right(self, plan: Plan) -> bool:
        """Whether something that the jail reads lies behind permissions, as Python in a home may."""
        return not self.view.open_to_others(plan.readable)
