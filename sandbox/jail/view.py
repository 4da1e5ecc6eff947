"""What a jailed process may see of the host's files, and a root directory that holds nothing else.

`HostView.find` lists the trees that running Python, PyTorch and compilers takes: the system's programs and
libraries, the Python installation with its packages wherever it lies, toolchains outside /usr, and of this
project the package `sandbox` alone (runners import parts of it late). At level strict `build` mounts them,
read-only, into a new root; at level standard Landlock is given the same list. Home directories, the checkout,
/etc but for a few files, /run, /var and the directories of other jails are in neither.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import sandbox
from sandbox.jail import syscalls
from sandbox.jail.syscalls import mount

PRIVATE = "/private"
"""Where a runner at level strict finds its only writable directory."""

SYSTEM_TREES = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store")
SYSTEM_FILES = (
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/timezone",
)
MADE_UP_FILES = {
    "/etc/passwd": "user:x:1000:1000::/private:/bin/sh\n",
    "/etc/group": "user:x:1000:\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "/etc/hosts": "127.0.0.1 localhost\n",
}
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
PROCESSOR_FACTS = ("/sys/devices/system/cpu", "/sys/devices/system/node")
PROC_FACTS = (
    *("cpuinfo", "meminfo", "stat", "version", "filesystems", "loadavg", "uptime", "devices"),
    *("sys/kernel", "sys/vm"),
)
TOOLS = ("CXX", "g++"), ("CC", "gcc"), ("", "nvcc"), ("", "ninja"), ("", "ld"), ("TRITON_PTXAS_PATH", "ptxas")
NOT_A_TREE = ("/", "/home", "/root", "/etc", "/var", "/tmp", "/run", "/dev", "/proc", "/sys", "/opt", "/mnt")


@dataclass(frozen=True, kw_only=True)
class HostView:
    """Paths of this host that untrusted processes may read and execute.

    Attributes:
      trees: real directories and files, absolute, none inside another.
      links: symbolic links outside the trees that lead into them, with what they say: /bin -> usr/bin.
    """

    trees: tuple[str, ...]
    links: tuple[tuple[str, str], ...]

    @staticmethod
    def find(extra: Iterable[str] = ()) -> HostView:
        """Looks at this host, as seen from this process's Python and environment."""
        paths = [*SYSTEM_TREES, *SYSTEM_FILES, *_python_trees(), *_tool_trees(), *extra]
        links, real = {}, []
        for path in paths:
            if os.path.exists(path):
                real.append(os.path.realpath(path))
                links.update(_links_on_the_way(path))
        trees = _outermost(real)
        kept = tuple((path, text) for path, text in links.items() if not _within(path, trees))
        return HostView(trees=trees, links=kept)

    def open_to_others(self, further: Iterable[str]) -> bool:
        """Whether a user without privileges gets into every tree, and `further` paths, by permissions."""
        return all(map(is_open_to_others, (*self.trees, *further)))


def others_may_reach(path: str) -> bool:
    """Whether everybody may pass through all the directories above `path`."""
    return all(os.stat(parent).st_mode & stat.S_IXOTH for parent in Path(path).parents)


def is_open_to_others(path: str) -> bool:
    """Whether everybody may read the file or list the directory at `path`, if there is one."""
    if not os.path.exists(path):
        return True
    needed = stat.S_IROTH | (stat.S_IXOTH if os.path.isdir(path) else 0)
    return others_may_reach(path) and os.stat(path).st_mode & needed == needed


def _python_trees() -> Iterator[str]:
    root = str(Path(sandbox.__file__).resolve().parent.parent)
    yield str(Path(sandbox.__file__).resolve().parent)
    kept_out = [root, os.path.expanduser("~"), os.environ.get("HOME") or "/root"]
    for prefix in dict.fromkeys((sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix)):
        if any(_within(os.path.realpath(path), [os.path.realpath(prefix)]) for path in kept_out):
            # The prefix holds a home or the checkout itself: only what belongs to Python.
            for name in ("bin", "lib", "lib64", "include", "pyvenv.cfg"):
                yield os.path.join(prefix, name)
        else:
            yield prefix
    for entry in sys.path:
        if entry and os.path.isabs(entry) and os.path.realpath(entry) != root and _looks_installed(entry):
            yield entry


def _looks_installed(entry: str) -> bool:
    return os.path.basename(entry) in ("site-packages", "dist-packages", "lib-dynload") or entry.endswith(
        ".zip"
    )


def _tool_trees() -> Iterator[str]:
    """Installations of compilers that lie outside the system's trees: the folder above their bin."""
    for variable, name in TOOLS:
        asked = os.environ.get(variable) if variable else None
        for found in filter(None, (shutil.which(asked) if asked else None, shutil.which(name))):
            yield found
            yield from _installation(os.path.realpath(found))
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable) and os.path.realpath(os.environ[variable]) not in NOT_A_TREE:
            yield os.environ[variable]
    if os.path.isdir("/usr/local/cuda"):
        yield "/usr/local/cuda"
    for entry in (os.environ.get("LD_LIBRARY_PATH") or "").split(os.pathsep):
        if os.path.isabs(entry) and os.path.basename(entry).startswith("lib"):
            yield entry


def _installation(program: str) -> Iterator[str]:
    folder = os.path.dirname(program)
    above = os.path.dirname(folder)
    if os.path.basename(folder) == "bin" and above not in NOT_A_TREE and above != os.path.expanduser("~"):
        yield above


