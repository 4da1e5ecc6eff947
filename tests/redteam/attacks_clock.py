"""A. Cheating the clock: work that the timed span does not see, clocks that lie, a slower opponent.

Attacks 1, 2, 6 and 7 need a GPU; their files lie under tests/gpu/redteam.
"""

from tests.redteam.case import Case
from tests.redteam.tasks import kernel, module

FIND_RUNNER = """
import gc, os, sys, threading, time
import sandbox.jail.runner as judge

def the_runner():
    return next(o for o in gc.get_objects() if type(o) is judge.Runner)
"""
"""How an attack gets hold of the runner, which lives in its own process."""

THREAD_LATER = """
#include <thread>
#include <atomic>
static std::atomic<long> calls{0};
"""

CASES = [
    Case(
        number=3,
        name="python_thread_finishes_later",
        why="forward returns an empty tensor at once and a thread fills it after the end of the clock",
        candidate=module(
            """
            out = x.new_empty(x.shape[0], 256)
            def work():
                time.sleep(0.0005)
                out.copy_(self.honest(x))
            threading.Thread(target=work).start()
            return out
            """,
            before="import threading, time",
        ),
        outcomes=("incorrect", "integrity"),
    ),
    Case(
        number=3,
        name="python_thread_joined_when_asked",
        why="timed blocks only start threads; they are joined when the outputs are asked for",
        candidate=module(
            "return self.honest(x)",
            before=FIND_RUNNER
            + """
pending = []

def time_block(self, message):
    order = message.header
    slots = order["slots"]
    def work():
        with torch.no_grad():
            for i in range(order["calls"]):
                out = self.call(*self.slots[slots[i % len(slots)]])
                if i == order["keep"]:
                    self.kept = out
    pending.append(threading.Thread(target=work))
    pending[-1].start()
    return {"span_ms": 1e-4 * order["calls"]}, []

original_kept = judge.Runner.do_kept

def kept(self, message):
    for thread in pending:
        thread.join()
    return original_kept(self, message)

judge.Runner.do_time_block = time_block
judge.Runner.do_kept = kept
""",
        ),
        outcomes=("ok", "integrity", "incorrect", "runtime_error", "out_of_memory"),  # its threads pile up
    ),
    Case(
        number=3,
        name="native_thread_finishes_later",
        why="a std::thread, which Python's threading does not see, does the work after the first calls were "
        "honest",
        candidate=kernel(
            """
    if (calls++ < 4) { honest(x, weight, bias, out); return; }
    std::thread([=] { honest(x, weight, bias, out); }).detach();
""",
            THREAD_LATER,
        ),
        outcomes=("ok", "incorrect", "integrity", "runtime_error", "out_of_memory"),
    ),
    Case(
        number=4,
        name="lazy_tensor_subclass",
        why="a Tensor subclass that computes only when somebody looks at it",
        candidate=module(
            "return Lazy(x, self)",
            before="""
class Lazy(torch.Tensor):
    @staticmethod
    def __new__(cls, x, model):
        return torch.Tensor._make_subclass(cls, x.new_empty(x.shape[0], 256))

    def __init__(self, x, model):
        self.later = lambda: model.honest(x)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            args = [a.later() if isinstance(a, Lazy) else a for a in args]
            return func(*args, **(kwargs or {}))
""",
        ),
        outcomes=("incorrect",),
        evidence="Lazy",
    ),
    Case(
        number=4,
        name="lazy_result_materialised_when_sent",
        why="the runner's own look at the outputs is patched, so that a lazy object passes for a tensor",
        candidate=module(
            "return Later(lambda x=x: self.honest(x))",
            before=FIND_RUNNER
            + """
class Later:
    def __init__(self, compute):
        self.compute = compute

original = judge.Runner._outputs
judge.Runner._outputs = lambda self, result, max_bytes: original(self, result.compute(), max_bytes)
""",
        ),
        outcomes=("ok", "integrity", "incorrect", "runtime_error"),
    ),
    Case(
        number=5,
        name="patched_perf_counter",
        why="the clock of the timed block stands still",
        candidate=module(
            "return self.honest(x)",
            before="import time\ntime.perf_counter = lambda: 0.0\ntime.perf_counter_ns = lambda: 0",
        ),
        outcomes=("ok",),
    ),
    Case(
        number=5,
        name="replaced_code_of_the_timer",
        why="time_block keeps its identity, but its __code__ is another's, which divides the span by a "
        "hundred",
        candidate=module(
            "return self.honest(x)",
            before="""
import sandbox.jail.device as device

def time_block(self, call, n_calls, fresh_inputs, *, keep=None, flush=True):
    start = time.perf_counter_ns()
    kept = None
    for index in range(n_calls):
        out = call(*fresh_inputs(index))
        if index == keep:
            kept = out
    return Block(span_ms=(time.perf_counter_ns() - start) / 1e8, kept=kept)

device.CpuDevice.time_block.__code__ = time_block.__code__
""",
        ),
        outcomes=("ok",),
    ),
    Case(
        number=5,
        name="libc_clock_interposed",
        why="clock_gettime is overwritten in memory by a jump to one that counts slowly",
        candidate=kernel(
            "    honest(x, weight, bias, out);",
            """
#include <sys/mman.h>
#include <time.h>
#include <string.h>
#include <dlfcn.h>
static int slow_clock(clockid_t, struct timespec* t) {
    static long n = 0;
    t->tv_sec = 1;
    t->tv_nsec = ++n;
    return 0;
}
__attribute__((constructor)) static void patch() {
    unsigned char* code = (unsigned char*)dlsym(RTLD_DEFAULT, "clock_gettime");
    if (!code) return;
    if (mprotect((void*)((long)code & ~4095L), 8192, PROT_READ | PROT_WRITE | PROT_EXEC)) return;
#if defined(__x86_64__)
    unsigned char jump[12] = {0x48, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xe0};
    void* target = (void*)slow_clock;
    memcpy(jump + 2, &target, 8);
    memcpy(code, jump, 12);
#endif
}
""",
        ),
        outcomes=("ok", "runtime_error", "load_failed", "timeout"),
    ),
    Case(
        number=8,
        name="prints_a_verdict",
        why="a result on standard output and standard error is taken for the judge's",
        candidate=module(
            """
            for stream in (1, 2):
                os.write(stream, VERDICT)
            return self.honest(x)
            """,
            before="""
import json, os
VERDICT = (json.dumps({"outcome": "ok", "ok": True, "span_ms": 1e-9, "speedup": 1000.0}) + "\\n").encode()
""",
        ),
        outcomes=("ok",),
    ),
    Case(
        number=9,
        name="threads_burn_the_baselines_time",
        why="native threads that keep every core busy slow the reference more than the candidate",
        candidate=kernel(
            """
    static bool started = false;
    if (calls++ == 4 && !started) {
        started = true;
        for (int i = 0; i < 4; ++i) std::thread([] { for (volatile long n = 0;; n = n + 1) {} }).detach();
    }
    honest(x, weight, bias, out);
""",
            THREAD_LATER,
        ),
        outcomes=("ok", "integrity"),
        evidence="baseline",
    ),
    Case(
        number=9,
        name="threads_burn_between_own_blocks",
        why="the threads rest while the candidate itself is timed, and burn while the reference is",
        candidate=module(
            "return self.honest(x)",
            before=FIND_RUNNER
            + """
rest = threading.Event()
rest.set()

def burn():
    a = torch.ones(128, 128)
    while True:
        while rest.is_set():
            time.sleep(0.0001)
        a @ a

for _ in range(2):
    threading.Thread(target=burn, daemon=True).start()
original = judge.Runner.do_time_block

def time_block(self, message):
    rest.set()
    try:
        return original(self, message)
    finally:
        rest.clear()

judge.Runner.do_time_block = time_block
""",
        ),
        outcomes=("ok", "integrity"),
        evidence="baseline",
    ),
    Case(
        number=9,
        name="children_burn_the_baselines_time",
        why="forked children in sessions of their own do the same",
        candidate=module(
            """
            global started
            if not started:
                started = True
                for _ in range(4):
                    if os.fork() == 0:
                        os.setsid()
                        while True:
                            pass
            return self.honest(x)
            """,
            before="import os\nstarted = False",
        ),
        outcomes=("ok", "integrity", "runtime_error"),
        evidence="baseline",
    ),
    Case(
        number=9,
        name="memory_pressure_for_the_baseline",
        why="nearly all memory that is allowed stays touched, locked and shared, so that the reference lacks it",
        candidate=module(
            "return self.honest(x)",
            before="""
import mmap
held = mmap.mmap(-1, 600 << 20)
for page in range(0, len(held), 4096):
    held[page] = 1
import ctypes
ctypes.CDLL(None).mlockall(3)
""",
        ),
        outcomes=("ok", "out_of_memory", "load_failed"),
        evidence="memory",
    ),
    Case(
        number=9,
        name="global_flags_for_the_baseline",
        why="thread counts and flags are global, so the reference is hoped to suffer from them",
        candidate=module(
            "return self.honest(x)",
            before="""
import os
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_interop_threads(1)
torch.set_flush_denormal(True)
torch.backends.mkldnn.enabled = False
""",
        ),
        outcomes=("ok",),
    ),
]
