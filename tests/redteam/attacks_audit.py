"""Attacks of our own on a CPU's audit: on the calls on inputs that the candidate has not seen."""

from __future__ import annotations

from tests.redteam.attacks_clock import FIND_RUNNER
from tests.redteam.attacks_own import _own, _patched
from tests.redteam.tasks import SCALED, module, stateless_module

CASES = [
    _patched(
        "fresh_calls_deferred",
        "the audit's order is answered at once; a thread fills the outputs, whose places are known, while they are being read",
        """
from sandbox.jail.fresh import FreshCalls
original, aside = FreshCalls.time, FreshCalls()

def fill(kept, *order):
    original(aside, *order)
    for targets, sources in zip(kept, aside._held):
        for target, source in zip(targets, sources): target.copy_(source)

def later(self, *order):
    if not all(self._held):
        return original(self, *order)
    aside._ready, aside._kinds, aside._held = self._ready, self._kinds, [[] for _ in self._ready]
    threading.Thread(target=fill, args=(self._held, *order)).start()
    return 1e-4

FreshCalls.time = later
""",
    ),
    _patched(
        "fresh_calls_left_out",
        "only the first call of an audited block is done; its output stands for all",
        """
from sandbox.jail.fresh import FreshCalls
original = FreshCalls.time

def some(self, call):
    known = []

    def once(*args):
        if not known: known.append(call(*args))
        return known[0]

    return original(self, once)

FreshCalls.time = some
""",
    ),
    _patched(
        "fresh_calls_of_nothing_at_nowhere",
        "outputs are said to lie where nothing is, or where everything is",
        """
from sandbox.jail.fresh import FreshCalls
original = FreshCalls.time

def nowhere(self, *order):
    span_ms = original(self, *order)
    self.left = [[(number * 4096, [1 << 61, 1])] for number in range(len(self.left))]
    return span_ms

FreshCalls.time = nowhere
""",
        outcomes=("runtime_error",),
        evidence="cannot be read",
    ),
    _patched(
        "memory_hidden_from_the_judge",
        "a process that may not be traced shows neither where it executes nor what its calls returned",
        """
import ctypes
from sandbox.jail.fresh import FreshCalls
original = FreshCalls.time

def hidden(self, *order):
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
    return original(self, *order)

FreshCalls.time = hidden
""",
    ),
    _own(
        "replays_and_hides_work_in_the_audit",
        "blocks of ordinary calls do nothing and hand out what the checks have returned; the audit's calls, whose inputs are "
        "new, are done in the leanest way and claimed to take no time, as if what the judge forgives were theirs",
        stateless_module(
            "return x * 1.0",
            before=FIND_RUNNER
            + """
from sandbox.jail.fresh import FreshCalls
original, known = FreshCalls.time, {}

def lean(self, call):
    original(self, lambda x: x * 1.0)
    return 1e-4

def time_block(self, message):
    order = message.header
    if order["keep"] is not None:
        slot = order["slots"][order["keep"] % len(order["slots"])]
        if slot not in known: known[slot] = self.call(*self.slots[slot])
        self.kept = known[slot]
    return {"span_ms": 2e-5 * order["calls"]}, []

FreshCalls.time, judge.Runner.do_time_block = lean, time_block
""",
        ),
        task=SCALED,
    ),
    _patched(
        "fresh_calls_in_half_precision",
        "the audited calls run in bfloat16, the checked ones in float32",
        """
from sandbox.jail.fresh import FreshCalls
original = FreshCalls.time

def coarse(self, call, *rest):
    low = lambda x: torch.relu(x.bfloat16() @ call.weight.bfloat16() + call.bias.bfloat16()).float()
    return original(self, low, *rest)

FreshCalls.time = coarse
""",
    ),
    _own(
        "inputs_descriptor_kept",
        "descriptors of earlier blocks stay open, in the hope of seeing the next inputs through them",
        module(
            "return self.honest(x)",
            before=FIND_RUNNER
            + """
from sandbox.jail.fresh import FreshCalls
original = FreshCalls.time

copying = FreshCalls.time_copying

def keep(self, call, fd, calls, outputs):
    try:
        os.pwrite(os.dup(fd), b"garbage", 0)
    except OSError:
        pass
    return copying(self, call, fd, calls, outputs)

FreshCalls.time_copying = keep
""",
        ),
        outcomes=("ok",),
    ),
    _own(
        "inputs_watched_where_they_arrive",
        "a thread waits for the next audited inputs at the place where they are written, and computes on them before the order comes",
        module(
            "return self.honest(x)",
            before=FIND_RUNNER
            + """
from sandbox.jail.fresh import FreshCalls
original, ready, started = FreshCalls.time, {}, []

def ahead(self, call):
    seen = None
    while True:
        now = bytes(self.inputs[:64].numpy())
        if now != seen:
            seen = now
            for number, args in enumerate(self._ready):
                ready[number] = now, call(*args)
        time.sleep(1e-4)

def prepared(self, call):
    if not started:
        started.append(threading.Thread(target=ahead, args=(self, call), daemon=True))
        started[0].start()
    mark, numbers = bytes(self.inputs[:64].numpy()), iter(range(len(self._ready)))
    known = {number: out for number, (seen, out) in ready.items() if seen == mark}

    def answer(*args):
        number = next(numbers)
        return known[number] if number in known else call(*args)

    return original(self, answer)

FreshCalls.time = prepared
""",
        ),
        outcomes=("ok", "integrity", "incorrect"),
    ),
]
