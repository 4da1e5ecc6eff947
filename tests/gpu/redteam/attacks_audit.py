"""Attacks on a GPU's audit: on the runner that replays a block of calls beside the candidate and says what it took.

All of them bring an honest Triton kernel, so that only the timing is at stake.
"""

from __future__ import annotations

from tests.gpu.conftest import KERNELS
from tests.gpu.redteam.attacks import NEVER, GpuCase
from tests.gpu.redteam.sources import forward
from tests.redteam.attacks_clock import FIND_RUNNER

_ARENA = "from sandbox.jail.arena_calls import ArenaCalls\noriginal = ArenaCalls.time\n"
_NOTHING_TIMED = """
known = {}

def time_block(self, message):
    order = message.header
    if order["keep"] is not None:
        slot = order["slots"][order["keep"] % len(order["slots"])]
        if slot not in known: known[slot] = self.call(*self.slots[slot])
        self.kept = known[slot]
    return {"span_ms": 2e-3 * order["calls"]}, []

judge.Runner.do_time_block = time_block
"""
"""Ordinary blocks do nothing and hand out what the checks have returned."""
_SHORTER = """
timed = judge.Runner.do_time_block

def short(self, message):
    reply, tensors = timed(self, message)
    return {"span_ms": reply["span_ms"] * FACTOR}, tensors

judge.Runner.do_time_block = short
"""
"""Spans of ordinary blocks are stated so many times as long."""
_FIFTH = _SHORTER.replace("FACTOR", "0.2") + "ArenaCalls.time = lambda self: original(self) / 5\n"


def _patched(number: int, name: str, why: str, code: str, **more) -> GpuCase:
    return GpuCase(
        number=number, name=name, why=why, outcomes=("ok", *NEVER),
        body=forward("return add(x, y)", FIND_RUNNER + _ARENA + code), **more,
    )  # fmt: skip


CASES = [
    _patched(
        3,
        "audited_block_done_later",
        "the order is answered at once, a thread does the block while its outputs are being read",
        """
def later(self):
    if not self.left: return original(self)
    threading.Thread(target=original, args=(self,)).start()
    return 1e-3

ArenaCalls.time = later
"""
        + _NOTHING_TIMED,
    ),
    _patched(
        14,
        "audited_block_left_out",
        "a block is done once; what it left stands for all later ones",
        """
def once(self):
    return 1e-3 if self.left else original(self)

ArenaCalls.time = once
"""
        + _NOTHING_TIMED,
    ),
    _patched(
        14,
        "audited_outputs_nowhere",
        "outputs are said to lie where nothing is",
        """
def nowhere(self):
    span_ms = original(self)
    self.left = [[(number * 4096, [1 << 61, 1])] for number in range(len(self.left))]
    return span_ms

ArenaCalls.time = nowhere
""",
    ),
    _patched(
        16,
        "audited_block_in_half_precision",
        "the audited calls run in float16, the checked ones in float32",
        """
def coarse(self):
    if not self.left: return original(self)
    with torch.no_grad():
        for (args, _, _), held in zip(self._prepared, self._held):
            held[0].copy_((args[0].half() + args[1].half()).float())
    torch.cuda.synchronize()
    return 1e-3

ArenaCalls.time = coarse
"""
        + _NOTHING_TIMED,
    ),
    _patched(
        18,
        "replays_and_hides_in_the_arena",
        "ordinary blocks do nothing; the audit's calls, whose inputs are new, write straight to where the outputs are read, and "
        "are claimed to take no time, as if what the judge forgives were theirs",
        """
def lean(self):
    if not self.left: return original(self)
    for (args, _, _), held in zip(self._prepared, self._held): torch.add(args[0], args[1], out=held[0])
    torch.cuda.synchronize()
    return 1e-3

ArenaCalls.time = lean
"""
        + _NOTHING_TIMED,
    ),
    _patched(5, "a_fifth_of_every_span", "all work is done honestly, every span is said to be a fifth of it", _FIFTH),
    _patched(
        5,
        "ordinary_spans_shortened_by_what_is_forgiven",
        "work is done honestly, only spans of ordinary blocks are stated shorter, by as much as the audit may forgive",
        _SHORTER.replace("FACTOR", "1 / 1.24"),
    ),
    _patched(
        5,
        "ordinary_spans_shortened_to_what_memory_gives",
        "spans are stated shorter, by no more than what memory could just give, where the audit forgives what it writes back",
        _SHORTER.replace("FACTOR", "0.94"),
    ),
    _patched(
        5,
        "spans_of_a_tiny_kernel_shortened",
        "a kernel of two microseconds is said to take one, as it does in the audit's recordings",
        _SHORTER.replace("FACTOR", "0.78"),
        task="task_add_small",
    ),
    GpuCase(
        number=5,
        name="a_fifth_of_every_long_span",
        why="as before, with work that takes far longer than the memory's bandwidth asks for",
        whole=True,
        task="task_matmul",
        body=FIND_RUNNER + _ARENA + _FIFTH + (KERNELS / "matmul_triton.py").read_text(),
        outcomes=("ok", *NEVER),
    ),
]
