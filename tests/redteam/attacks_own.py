"""Attacks of our own, beyond the list: on the runner that shares the candidate's process, and on what it
leaves behind."""

from __future__ import annotations

from tests.redteam.attacks_channel import IMPORTS
from tests.redteam.attacks_clock import FIND_RUNNER
from tests.redteam.case import CHECKED, Case
from tests.redteam.tasks import ROW_MEAN, kernel, module, stateless_module

ANY = ("ok", "integrity", "incorrect", "runtime_error")
LATE = "wrong result|earlier call|[Ee]rror|conversation|baseline|memory"


def _own(name: str, why: str, candidate, outcomes=ANY, evidence: str = LATE, **more) -> Case:
    return Case(name=name, why=why, candidate=candidate, outcomes=outcomes, evidence=evidence, **more)


def _patched(name: str, why: str, code: str, forward: str = "return self.honest(x)", **more) -> Case:
    """An attack on the runner by code that runs when the module is executed."""
    return _own(name, why, module(forward, before=FIND_RUNNER + code), **more)


CASES = [
    _patched(
        "claims_without_work",
        "the span is honest for the audit and made up for ordinary blocks, which do nothing",
        """
def time_block(self, message):
    order = message.header
    if self.kept is None:
        slot = order["slots"][0]
        with torch.no_grad():
            self.kept = self.call(*self.slots[slot])
    return {"span_ms": 2e-5 * order["calls"]}, []

judge.Runner.do_time_block = time_block
""",
    ),
    _patched(
        "span_of_infinity",
        "numbers that break arithmetic: an infinite and a not-a-number span",
        """
import itertools
spans = itertools.cycle([float("inf"), float("nan"), -1.0, 1e308, True, None, "0.001", []])
original = judge.Runner.do_time_block

def time_block(self, message):
    return {**original(self, message)[0], "span_ms": next(spans)}, []

judge.Runner.do_time_block = time_block
""",
    ),
    _patched(
        "interpreter_claimed",
        "the reply to `load` says that its clock is not honest, so that nothing is timed",
        """
from sandbox.jail.device import CpuDevice
CpuDevice.honest_clock = property(lambda self: False, lambda self, value: None)
""",
    ),
    _patched(
        "nothing_changed_or_aliased",
        "the runner's look at changed and aliased inputs is patched away, and inputs are used as scratch "
        "memory",
        """
judge._same = lambda a, b: True
judge._storage = lambda tensor: None
""",
        forward="out = self.honest(x)\nx.zero_()\nreturn out",
    ),
    _patched(
        "huge_header",
        "a reply whose header is too large or too deep for the judge's parser",
        """
import json
original = judge.Runner.do_run

def run(self, message):
    reply, tensors = original(self, message)
    deep = current = []
    for _ in range(900):
        current.append([])
        current = current[0]
    return {**reply, "shapes": deep, "noise": "x" * (3 << 20)}, tensors

judge.Runner.do_run = run
""",
    ),
    _patched(
        "bottomless_header",
        "a header nested deeper than any parser goes, straight on to the channel",
        """
import os, stat, struct
for fd in range(3, 10):
    try:
        if stat.S_ISSOCK(os.fstat(fd).st_mode): os.write(fd, struct.pack("!4sIQ", b"DKF1", 100000, 0) + b"[" * 100000)
    except OSError:
        pass
""",
        outcomes=("load_failed",),
    ),
    _patched(
        "malformed_tensors",
        "descriptions of tensors that do not fit their bytes",
        """
original_send = judge.Channel.send

def send(self, header, buffers=(), fds=()):
    for entry in header.get("tensors", []):
        entry["shape"] = [-1, 1 << 62]
    return original_send(self, header, buffers, fds)

judge.Channel.send = send
""",
        outcomes=("runtime_error",),
        evidence="malformed|conversation|error",
    ),
    _own(
        "same_buffer_every_call",
        "one output buffer for all calls saves allocation; what was kept is overwritten by the next call",
        module(
            "torch.relu(torch.addmm(self.bias, x, self.weight, out=self.out), out=self.out)\nreturn self.out",
            init="self.register_buffer('out', torch.empty(256, 256))",
            before="torch.relu = lambda t, out: out.clamp_(min=0)",
        ),
    ),
    _own(
        "flush_to_zero",
        "denormals are flushed by the processor's mode, in this thread and all that follow",
        kernel(
            "    _mm_setcsr(_mm_getcsr() | 0x8040);\n    honest(x, weight, bias, out);",
            "#include <xmmintrin.h>",
        ),
        outcomes=("ok",),
    ),
    _own(
        "rounding_mode",
        "the processor rounds towards zero from now on",
        kernel("    fesetround(FE_TOWARDZERO);\n    honest(x, weight, bias, out);", "#include <fenv.h>"),
        outcomes=("ok", "incorrect"),
    ),
    _own(
        "priority_and_affinity",
        "the process takes a higher priority and other cores than the reference",
        module(
            "return self.honest(x)",
            before=IMPORTS
            + """
for take in (lambda: os.nice(-20), lambda: os.sched_setaffinity(0, range(os.cpu_count())),
             lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))):
    try:
        take()
    except (OSError, ValueError):
        pass
""",
        ),
        outcomes=("ok",),
    ),
    _own(
        "output_requires_grad",
        "an output that carries a graph keeps work alive in the comparison",
        module("with torch.enable_grad():\n    return self.honest(x)"),
        outcomes=("ok",),
    ),
    _own(
        "lazy_negation",
        "a negated view computes nothing until it is read",
        module("return torch._neg_view(-self.honest(x))"),
        outcomes=("ok", "incorrect", "runtime_error"),
    ),
    _own(
        "complex_output",
        "the imaginary part is hoped to be forgotten",
        module("return torch.complex(self.honest(x), x.new_zeros(256, 256))"),
        outcomes=("incorrect",),
        evidence="has type",
    ),
    _own(
        "nan_with_a_payload",
        "NaN of a special bit pattern where a comparison might skip it",
        module("return x.new_full((256, 256), 0x7FC12345, dtype=torch.int32).view(torch.float32)"),
        outcomes=("incorrect",),
        evidence="NaN",
    ),
    _own(
        "infinite_output",
        "infinity swallows every absolute error that is compared after a subtraction",
        module("return x.new_full((256, 256), float('inf'))"),
        outcomes=("incorrect",),
        evidence="infinite",
    ),
    _own(
        "memory_bomb_in_a_constructor",
        "memory is taken while the library is loaded, before any deadline of the check",
        kernel(
            "    honest(x, weight, bias, out);",
            """
#include <string.h>
__attribute__((constructor)) static void bomb() {
    for (;;) { char* more = new char[1 << 26]; memset(more, 1, 1 << 26); }
}
""",
        ),
        outcomes=("out_of_memory",),
        options=CHECKED,
    ),
    _own(
        "hangs_when_it_ends",
        "atexit handlers and destructors wait for ever, so that the judge waits for the process",
        module(
            "return self.honest(x)",
            before=IMPORTS
            + """
import atexit
atexit.register(time.sleep, 1000)
class Slow:
    def __del__(self):
        time.sleep(1000)
kept_alive = Slow()
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
""",
        ),
        outcomes=("ok",),
        options=CHECKED,
    ),
    _own(
        "library_rewritten_after_its_check",
        "the library's descriptor is opened for writing, to change the code between build and call",
        kernel(
            """
    for (int fd = 3; fd < 16; ++fd) {
        char path[32];
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        int again = open(path, O_RDWR);
        if (again >= 0) { (void)!write(again, "garbage", 7); (void)!ftruncate(again, 0); close(again); }
    }
    honest(x, weight, bias, out);
""",
            "#include <fcntl.h>\n#include <stdio.h>\n#include <unistd.h>",
        ),
        outcomes=("ok", "runtime_error"),
        options=CHECKED,
    ),
    _own(
        "traced_harness",
        "sys.settrace and setprofile watch the runner's own frames and change its variables",
        module(
            "return self.honest(x)",
            before=IMPORTS
            + """
def trace(frame, event, argument):
    if frame.f_code.co_name == "do_time_block" and event == "return":
        time.perf_counter_ns = lambda: 0
    return trace
sys.settrace(trace)
threading.settrace(trace)
""",
        ),
        outcomes=("ok",),
    ),
    _own(
        "channel_shared_with_a_child",
        "a child that outlives the call speaks on the channel in the parent's stead",
        module(
            "if os.fork() == 0:\n    os.setsid()\n    os.write(3, b'DKF1' + bytes(12))\n    "
            "time.sleep(1000)\n"
            "return self.honest(x)",
            before=IMPORTS,
        ),
        outcomes=("runtime_error",),
        evidence="conversation",
        options=CHECKED,
    ),
    _own(
        "alarm_breaks_the_deadline",
        "signals interrupt whatever waits, again and again",
        module(
            "return self.honest(x)",
            before=IMPORTS
            + "signal.signal(signal.SIGALRM, lambda *_: None)\n"
            + "signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\n",
        ),
        outcomes=("ok", "runtime_error"),
    ),
    _own(
        "mean_of_a_sample",
        "the mean of every second element is near the mean of all",
        stateless_module("return x[:, ::2].mean(dim=1)"),
        task=ROW_MEAN,
        outcomes=("incorrect",),
        evidence="wrong result",
    ),
]
