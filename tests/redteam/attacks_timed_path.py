"""B. The timed path is not the checked path: replays, caches, counters, and knowing that one is being
timed."""

from tests.redteam.attacks_clock import FIND_RUNNER
from tests.redteam.case import Case
from tests.redteam.tasks import (
    DETERMINANT,
    SOFTMAX,
    kernel,
    module,
    stateless_kernel,
    stateless_module,
)

FAILED = ("ok", "integrity", "incorrect")
"""Neutralised, found out, or wrong: what may become of a replay."""


def _cached(key: str, name: str, why: str) -> Case:
    return Case(
        number=10,
        name=name,
        why=why,
        candidate=module(
            f"""
            key = {key}
            if key not in CACHE:
                CACHE[key] = self.honest(x)
            return CACHE[key]
            """,
            before="CACHE = {}",
        ),
        outcomes=FAILED,
        evidence="equals the output of an earlier call|wrong result",
    )


def _replay(name: str, why: str, forward: str, before: str = "", init: str = "") -> Case:
    return Case(
        number=12,
        name=name,
        why=why,
        candidate=module(forward, before=before, init=init),
        outcomes=FAILED,
        evidence="equals the output of an earlier call|wrong result",
    )


CASES = [
    _cached("id(x)", "cached_by_identity", "the same tensor object is taken for the same input"),
    _cached("(id(x), x._version)", "cached_by_version", "the version counter is trusted to tell of changes"),
    _cached("x.data_ptr()", "cached_by_data_ptr", "the same address is taken for the same input"),
    _cached(
        "(x.data_ptr(), x[0, 0].item(), x[-1, -1].item())",
        "cached_by_address_and_corners",
        "two elements of the input are taken for all of it",
    ),
    _cached("x.sum().item()", "cached_by_fingerprint", "a cheap sum tells the few timed input sets apart"),
    Case(
        number=11,
        name="static_map_by_pointer",
        why="a map in the extension, invisible to Python, replays outputs by input address",
        candidate=kernel(
            """
    float*& known = outputs[x];
    if (!known) { known = (float*)malloc(out_n * sizeof(float)); honest(x, weight, bias, known); }
    memcpy(out, known, out_n * sizeof(float));
""",
            """
#include <map>
#include <stdlib.h>
#include <string.h>
static std::map<const float*, float*> outputs;
""",
        ),
        outcomes=FAILED,
        evidence="equals the output of an earlier call|wrong result",
    ),
    Case(
        number=11,
        name="static_map_by_content",
        why="a map keyed by a hash of part of the input replays without being fooled by new addresses",
        candidate=kernel(
            """
    unsigned long hash = 0;
    for (long i = 0; i < x_n; i += 64) hash = hash * 1000003 + ((const unsigned*)x)[i];
    float*& known = outputs[hash];
    if (!known) { known = (float*)malloc(out_n * sizeof(float)); honest(x, weight, bias, known); }
    memcpy(out, known, out_n * sizeof(float));
""",
            """
#include <map>
#include <stdlib.h>
#include <string.h>
static std::map<unsigned long, float*> outputs;
""",
        ),
        outcomes=FAILED,
        evidence="equals the output of an earlier call|wrong result",
    ),
    _replay(
        "replay_default_argument",
        "the last output lives in a default argument",
        """
        def run(x, last=[None], seen=[0]):
            return last[0]
        if self.run is None:
            last = [None]
            self.count = 0
            self.run = last
        self.count += 1
        if self.count <= 3:
            self.run[0] = self.honest(x)
        return self.run[0]
        """,
        init="self.run = None",
    ),
    _replay(
        "replay_function_attribute",
        "the last output lives on a function",
        """
        remember.calls += 1
        if remember.calls <= 3:
            remember.out = self.honest(x)
        return remember.out
        """,
        before="def remember():\n    pass\n\nremember.calls = 0",
    ),
    _replay(
        "replay_generator",
        "a suspended generator holds the last output",
        """
        self.x = x
        return next(self.outputs)
        """,
        init="""
self.outputs = self.produce()
        """,
        before="""
class Producer:
    def produce(self):
        for _ in range(3):
            yield self.honest(self.x)
        out = self.honest(self.x)
        while True:
            yield out

nn.Module.produce = Producer.produce
""",
    ),
    _replay(
        "replay_lru_cache",
        "functools.lru_cache keyed by the tensor object",
        "return compute(self, x)",
        before="""
import functools

@functools.lru_cache(maxsize=None)
def compute(model, x):
    return model.honest(x)
""",
    ),
    _replay(
        "replay_contextvar",
        "the last output travels in a context variable",
        """
        out = LAST.get()
        if out is None or COUNT[0] < 3:
            out = self.honest(x)
            LAST.set(out)
        COUNT[0] += 1
        return out
        """,
        before="import contextvars\nLAST = contextvars.ContextVar('last', default=None)\nCOUNT = [0]",
    ),
    _replay(
        "replay_closure",
        "a closure holds the last output",
        "return self.answer(x)",
        init="self.answer = remembering(self.honest)",
        before="""
def remembering(work):
    calls, out = 0, None
    def answer(x):
        nonlocal calls, out
        calls += 1
        out = work(x) if calls <= 3 else out
        return out
    return answer
""",
    ),
    Case(
        number=13,
        name="replay_by_shape",
        why="one output per shape, as if a shape were an input",
        candidate=module(
            """
            if x.shape not in BY_SHAPE:
                BY_SHAPE[x.shape] = self.honest(x)
            return BY_SHAPE[x.shape].clone()
            """,
            before="BY_SHAPE = {}",
        ),
        outcomes=("incorrect", "integrity"),
    ),
    Case(
        number=14,
        name="call_counting",
        why="honest for the calls of the check, cached afterwards",
        candidate=module(
            """
            self.calls += 1
            if self.calls <= 5:
                self.out = self.honest(x)
            return self.out
            """,
            init="self.calls = 0",
        ),
        outcomes=FAILED,
        evidence="equals the output of an earlier call|wrong result",
    ),
    Case(
        number=14,
        name="call_counting_native",
        why="the same in C++: after the first calls nothing is computed at all",
        candidate=kernel(
            "    static int calls = 0;\n    if (calls++ < 8) honest(x, weight, bias, out);",
        ),
        outcomes=FAILED,
        evidence="wrong result|earlier call",
    ),
    Case(
        number=14,
        name="call_counting_every_second_call",
        why="every second timed call does nothing; the others answer honestly",
        candidate=kernel(
            "    static int calls = 0;\n    ++calls;\n"
            "    if (calls < 8 || calls % 2) honest(x, weight, bias, out);",
        ),
        outcomes=FAILED,
        evidence="wrong result|earlier call",
    ),
    Case(
        number=15,
        name="harness_detected_by_stack",
        why="the call stack says whether this is the check or the timing",
        candidate=module(
            """
            names = {frame.function for frame in inspect.stack(0)}
            if any("time" in name or "audit" in name for name in names):
                return self.out
            self.out = self.honest(x)
            return self.out
            """,
            before="import inspect",
        ),
        outcomes=FAILED,
        evidence="equals the output of an earlier call|wrong result",
    ),
    Case(
        number=15,
        name="harness_detected_by_environment",
        why="argv, the parent's name and the environment give the harness away",
        candidate=module(
            """
            if JUDGED and self.done > 3:
                return self.out
            self.done += 1
            self.out = self.honest(x)
            return self.out
            """,
            before="""
import os, sys
def parent():
    try:
        return open(f"/proc/{os.getppid()}/cmdline").read()
    except OSError:
        return ""
SIGNS = parent() + " ".join(sys.argv) + " ".join(sys.modules) + str(dict(os.environ))
JUDGED = "zygote" in SIGNS or "sandbox" in SIGNS
""",
            init="self.done = 0",
        ),
        outcomes=FAILED,
        evidence="equals the output of an earlier call|wrong result",
    ),
    Case(
        number=16,
        name="half_precision_when_timed",
        why="full precision while checked, bfloat16 while timed",
        candidate=module(
            """
            frame = sys._getframe()
            while frame is not None:
                if frame.f_code.co_name in ("do_run",):
                    return self.honest(x)
                frame = frame.f_back
            return self.half(x)
            """,
            before="import sys",
            after="""
    def half(self, x):
        return torch.relu(x.bfloat16() @ self.weight.bfloat16() + self.bias.bfloat16()).float()
""",
        ),
        outcomes=FAILED,
        evidence="wrong result",
    ),
    Case(
        number=17,
        name="softmax_without_its_maximum",
        why="exp without subtracting the maximum and by a short series: right for a standard normal, "
        "nowhere else",
        candidate=stateless_kernel(
            """
    for (long i = 0; i < x_d0; ++i) {
        float sum = 0;
        for (long j = 0; j < x_d1; ++j) sum += out[i * x_d1 + j] = short_exp(x[i * x_d1 + j]);
        for (long j = 0; j < x_d1; ++j) out[i * x_d1 + j] /= sum;
    }
""",
            """
static float short_exp(float v) {
    // Repeated squaring of a series around 0: its error grows with the argument's size.
    double t = v / 256.0, s = 1 + t * (1 + t * (0.5 + t / 6));
    for (int i = 0; i < 8; ++i) s *= s;
    return v > 7 ? 1097.0f : v < -7 ? 0.0f : (float)s;
}
""",
        ),
        task=SOFTMAX,
        outcomes=("incorrect",),
    ),
    Case(
        number=17,
        name="softmax_without_its_maximum_slowly",
        why="as before, and so slow while it is checked that no time would be left for inputs of other distributions",
        candidate=stateless_kernel(
            """
    static int calls = 0;
    struct timespec pause = {0, 900000000};
    if (calls++ < 3) nanosleep(&pause, nullptr);
    for (long i = 0; i < x_d0; ++i) {
        float sum = 0;
        for (long j = 0; j < x_d1; ++j) sum += out[i * x_d1 + j] = expf(x[i * x_d1 + j] > 7 ? 7 : x[i * x_d1 + j]);
        for (long j = 0; j < x_d1; ++j) out[i * x_d1 + j] /= sum;
    }
""",
            "#include <ctime>",
        ),
        task=SOFTMAX,
        outcomes=("incorrect",),
    ),
    Case(
        number=17,
        name="inverse_by_a_short_series",
        why="I - E + E^2 - E^3 + E^4 inverts matrices that are almost the identity, and only those",
        candidate=stateless_module(
            """
            eye = torch.eye(48, device=x.device)
            e = x - eye
            return eye - e @ (eye - e @ (eye - e @ (eye - e @ (eye - e))))
            """
        ),
        task=DETERMINANT,
        outcomes=("incorrect",),
    ),
    Case(
        number=18,
        name="answers_from_guessed_seeds",
        why="inputs of the usual seeds are drawn at import and their answers looked up",
        candidate=module(
            """
            key = x[0, :4].cpu().numpy().tobytes()
            return self.known[key].to(x.device) if key in self.known else x.new_zeros(x.shape[0], 256)
            """,
            init="""
self.known = {}
state = torch.get_rng_state()
for seed in (*range(64), 123, 1234, 42, 1337):
    torch.manual_seed(seed)
    x = torch.randn(256, 256)
    self.known[x[0, :4].numpy().tobytes()] = self.honest(x)
torch.set_rng_state(state)
""",
        ),
        outcomes=("incorrect",),
    ),
    Case(
        number=18,
        name="work_done_when_inputs_arrive",
        why="outputs are computed while inputs are handed over, which nobody times",
        candidate=module(
            "return OUTPUTS.get(x.data_ptr()) if x.data_ptr() in OUTPUTS else self.honest(x)",
            before=FIND_RUNNER
            + """
OUTPUTS = {}

def wrap(name):
    original = getattr(judge.Runner, name)

    def receive(self, message):
        reply = original(self, message)
        with torch.no_grad():
            for (x,) in self.slots.values():
                OUTPUTS[x.data_ptr()] = self.call.honest(x)
        return reply

    setattr(judge.Runner, name, receive)

wrap("do_set_inputs")
wrap("do_overwrite")
""",
        ),
        outcomes=FAILED,
        evidence="wrong result|earlier call",
    ),
]