def _links_on_the_way(path: str) -> dict[str, str]:
    """Symbolic links among a path and the folders above it, followed to the end."""
    found: dict[str, str] = {}
    todo = [path]
    while todo and len(found) < 40:
        current = os.path.normpath(todo.pop())
        for part in [*reversed(Path(current).parents), Path(current)]:
            if str(part) not in found and part.is_symlink():
                found[str(part)] = os.readlink(part)
                rest = os.path.relpath(current, part)
                todo.append(os.path.join(part.parent, found[str(part)], rest))
                break
            if str(part) in found:
                todo.append(os.path.join(part.parent, found[str(part)], os.path.relpath(current, part)))
                break
    return found


def _within(path: str, trees: Iterable[str]) -> bool:
    return any(path == tree or path.startswith(tree.rstrip("/") + "/") for tree in trees)


def _outermost(paths: Iterable[str]) -> tuple[str, ...]:
    kept: list[str] = []
    for path in sorted(set(paths)):
        if not _within(path, kept):
            kept.append(path)
    return tuple(kept)


def build(
    view: HostView,
    root: str,
    *,
    directory: str,
    inner_directory: str,
    on_disk: bool,
    owner: int,
    directory_bytes: int,
    gpu: bool,
    readable: Sequence[str] = (),
) -> None:
    """Builds the jail's root at `root`, in this process's own mount namespace, and moves into it.

    Args:
      view: what to show of the host.
      root: an empty directory of the host.
      directory: the private directory on the host; with `on_disk` it is shown itself at `inner_directory`,
        without, memory of at most `directory_bytes` is (and /dev/shm draws on the same).
      owner: user and group of that memory, as this user namespace numbers them.
      gpu: show NVIDIA devices and what the driver reads in /sys.
      readable: further files and directories to show.

    Raises:
      OSError: a step failed; the text names it.
    """
    mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "size=8m,nr_inodes=16k,mode=755")
    extra = [os.path.realpath(path) for path in readable if os.path.exists(path)]
    trees = _outermost([*view.trees, *extra])
    facts = ("/sys",) if gpu else PROCESSOR_FACTS
    for tree in (*trees, *(fact for fact in facts if os.path.isdir(fact))):
        _show(root, tree)
    for path, text in view.links:
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        if not os.path.lexists(root + path):
            os.symlink(text, root + path)
    for path, text in ({} if on_disk else MADE_UP_FILES).items():
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        if not os.path.lexists(root + path):
            Path(root + path).write_text(text)
    for folder in ("/proc", "/dev", "/tmp", inner_directory):
        os.makedirs(root + folder, exist_ok=True)
    _make_devices(root, gpu)
    syscalls.set_mount_attributes(root, syscalls.MOUNT_ATTR_RDONLY | syscalls.MOUNT_ATTR_NOSUID)
    _make_private(root, directory, inner_directory, on_disk, owner, directory_bytes)
    flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
    mount("proc", f"{root}/proc", "proc", flags)
    syscalls.become_root_directory(root)


def _show(root: str, tree: str) -> None:
    target = root + tree
    if os.path.isdir(tree):
        os.makedirs(target, exist_ok=True)
        mount(tree, target, None, syscalls.MS_BIND | syscalls.MS_REC)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()
        mount(tree, target, None, syscalls.MS_BIND)


def _make_devices(root: str, gpu: bool) -> None:
    for device in (*DEVICES, *(nvidia_devices() if gpu else ())):
        if os.path.exists(device):
            _show(root, device)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(target, f"{root}/dev/{name}")
    os.mkdir(f"{root}/dev/shm")


def nvidia_devices() -> list[str]:
    """Device files of the NVIDIA driver on this host."""
    return [f"/dev/{name}" for name in sorted(os.listdir("/dev")) if name.startswith("nvidia")]


def _make_private(
    root: str, directory: str, inner_directory: str, on_disk: bool, owner: int, directory_bytes: int
) -> None:
    flags, inside = syscalls.MS_NOSUID | syscalls.MS_NODEV, f"{root}{inner_directory}"
    options = f"size={directory_bytes},nr_inodes=64k,mode=700,uid={owner},gid={owner}"
    if on_disk:
        mount(directory, inside, None, syscalls.MS_BIND)
        syscalls.set_mount_attributes(inside, syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV)
        mount("tmpfs", f"{root}/dev/shm", "tmpfs", flags | syscalls.MS_NOEXEC, options)
        return
    mount("tmpfs", inside, "tmpfs", flags, options)
    for name in ("work", "shm"):
        os.mkdir(f"{inside}/{name}", 0o700)
        os.chown(f"{inside}/{name}", owner, owner)
    mount(f"{inside}/shm", f"{root}/dev/shm", None, syscalls.MS_BIND)
    mount(f"{inside}/work", inside, None, syscalls.MS_BIND)
    for path in (inside, f"{root}/dev/shm"):
        syscalls.set_mount_attributes(path, syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV)


def landlock_paths(
    view: HostView, *, directory: str, own_root: bool, gpu: bool, readable: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """What Landlock is to leave readable and writable.

    Args:
      own_root: the root directory holds nothing but the view (level strict).
      gpu: CUDA does not start unless it may write in /dev and /proc.
    """
    writable = [directory, "/dev/null", "/dev/zero", "/dev/full"]
    if own_root:
        writable.append("/dev/shm")
    if gpu:
        writable += ["/dev", "/proc"]
    if own_root:
        return ["/"], writable
    proc = [f"/proc/{name}" for name in PROC_FACTS]
    facts = ["/sys"] if gpu else list(PROCESSOR_FACTS)
    made_up = ["/etc/nsswitch.conf"]
    return [*view.trees, *DEVICES, *facts, *proc, *made_up, "/proc/self/", *readable], writable
