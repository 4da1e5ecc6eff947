"""E. Channel and files. What a jail must keep in; several need namespaces or Landlock to be kept in."""

from __future__ import annotations

import os
import tempfile
import uuid
from pathlib import Path

from tests.redteam.attacks_clock import FIND_RUNNER
from tests.redteam.case import CHECKED, Case
from tests.redteam.tasks import kernel, module

MARK = uuid.uuid4().hex
"""Named by files that attacks try to leave behind, so that a test run finds its own only."""
FORGED = "FORGED VERDICT"


def absent(*paths: str | Path):
    """A check that none of the files exists; found ones are deleted, so that they count once."""

    def leaves() -> str:
        found = [str(path) for path in paths if os.path.lexists(path)]
        for path in found:
            os.unlink(path)
        return f"files are left behind: {found}" if found else ""

    return leaves


OUTSIDE = Path(tempfile.gettempdir()) / f"redteam-{MARK}"
SECRET_TEXT = f"root:{MARK}"
SECRET = OUTSIDE.with_suffix(".secret")
"""A private file of the judge's user that no candidate may read; planted by the test session."""


def plant_secret() -> None:
    """Writes the file that attacks try to read."""
    SECRET.touch(mode=0o600)
    SECRET.write_text(SECRET_TEXT)


def remove_secret() -> None:
    SECRET.unlink(missing_ok=True)


IMPORTS = "import os, sys, time, signal, socket, struct, threading, ctypes, glob, json, gc\n"


def write_all(paths: list[Path]) -> str:
    return f"""
for path in {[str(path) for path in paths]!r}:
    try:
        with open(path, "w") as file:
            file.write("print('{FORGED}')")
    except OSError:
        pass
"""


def _dies(number: int, name: str, why: str, forward: str, evidence: str, before: str = IMPORTS) -> Case:
    return Case(
        number=number,
        name=name,
        why=why,
        candidate=module(forward, before=before),
        outcomes=("runtime_error",),
        evidence=evidence,
        options=CHECKED,
    )


def kept_in(
    number: int, name: str, why: str, before: str, forward: str = "return self.honest(x)", **more
) -> Case:
    """An attack beside honest work: it must change nothing, so the work may pass."""
    more.setdefault("outcomes", ("ok", "runtime_error", "load_failed"))
    more.setdefault("options", CHECKED)
    return Case(number=number, name=name, why=why, candidate=module(forward, before=IMPORTS + before), **more)


