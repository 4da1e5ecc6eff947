"""Without a GPU, Triton candidates are checked by the interpreter, and what it gets wrong is refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from sandbox import settings
from sandbox.build.triton_interpreter import interpreter_missing, interpreter_problem

KERNELS = Path(__file__).parents[1] / "gpu" / "kernels"

SCRIPT = """
import sys, runpy
from sandbox.build.triton_interpreter import InterpreterLimit, prepare_interpreter
prepare_interpreter()
import torch
add = runpy.run_path(sys.argv[1] + "/add_triton.py")["ModelNew"]()
x, y = torch.randn(40, 50), torch.randn(40, 50)
assert torch.equal(add(x, y), x + y)
softmax = runpy.run_path(sys.argv[1] + "/softmax_triton.py")["ModelNew"]()
torch.testing.assert_close(softmax(x), torch.softmax(x, 1))
chain = runpy.run_path(sys.argv[1] + "/chain_triton.py")["ModelNew"](50)
want = torch.sigmoid(x * chain.scale + chain.bias) * x + 0.5 * x
torch.testing.assert_close(chain(x), want.detach())
try:
    add(x.bfloat16(), y.bfloat16())
except InterpreterLimit as error:
    print(error)
"""


def test_the_interpreter_judges_honest_and_wrong_kernels_and_refuses_bfloat16():
    command = [sys.executable, "-c", SCRIPT, str(KERNELS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "add_kernel" in done.stdout and "bfloat16" in done.stdout


def test_triton_imported_too_early_is_an_error_not_a_silent_switch():
    code = "import triton.language; from sandbox.build.triton_interpreter import prepare_interpreter as p; p()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "imported before" in done.stderr


@pytest.mark.parametrize("path", sorted(KERNELS.glob("*_triton.py")), ids=lambda path: path.stem)
def test_ordinary_candidates_are_judged(path):
    assert interpreter_problem(path.read_text()) is None


@pytest.mark.parametrize(
    ("source", "word"),
    [("import triton.language as tl\nx = tl.bfloat16", "bfloat16"),
     ("from triton.language.extra import libdevice", "libdevice"),
     ("import triton\nx = tl.extra.cuda.libdevice.tanh(y)", "libdevice"),
     ("import triton\nms = triton.testing.do_bench(f)", "do_bench")],
)  # fmt: skip
def test_what_the_interpreter_gets_wrong_is_named(source, word):
    problem = interpreter_problem(source)
    assert word in problem and "NVIDIA GPU" in problem


def test_comments_strings_and_host_side_types_are_no_reason_to_refuse():
    source = "# tl.bfloat16, libdevice\ntext = 'do_bench'\nif x.dtype == torch.bfloat16:\n    pass"
    assert interpreter_problem(source) is None


def test_a_bfloat16_task_and_a_source_that_does_not_parse():
    assert "bfloat16 task" in interpreter_problem("pass", "bfloat16")
    assert interpreter_problem("def f(:") is None


def test_this_environment_can_interpret():
    assert interpreter_missing() is None


def test_a_server_without_a_gpu_says_why_it_cannot_interpret(monkeypatch):
    monkeypatch.setattr(settings, "interpreter_missing", lambda: "triton 3.6 interprets loops wrongly")
    offered = settings.capabilities(settings.make_settings(device="cpu", isolation="none")).languages["triton"]
    assert not offered.available and "interprets loops wrongly" in offered.problem

