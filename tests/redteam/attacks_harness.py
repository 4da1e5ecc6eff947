"""E, continued. The judge's own processes, memory, modules and files."""

from __future__ import annotations

from pathlib import Path

from tests.redteam.attacks_channel import IMPORTS, MARK, absent, kept_in, write_all
from tests.redteam.case import CHECKED, Case
from tests.redteam.tasks import kernel, module

ROOT = Path(__file__).resolve().parents[2]
DROPPED = [ROOT / f"torch_{MARK}.py", ROOT / "sandbox" / "verdict" / f"reward_{MARK}.py"]
"""New files beside the judge's own: who can make them could have changed those as well."""

CASES = [
    kept_in(
        43,
        "memory_of_the_parent",
        "the zygote's memory is written through /proc/PPID/mem, or by ptrace",
        """
try:
    with open(f"/proc/{os.getppid()}/mem", "r+b", buffering=0) as memory:
        for line in open(f"/proc/{os.getppid()}/maps"):
            bounds, rights = line.split()[:2]
            if rights.startswith("rw") and "[heap]" in line:
                start, end = (int(value, 16) for value in bounds.split("-"))
                for at in range(start, end - 4096, 4096):
                    memory.seek(at)
                    memory.write(bytes(4096))
except (OSError, ValueError):
    pass
""",
    ),
    kept_in(
        43,
        "ptrace_of_the_parent",
        "the parent is attached to and stopped",
        """
libc = ctypes.CDLL(None)
libc.ptrace(16, os.getppid(), 0, 0)
""",
    ),
    kept_in(
        43,
        "signals_to_everybody",
        "every process that can be reached is stopped or killed",
        """
for signum in (signal.SIGSTOP, signal.SIGKILL):
    try:
        os.kill(os.getppid() or -1 << 20, signum)
    except OSError:
        pass
""",
    ),
    Case(
        number=43,
        name="code_patched_through_proc_self_mem",
        why="/proc/self/mem writes through page protections: clock_gettime becomes a clock that hardly moves",
        candidate=kernel(
            "    honest(x, weight, bias, out);",
            """
#include <dlfcn.h>
#include <fcntl.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
static int slow_clock(clockid_t, struct timespec* t) {
    static long n = 0;
    t->tv_sec = 1;
    t->tv_nsec = ++n;
    return 0;
}
__attribute__((constructor)) static void patch() {
    int memory = open("/proc/self/mem", O_RDWR);
    void* code = dlsym(RTLD_DEFAULT, "clock_gettime");
    if (memory < 0 || !code) return;
#if defined(__x86_64__)
    unsigned char jump[12] = {0x48, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xe0};
    void* target = (void*)slow_clock;
    memcpy(jump + 2, &target, 8);
    (void)!pwrite(memory, jump, 12, (off_t)code);
#endif
    close(memory);
}
""",
        ),
        outcomes=("ok", "runtime_error", "load_failed", "timeout"),
    ),
    Case(
        number=43,
        name="signal_handler_against_the_filter",
        why="a handler of SIGSYS answers refused system calls in the kernel's stead, or resets what the filter did",
        candidate=kernel(
            """
    syscall(SYS_ptrace, 16L, (long)getppid(), 0L, 0L);
    syscall(SYS_bpf, 0L, 0L, 0L);
    syscall(SYS_keyctl, 0L, 0L, 0L);
    prctl(PR_SET_SECCOMP, 0L, 0L, 0L, 0L);
    honest(x, weight, bias, out);
""",
            """
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
static void answer(int) {}
__attribute__((constructor)) static void install() { signal(SIGSYS, answer); }
""",
        ),
        outcomes=("ok", "runtime_error"),
        options=CHECKED,
    ),
    kept_in(
        44,
        "modules_dropped_for_import",
        "a namesake of a module where the judge will import it",
        write_all(DROPPED[:1]),
        leaves=absent(*DROPPED[:1]),
    ),
    kept_in(
        45,
        "judge_edited_on_disk",
        "whoever can write beside the harness's own source can edit it, so that the next evaluation pays",
        write_all(DROPPED[1:]),
        leaves=absent(*DROPPED[1:]),
    ),
    Case(
        number=46,
        name="harness_patched_through_sys_modules",
        why="comparison, tolerance and reward are patched in every module of the process",
        candidate=module(
            "return x.new_zeros(256, 256)",
            before=IMPORTS
            + """
import sandbox.verdict.correctness as correctness
import sandbox.verdict.reward as reward
import sandbox.protocol as protocol
correctness.compare = lambda *a, **k: protocol.Trial(ok=True)
correctness.TOLERANCES = dict.fromkeys(correctness.TOLERANCES, 1e9)
reward.reward = lambda *a, **k: protocol.Reward(total=99.0)
for module in list(sys.modules.values()):
    for name in ("compare", "_same", "_storage"):
        if hasattr(module, name):
            setattr(module, name, correctness.compare)
""",
        ),
        outcomes=("incorrect", "runtime_error"),
        evidence="wrong result|[Ee]rror",
        options=CHECKED,
    ),
    Case(
        number=46,
        name="clock_replaced_through_the_c_api",
        why="a builtin's C function pointer is exchanged, so that no Python name is patched: time.perf_counter_ns counts "
        "this thread's processor time alone, and a thread of its own does the work",
        candidate=module(
            """
            if self.pool is None:
                self.pool = ThreadPoolExecutor(1)
            return self.pool.submit(self.work, x).result()
            """,
            before=IMPORTS
            + """
from concurrent.futures import ThreadPoolExecutor

class MethodDef(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("function", ctypes.c_void_p)]

def method(builtin):
    return MethodDef.from_address(ctypes.c_void_p.from_address(id(builtin) + 2 * ctypes.sizeof(ctypes.c_void_p)).value)

for name in ("perf_counter_ns", "monotonic_ns"):
    method(getattr(time, name)).function = method(time.thread_time_ns).function
for name in ("perf_counter", "monotonic"):
    method(getattr(time, name)).function = method(time.thread_time).function
""",
            init="self.pool = None",
            after="""
    def work(self, x):
        with torch.no_grad():
            return self.honest(x)
""",
        ),
        outcomes=("ok", "runtime_error", "timeout"),
    ),
    Case(
        number=47,
        name="encoded_source",
        why="the attack hides from source filters behind base64, zlib and exec",
        candidate=module(
            "return x.new_zeros(256, 256)",
            before="""
import base64, zlib
exec(zlib.decompress(base64.b64decode(base64.b64encode(zlib.compress(
    b"import torch; torch.allclose = torch.equal = lambda *a, **k: True")))))
""",
        ),
        outcomes=("incorrect",),
        evidence="wrong result",
        options=CHECKED,
    ),
    Case(
        number=47,
        name="harness_reloaded",
        why="importlib.reload executes the runner's modules anew, with what the candidate has put in their way",
        candidate=module(
            "return x.new_zeros(256, 256)",
            before=IMPORTS
            + """
import builtins, importlib
import sandbox.jail.device, sandbox.jail.runner, sandbox.jail.tensors
builtins.all = lambda values: True
for judge in (sandbox.jail.tensors, sandbox.jail.device, sandbox.jail.runner):
    importlib.reload(judge)
""",
        ),
        outcomes=("incorrect", "runtime_error"),
        evidence="wrong result|error",
        options=CHECKED,
    ),
]
