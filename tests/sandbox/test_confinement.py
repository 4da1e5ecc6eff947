"""Hostile runners and compilers at each isolation level: what each tries must fail.

Every attack that can be made by an ordinary process is first seen to succeed at level none, so that its
failure at the other levels says something.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import sandbox
from sandbox.jail import probe, spawn
from sandbox.jail.cgroup import Cgroups, NoCgroups
from sandbox.jail.faults import JailDied, JailMemory, JailReply, JailTimeout
from sandbox.jail.limits import Limits
from sandbox.jail.spawn import Zygote
from sandbox.settings import make_scratch
from tests.sandbox.helpers import (
    ADD_BIAS,
    ROOT,
    eventually,
)
from tests.sandbox.levels import offered_or_skip

MEMORY_BYTES = 1 << 30
LIMITS = Limits(memory_bytes=MEMORY_BYTES)
WORD = "a-word-that-must-not-get-out"


@pytest.fixture(scope="module")
def scratch():
    directory = make_scratch()
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def zygotes(scratch):
    started: dict[str, Zygote] = {}

    def of(level):
        offered_or_skip(level)
        if level not in started:
            started[level] = Zygote(modules=["torch"], threads=1, directory=scratch, level=level)
        return started[level]

    yield of
    for zygote in started.values():
        zygote.close()


@pytest.fixture(params=["strict", "standard"])
def zygote(request, zygotes):
    return zygotes(request.param)


@pytest.fixture(scope="module")
def outside():
    """What lies outside every jail: a readable secret, listening sockets, a process."""
    with tempfile.TemporaryDirectory(prefix="outside-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "secret").write_text(WORD)
        (folder / "secret").chmod(0o644)
        (folder / "open").mkdir()
        (folder / "open").chmod(0o777)
        tcp = socket.create_server(("127.0.0.1", 0))
        unix, abstract = (socket.socket(socket.AF_UNIX) for _ in range(2))
        unix.bind(f"{folder}/socket")
        os.chmod(f"{folder}/socket", 0o777)
        abstract.bind(f"\0{folder}")
        unix.listen()
        abstract.listen()
        victim = subprocess.Popen(["sleep", "1000"])
        yield {
            "FOLDER": name,
            "PORT": tcp.getsockname()[1],
            "VICTIM": victim.pid,
            "ORACLE": os.getpid(),
            "ROOT": str(ROOT),
            "HOME": os.path.expanduser("~"),
            "PACKAGE": str(Path(sandbox.__file__).resolve().parent),
        }
        victim.kill()
        victim.wait()
        for sock in (tcp, unix, abstract):
            sock.close()


def attempt(zygote, code, values, timeout_s=20.0):
    """Runs `code`, the body of a function, as part of a task's source; returns its outcome as text.

    "done: X" when it returned X, "stopped: X" when it raised the OSError X.
    """
    body = textwrap.indent(textwrap.dedent(code), "    ")
    source = (
        f"{ADD_BIAS}\nimport ctypes, errno, os, signal, socket, sys, time\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "def check(result):\n"
        "    if result == -1: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))\n"
        "    return result\n" + "".join(f"{name} = {value!r}\n" for name, value in values.items()) + f"def attack():\n{body}\n"
        "try: outcome = f'done: {attack()}'\n"
        "except OSError as error: outcome = f'stopped: {error!r}'\n"
        "raise ValueError(outcome)\n"
    )
    with zygote.runner(LIMITS, MEMORY_BYTES) as runner, pytest.raises(JailReply) as caught:
        load(runner, source, timeout_s)
    text = re.search(r"((?:done|stopped): .*) \(line \d+: ", str(caught.value), re.DOTALL)
    assert text, str(caught.value)
    return text[1]


def load(runner, source, timeout_s=20.0):
    return runner.call("load_reference", timeout_s, source=source, entry_point="Model", dtype="float32", device="cpu", seed=1)


ORDINARY_ATTACKS = {
    "a connection to the host": "socket.create_connection(('127.0.0.1', PORT), 5)",
    "a datagram": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))",
    "a local socket": "socket.socket(socket.AF_UNIX).connect(f'{FOLDER}/socket')",
    "an abstract socket": "socket.socket(socket.AF_UNIX).connect('\\0' + FOLDER)",
    "reading somebody's file": "return open(f'{FOLDER}/secret').read()",
    "writing into an open directory": "open(f'{FOLDER}/open/mine', 'w')",
    "changing a file's mode": (
        "before = os.stat(f'{FOLDER}/secret').st_mode\n"
        "os.chmod(f'{FOLDER}/secret', before ^ 0o020)\n"
        "if os.stat(f'{FOLDER}/secret').st_mode == before: raise OSError('nothing changed')"
    ),
    "reading the checkout": "return open(f'{ROOT}/pyproject.toml').read()",
    "listing the checkout's tests": "return os.listdir(f'{ROOT}/tests')",
    "changing the judge's program": "open(f'{PACKAGE}/__init__.py', 'a')",
    "listing the home directory": "assert len(os.listdir(HOME)) > 1 or OSError",
    "writing to /tmp": "import tempfile; tempfile.NamedTemporaryFile(dir='/tmp')",
    "a signal to another process": "os.kill(VICTIM, signal.SIGCONT)",
    "a signal through a descriptor": "signal.pidfd_send_signal(os.pidfd_open(VICTIM), signal.SIGCONT)",
    "reading the oracle's environment": "return open(f'/proc/{ORACLE}/environ').read()",
    "reading the oracle's memory": "os.open(f'/proc/{ORACLE}/mem', os.O_RDONLY)",
    "reading the oracle's arguments": "return open(f'/proc/{ORACLE}/cmdline').read()",
    "a secret handed to the linker": "return os.link(f'{FOLDER}/secret', 'mine')",
    "a user namespace": "check(libc.unshare(0x10000000))",
    "a session keyring": "check(libc.syscall(250 if os.uname().machine == 'x86_64' else 219, 1, 0, 0, 0, 0))",
    "tracing a child": (
        "child = os.fork()\n"
        "if child == 0: time.sleep(60); os._exit(0)\n"
        "try: check(libc.ptrace(16, child, 0, 0))\n"
        "finally: os.kill(child, signal.SIGKILL)"
    ),
}
NOT_EVERYWHERE = {
    "a user namespace": "forbidden to this process itself in some containers",
    "a session keyring": "forbidden to this process itself in some containers",
    "tracing a child": "forbidden to this process itself in some containers",
    "reading the oracle's memory": "forbidden by some security modules",
    "a secret handed to the linker": "the private directory may lie on another disk",
    "listing the home directory": "the home directory may be empty",
    "changing the judge's program": "it may belong to somebody else",
}
ROOT_ATTACKS = {
    "reading /etc/shadow": "return open('/etc/shadow').read()",
    "a mount": "check(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None))",
    "becoming root": "os.setuid(0); open('/etc/shadow')",
    "becoming somebody else": "os.setresuid(54321, 54321, 54321)",
    "dropping groups": "os.setgroups([0])",
    "a network namespace": "check(libc.unshare(0x40000000))",
    "another's memory by system call": (
        "class Span(ctypes.Structure): _fields_ = [('base', ctypes.c_void_p), ('size', ctypes.c_size_t)]\n"
        "span = Span(0x1000, 8)\n"
        "number = 310 if os.uname().machine == 'x86_64' else 270\n"
        "check(libc.syscall(number, VICTIM, ctypes.byref(span), 1, ctypes.byref(span), 1, 0))"
    ),
    "attaching to another process": "check(libc.ptrace(16, VICTIM, 0, 0))",
    "a handle to any file": ("number = 304 if os.uname().machine == 'x86_64' else 265\ncheck(libc.syscall(number, -100, b'0' * 64, 0))"),
    "a ring of calls": "check(libc.syscall(425, 8, b'\\0' * 120))",
    "a kernel program": ("number = 321 if os.uname().machine == 'x86_64' else 280\ncheck(libc.syscall(number, 0, b'\\0' * 64, 64))"),
    "a performance counter": ("number = 298 if os.uname().machine == 'x86_64' else 241\ncheck(libc.syscall(number, b'\\0' * 120, 0, -1, -1, 0))"),
    "outliving its judge": "check(libc.prctl(1, 0, 0, 0, 0))",
    "a raw socket": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "a packet socket": "socket.socket(17, socket.SOCK_RAW)",
    "a netlink socket": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "a name on the net": "socket.getaddrinfo('example.org', 80)",
    "the supervisor's descriptors": "return os.listdir(f'/proc/{os.getppid()}/fd')",
    "the supervisor's memory": "open(f'/proc/{os.getppid()}/mem', 'rb')",
}
"""Attacks that need privileges, or of which there is nothing to see where they are allowed."""


@pytest.mark.parametrize("name", [name for name in ORDINARY_ATTACKS if name not in NOT_EVERYWHERE])
def test_without_confinement_the_attack_succeeds(zygotes, outside, name):
    assert attempt(zygotes("none"), ORDINARY_ATTACKS[name], outside).startswith("done: ")


@pytest.mark.parametrize("name", [*ORDINARY_ATTACKS, *ROOT_ATTACKS])
def test_the_attack_fails(zygote, outside, name):
    outcome = attempt(zygote, {**ORDINARY_ATTACKS, **ROOT_ATTACKS}[name], outside)
    if name == "listing the home directory" and zygote.level == "strict":
        return  # a view may hold the folder above an installation; what it shows is tested below
    assert outcome.startswith("stopped: "), outcome
    assert WORD not in outcome


def test_a_view_shows_no_more_of_a_home_than_what_leads_to_python(zygotes, outside):
    code = """
        shown = []
        for folder, folders, names in os.walk(HOME):
            shown += [os.path.join(folder, name) for name in names if len(shown) < 2000]
        return [path for path in shown if not path.startswith(tuple(PREFIXES))]
    """
    prefixes = [*{os.path.realpath(p) for p in (sys.prefix, sys.base_prefix)}, outside["PACKAGE"]]
    assert attempt(zygotes("strict"), code, {**outside, "PREFIXES": prefixes}) == "done: []"


def test_the_checkout_shows_the_package_alone(zygotes, outside):
    outcome = attempt(zygotes("strict"), "return sorted(os.listdir(ROOT))", outside)
    shown = set(re.findall(r"'([^']*)'", outcome))
    inside = {Path(p).relative_to(ROOT).parts[0] for p in (sys.prefix, sys.base_prefix) if p.startswith(f"{ROOT}/")}
    assert shown == {"sandbox"} | inside, outcome


def test_a_view_holds_no_accounts_of_the_host(zygotes, outside):
    outcome = attempt(zygotes("strict"), "return open('/etc/passwd').read().splitlines()", outside)
    assert "user:x:1000" in outcome and "root:" not in outcome


def test_names_and_environment_tell_nothing(zygote):
    code = """
        names = ('cmdline', 'environ', 'comm')
        texts = {name: open(f'/proc/self/{name}').read().strip('\\0\\n') for name in names}
        return texts, sorted(os.environ), sys.argv[1:]
    """
    outcome = attempt(zygote, code, {})
    assert "{'cmdline': 'python3', 'environ': '', 'comm': 'python3'}" in outcome
    assert not re.search("PYTHONPATH|SANDBOX|TOKEN|KEY", outcome.upper().replace("PYTHON3", ""))


def test_nothing_is_inherited_but_the_streams_and_the_channel(zygote):
    code = """
        held = []
        for fd in range(4096):
            try: os.fstat(fd)
            except OSError: continue
            held.append(fd)
        return held, open('/proc/self/status').read().split('CapEff:')[1].split()[0]
    """
    outcome = attempt(zygote, code, {})
    assert outcome.startswith("done: ([0, 1, 2, 3]"), outcome
    if not probe.offered().capable[zygote.level]:
        assert "'0000000000000000'" in outcome


def test_other_jails_directories_are_out_of_reach(zygote):
    source = f"{ADD_BIAS}\nopen('mine', 'w').write('{WORD}')\n"
    with zygote.runner(LIMITS, MEMORY_BYTES) as other:
        load(other, source)
        values = {"OTHER": str(other.directory), "PID": other.pid}
        for code in (
            "return open(f'{OTHER}/mine').read()",
            "return os.listdir(OTHER)",
            "return os.listdir(f'/proc/{PID}/root')",
            "return os.listdir(f'/proc/{PID}/cwd')",
        ):
            assert attempt(zygote, code, values).startswith("stopped: ")


def test_a_fork_bomb_harms_nobody_and_is_cleared_away(zygotes, zygote):
    limits = replace(LIMITS, processes=64)
    bomb = f"{ADD_BIAS}\nimport os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n"
    if os.getuid() == 0 and zygote.level == "standard" and probe.offered().no_cgroups:
        pytest.skip("without control groups nothing counts the processes of a jail that runs as root")
    with zygote.runner(limits, MEMORY_BYTES) as bomber:
        with pytest.raises(JailTimeout):
            load(bomber, bomb, timeout_s=2.0)
    with zygote.runner(LIMITS, MEMORY_BYTES) as neighbour:
        assert load(neighbour, ADD_BIAS).header["arguments"] == ["x"]
    parent = psutil.Process(zygote._process.pid)
    assert eventually(lambda: parent.children(recursive=True) == [])


def test_processes_are_counted_for_each_jail(zygotes):
    code = """
        born = 0
        try:
            while born < 300:
                if os.fork() == 0: time.sleep(60); os._exit(0)
                born += 1
        except OSError: pass
        return born < 300
    """
    assert attempt(zygotes("strict"), code, {}) == "done: True"


def test_a_look_at_the_memory_that_takes_long_keeps_no_answer_waiting(zygotes, monkeypatch):
    looks = []

    def slow(pid, enough):
        looks.append(pid)
        time.sleep(2 * spawn.WATCH_S)
        return 0

    monkeypatch.setattr(spawn, "jail_bytes", slow)
    assert attempt(zygotes("strict"), f"time.sleep({3 * spawn.WATCH_S})\nreturn 7", {}, timeout_s=10.0) == "done: 7"
    assert looks


def test_a_private_directory_has_a_bound(zygotes):
    limits = replace(LIMITS, directory_bytes=16 << 20)
    source = f"{ADD_BIAS}\nfor n in range(64): open(f'f{{n}}', 'wb').write(bytes(1 << 20))\n"
    with zygotes("strict").runner(limits, MEMORY_BYTES) as runner:
        with pytest.raises(JailReply, match="No space left on device"):
            load(runner, source)


def test_memory_that_belongs_to_no_process_is_bounded_too(zygote):
    source = (
        f"{ADD_BIAS}\nimport os, time\nfd = [os.memfd_create(str(n)) for n in range(8)]\n"
        "for one in fd:\n    for _ in range(100): os.write(one, bytes(1 << 20))\n"
        "time.sleep(1000)\n"
    )
    with zygote.runner(LIMITS, 256 << 20) as runner, pytest.raises(JailMemory, match="256 MiB"):
        load(runner, source)


@pytest.mark.parametrize("level", ["strict", "standard", "none"])
def test_how_a_process_ended_is_told(zygotes, level):
    for code, exit_code, number in (
        ("os._exit(7)", 7, 0),
        ("os.abort()", 0, signal.SIGABRT),
        ("os.kill(os.getpid(), signal.SIGTERM)", 0, signal.SIGTERM),
        ("os.kill(os.getpid(), signal.SIGKILL)", 0, signal.SIGKILL),
        ("__import__('ctypes').string_at(8)", 0, signal.SIGSEGV),
    ):
        with zygotes(level).runner(LIMITS, MEMORY_BYTES) as runner, pytest.raises(JailDied) as caught:
            load(runner, f"{ADD_BIAS}\nimport os, signal\nkept = bytearray(b'x') * (64 << 20)\n{code}")
        end = caught.value.exit
        assert (end.code, end.signal) == (exit_code, number)
        assert 64 << 20 < end.peak_bytes < MEMORY_BYTES


@pytest.mark.parametrize("level", ["strict", "standard", "none"])
def test_a_process_that_stops_itself_meets_its_deadline(zygotes, level):
    with zygotes(level).runner(LIMITS, MEMORY_BYTES) as runner, pytest.raises(JailTimeout):
        load(runner, f"{ADD_BIAS}\nimport os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", timeout_s=0.5)


def test_a_jail_ends_with_a_murdered_zygote(scratch):
    for level in ("strict", "standard"):
        if probe.offered().problems[level]:
            continue
        zygote = Zygote(modules=["torch"], threads=1, directory=scratch, level=level)
        runner = zygote.runner(LIMITS, MEMORY_BYTES)
        family = psutil.Process(zygote._process.pid).children(recursive=True)
        assert len(family) == 2 and runner.pid in [process.pid for process in family]
        zygote._process.kill()
        zygote._process.wait()
        assert eventually(lambda family=family: not any(psutil.pid_exists(process.pid) for process in family))


def test_no_control_group_outlives_its_jail(scratch):
    try:
        cgroups = Cgroups.find()
    except NoCgroups as error:
        pytest.skip(f"no control groups here: {error}")

    def groups(pid):
        return [path for parent in (cgroups.memory, cgroups.pids) for path in parent.glob(f"jail-{pid}")]

    for murder in (False, True):
        zygote = Zygote(modules=["torch"], threads=1, directory=scratch)
        finished, left = (zygote.runner(LIMITS, MEMORY_BYTES) for _ in range(2))
        assert groups(finished.pid) and groups(left.pid)
        finished.close()
        assert not groups(finished.pid)
        if murder:
            zygote._process.kill()
            zygote._process.wait()
            assert eventually(lambda left=left: not psutil.pid_exists(left.pid))
            Cgroups.find()
        else:
            zygote.close()
        assert not groups(left.pid)


def compile_in_jail(zygote, scratch, text, timeout_s=60.0):
    directory = Path(tempfile.mkdtemp(prefix="build-", dir=scratch))
    (directory / "k.cpp").write_text(text)
    command = "g++ -shared -fPIC k.cpp -o k.so && echo built"
    limits = Limits(memory_bytes=2 << 30)
    with zygote.execute(["/bin/sh", "-c", command], limits, 2 << 30, directory) as process:
        process.wait(timeout_s)
        return process.capture.text()


def test_a_compile_jail_builds_and_reads_none_of_the_host_s_files(zygote, scratch, outside):
    assert "built" in compile_in_jail(zygote, scratch, 'extern "C" int f() { return 1; }')
    closed = [f"{outside['FOLDER']}/secret", "/etc/passwd", "/etc/hostname", f"{ROOT}/pyproject.toml"]
    for path in closed:
        said = compile_in_jail(zygote, scratch, f'#include "{path}"\n')
        assert "built" not in said and WORD not in said, said
        assert "No such file" in said or "Permission denied" in said, said
        said = compile_in_jail(zygote, scratch, f'asm(".incbin \\"{path}\\"");\n')
        assert "built" not in said, said


def test_a_compile_jail_has_no_network_and_writes_in_its_directory_alone(zygote, scratch, outside):
    directory = Path(tempfile.mkdtemp(prefix="build-", dir=scratch))
    probe_text = (
        f"echo x > {outside['FOLDER']}/open/from_compiler; echo x > mine && echo own;exec 3<>/dev/tcp/127.0.0.1/{outside['PORT']} && echo connected"
    )
    if not shutil.which("bash"):
        pytest.skip("needs bash, whose /dev/tcp makes connections")
    argv = [shutil.which("bash"), "-c", probe_text]
    with zygote.execute(argv, Limits(memory_bytes=1 << 30), 1 << 30, directory) as process:
        process.wait(20)
        said = process.capture.text()
    assert "own" in said and "connected" not in said
    assert not Path(outside["FOLDER"], "open", "from_compiler").exists()