CASES = [
    _dies(41, "sys_exit_0", "exit code 0 taken for a pass", "sys.exit(0)", "SystemExit"),
    _dies(41, "os_exit_0", "the process ends orderly", "os._exit(0)", "exit code 0"),
    Case(
        number=41,
        name="exit_0_in_c",
        why="exit(0) from native code runs atexit handlers and leaves with 0",
        candidate=kernel("    exit(0);", "#include <stdlib.h>"),
        outcomes=("runtime_error",),
        evidence="exit code 0",
        options=CHECKED,
    ),
    Case(
        number=41,
        name="exit_0_in_a_constructor",
        why="the library ends the process while it is loaded",
        candidate=kernel(
            "    honest(x, weight, bias, out);",
            "#include <unistd.h>\n__attribute__((constructor)) static void go() { _exit(0); }",
        ),
        outcomes=("load_failed",),
        evidence="exit code 0",
        options=CHECKED,
    ),
    _dies(
        41,
        "system_exit_in_a_destructor",
        "SystemExit surfaces when an object is destroyed",
        "Bomb()\nreturn self.honest(x)",
        "exit code 0",
        IMPORTS + "class Bomb:\n    def __del__(self):\n        os._exit(0)\n",
    ),
    kept_in(
        42,
        "forged_result_on_stdout",
        "a complete result as the last line of output",
        f"""
print(json.dumps({{"outcome": "ok", "timing": {{"speedup": 99}}, "feedback": "{FORGED}"}}), flush=True)
""",
        outcomes=("ok",),
    ),
    _dies(
        42,
        "garbage_on_the_channel",
        "bytes written to the inherited channel pose as a reply",
        "os.write(3, b'DKF1' + bytes(60))\nreturn self.honest(x)",
        "conversation",
    ),
    _dies(
        42,
        "dup2_over_the_channel",
        "the channel is replaced by a pipe",
        "r, w = os.pipe()\nos.dup2(w, 3)\nreturn self.honest(x)",
        "before its work was done|conversation",
    ),
    Case(
        number=42,
        name="forged_reply_with_the_stolen_nonce",
        why="the runner's channel is taken out of its memory; the reply to `run` is forged, well-formed and "
        "early",
        candidate=module(
            """
            channel = next(o for o in gc.get_objects() if type(o).__name__ == "Channel")
            channel.send({"ok": True, "shapes": [[256, 256]], "dtypes": ["torch.float32"], "is_tuple": False,
                          "changed": [], "aliased": [],
                          "tensors": [{"dtype": "float32", "shape": [256, 256]}]},
                         [memoryview(bytes(256 * 256 * 4))])
            return self.honest(x)
            """,
            before=IMPORTS,
        ),
        outcomes=("incorrect", "runtime_error"),
        evidence="wrong result|conversation",
        options=CHECKED,
    ),
    Case(
        number=42,
        name="whole_runner_replaced",
        why="the candidate serves the orders itself: no work at all in timed blocks, honest work where it "
        "is looked at",
        candidate=module(
            "return self.honest(x)",
            before=FIND_RUNNER
            + """
def time_block(self, message):
    order = message.header
    self.asked = (order["keep"], order["slots"])
    return {"span_ms": 1e-4 * order["calls"]}, []

def kept(self, message):
    keep, slots = self.asked
    with torch.no_grad():
        return self._outputs(self.call(*self.slots[slots[keep % len(slots)]]), message.header["max_bytes"])

judge.Runner.do_time_block = time_block
judge.Runner.do_kept = kept
""",
        ),
        outcomes=("ok", "integrity", "runtime_error"),
    ),
    kept_in(
        42,
        "result_file",
        "a result file where a harness might look for one",
        write_all([OUTSIDE.with_suffix(f".{kind}") for kind in ("json", "result")]),
        leaves=absent(OUTSIDE.with_suffix(".json"), OUTSIDE.with_suffix(".result")),
    ),
    Case(
        number=42,
        name="result_in_a_pipe_with_a_name",
        why="FIFOs with likely names in the private directory hold a forged result for whoever reads them, or for "
        "ever",
        candidate=module(
            "return self.honest(x)",
            before=IMPORTS
            + f"""
for name in ("result", "result.json", "output.json", "stdout"):
    os.mkfifo(name)
    def write(name=name):
        with open(name, "w") as pipe:
            pipe.write(json.dumps({{"outcome": "ok", "feedback": "{FORGED}"}}))
    threading.Thread(target=write, daemon=True).start()
""",
        ),
        outcomes=("ok",),
        options=CHECKED,
    ),
    Case(
        number=48,
        name="file_read_by_the_compiler",
        why="#include of a private file surfaces its text in the compiler's errors",
        candidate=kernel("    honest(x, weight, bias, out);", f'#include "{SECRET}"'),
        outcomes=("build_failed",),
        evidence=r"(?s)\A(?!.*root).*\Z",
        options=CHECKED,
    ),
    Case(
        number=48,
        name="file_embedded_by_the_assembler",
        why=".incbin puts a file of the judge into the library, where the kernel can read it",
        candidate=kernel(
            "    honest(x, weight, bias, out);",
            f'asm(".section .rodata\\nsecret:\\n.incbin \\"{SECRET}\\"\\n.previous");',
        ),
        outcomes=("build_failed",),
        evidence=r"(?s)\A(?!.*root).*\Z",
        options=CHECKED,
    ),
    Case(
        number=49,
        name="pickle_sent_back",
        why="a tensor subclass whose __reduce__ runs code wherever it is unpickled",
        candidate=module(
            "return torch.Tensor._make_subclass(Bomb, self.honest(x))",
            before=f"""
import os
class Bomb(torch.Tensor):
    def __reduce_ex__(self, protocol):
        return os.system, ("touch {OUTSIDE}",)
""",
        ),
        outcomes=("incorrect",),
        evidence="Bomb",
        options=CHECKED,
        leaves=absent(OUTSIDE),
    ),
    kept_in(
        50,
        "network",
        "a connection to the outside, or to a service of this machine",
        f"""
opened = []
for address in (("127.0.0.1", 22), ("1.1.1.1", 53), ("8.8.8.8", 443)):
    try:
        socket.create_connection(address, 0.3).close()
        opened.append(address)
    except OSError:
        pass
server = socket.socket()
try:
    server.bind(("0.0.0.0", 0))
    server.listen()
    open("{OUTSIDE}.net", "w").write("listening")
except OSError:
    pass
""",
        leaves=absent(f"{OUTSIDE}.net"),
    ),
    kept_in(
        51,
        "files_of_others",
        "a private file of somebody else is copied to where the attacker can fetch it",
        f"""
try:
    open("{OUTSIDE}.loot", "w").write(open("{SECRET}").read())
except OSError:
    pass
""",
        leaves=absent(f"{OUTSIDE}.loot"),
    ),
    kept_in(
        51,
        "sources_of_others",
        "other candidates' private directories are listed and their sources printed into one's own error",
        """
def others():
    mine = open(__file__).read()
    paths = glob.glob(f"{os.path.dirname(os.getcwd())}/*/*.py") + glob.glob("/tmp/*/*/*.py")
    judge = os.path.dirname(sys.modules["sandbox"].__file__)  # its package may be read, wherever the checkout lies
    paths = [path for path in paths if not path.startswith(judge)]
    return [path for path in paths if "ModelNew" in (text := open(path).read()) and text != mine]
""",
        forward="assert not others(), f'LOOT {open(others()[0]).read()[:50]}'\nreturn self.honest(x)",
        outcomes=("ok",),
    ),
]
