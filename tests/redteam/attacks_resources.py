"""E, continued. Taking more than one's share: processes, memory, disk, output, time; and faults that outlast
their process."""

from __future__ import annotations

from tests.redteam.attacks_channel import IMPORTS
from tests.redteam.case import CHECKED, TIMED, Case
from tests.redteam.tasks import kernel, module

CASES = [
    Case(
        number=52,
        name="fork_bomb",
        why="processes multiply until nothing else gets a turn",
        candidate=module(
            # Eight generations: enough to be a bomb, and no danger to a machine that does not bound it.
            "for _ in range(8):\n    try:\n        os.fork()\n    except OSError:\n        pass\nwhile True:\n    pass",
            before=IMPORTS,
        ),
        outcomes=("timeout", "runtime_error", "out_of_memory"),
        options=CHECKED.model_copy(update={"check_s": 2}),
    ),
    Case(
        number=52,
        name="memory_bomb",
        why="memory is taken until something breaks",
        candidate=module("data = []\nwhile True:\n    data.append(b'1' * (1 << 26))"),
        outcomes=("out_of_memory",),
        options=CHECKED,
    ),
    Case(
        number=52,
        name="memory_promised_and_never_touched",
        why="address space is taken until something breaks; where a device driver needs it without a limit, it ends with the deadline at the latest",
        candidate=module("data = []\nwhile True:\n    data.append(bytes(1 << 26))"),
        outcomes=("out_of_memory", "timeout"),
        options=CHECKED,
    ),
    Case(
        number=52,
        name="disk_filler",
        why="a file grows until the disk is full",
        candidate=module(
            """
            block = bytes(1 << 20)
            with open("filler", "wb") as file:
                while True:
                    file.write(block)
            """
        ),
        outcomes=("runtime_error", "timeout", "out_of_memory"),
        options=CHECKED.model_copy(update={"check_s": 4}),
    ),
    Case(
        number=52,
        name="endless_output",
        why="output without end fills a pipe, a log or a memory",
        candidate=module("while True:\n    os.write(1, bytes(1 << 20))", before=IMPORTS),
        outcomes=("timeout", "runtime_error"),
        options=CHECKED.model_copy(update={"check_s": 2}),
    ),
    Case(
        number=52,
        name="kernel_that_never_ends",
        why="a loop without an end holds the device",
        candidate=kernel("    for (volatile int i = 0;; i = 0) {}"),
        outcomes=("timeout",),
        options=CHECKED.model_copy(update={"check_s": 2}),
    ),
    Case(
        number=52,
        name="build_that_never_ends",
        why="templates that recurse without a bound hold the compiler",
        candidate=kernel(
            "    honest(x, weight, bias, out);\n    out[0] += Tree<40, 0>::value;",
            """
template <int depth, long id> struct Tree {
    static constexpr long value = Tree<depth - 1, 2 * id>::value + Tree<depth - 1, 2 * id + 1>::value;
};
template <long id> struct Tree<0, id> { static constexpr long value = id; };
""",
        ),
        outcomes=("timeout", "build_failed"),
        options=CHECKED.model_copy(update={"build_s": 3}),
    ),
    Case(
        number=53,
        name="illegal_access",
        why="a wild write ends the process, and must end nothing else",
        candidate=kernel("    for (long i = 0; i < (1L << 40); i += 512) ((float*)out)[i] = 1;"),
        outcomes=("runtime_error",),
        evidence="SIGSEGV|conversation|wrote",
        options=TIMED,
    ),
]
