"""Kernels read from installed packages: packages that are made up here, what is refused, what the rules make of their text, and one real verdict."""

from __future__ import annotations

import ast
import dataclasses
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dk_jax.rollout.judge import Journal
from dk_jax.rollout.trajectory import Verdict
from dk_jax.sft.open_source.catalogue import PREFIX, SIZES, catalogue, problem
from dk_jax.sft.open_source.extract import Extractor
from dk_jax.sft.open_source.kernels import (
    ABSENT,
    OpenKernelError,
    counts_table,
    extract_all,
    judge_candidates,
    load_open_kernels,
    load_records,
    save_open_kernels,
)
from dk_jax.sft.open_source.modules import ExtractError
from dk_jax.sft.open_source.packages import PackageError, find_package, find_packages, permissive
from dk_jax.sft.open_source.techniques import techniques_of
from dk_jax.sft.triton_topics import triton_catalogue
from dk_jax.tasks.builtin import builtin_suite
from dk_jax.tasks.kernelbench import check_reference
from tests.dk_jax.fake_sandbox import FakeClient, make_judge

RUNTIME = """
raise RuntimeError("the package was imported")
import functools, logging, os
import torch, triton
import triton.language as tl
logger = logging.getLogger(__name__)
def backend():
    return triton.runtime.driver.active.get_current_target().backend
IS_OTHER = backend() == "hip"
IS_HOPPER = backend() == "cuda" and torch.cuda.get_device_capability()[0] == 9
def sizes(n):
    return [16, n] if IS_HOPPER else [n]
def guard(fn):
    return fn
if os.environ.get("FAST", "0") == "1":
    def power(x): return tl.exp2(x)
else:
    @triton.jit
    def power(x):
        return tl.exp(x)
"""
SOFTMAX = '''
# Copyright (c) 2020, the authors of the package
import logging
import torch
import triton
import triton.language as tl
import triton.language.extra.libdevice as device_library
from ...runtime import IS_OTHER, guard as input_guard, logger, power, sizes
from fla import runtime

UNUSED = object()
WIDE: tl.constexpr = tl.constexpr(7)

@triton.heuristics({"HAS_SCALE": lambda args: args["scale"] is not None, "EVEN": lambda args: args["D"] % args["BLOCK"] == 0})
@triton.autotune(configs=[triton.Config({"BLOCK": b}, num_warps=w) for b in sizes(64) for w in (2, 4, 8)], key=["D"])
@triton.jit
def softmax_kernel(x, y, scale, D, HAS_SCALE: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, SQUASH: tl.constexpr = False):
    """What the kernel does."""
    row = tl.program_id(0)
    top, total = float("-inf"), 0.0
    for start in range(0, D, BLOCK):
        o = start + tl.arange(0, BLOCK)
        v = tl.load(x + row * D + o, mask=o < D, other=-float("inf")).to(tl.float32)
        if HAS_SCALE:
            v = v * tl.load(scale)
        if SQUASH:
            v = device_library.tanh(v)
        new = tl.maximum(top, tl.max(v, 0))
        total = total * power(top - new) + tl.sum(power(v - new), 0)
        top = new
    for start in range(0, D, BLOCK):
        o = start + tl.arange(0, BLOCK)
        v = tl.load(x + row * D + o, mask=o < D and row >= 0, other=0.0)
        tl.store(y + row * D + o, power(v - top) / total, mask=o < D)

@input_guard
def softmax_fwd(x: torch.Tensor, scale: torch.Tensor | None = None, dtype=None, flip: bool = False) -> torch.Tensor:
    """Softmax."""
    logger.debug("softmax")
    assert x.ndim == 2, "a matrix"
    if not x.is_cuda:
        raise ValueError("only on a GPU")
    if IS_OTHER:
        return unknown_road(x)
    if dtype is None:
        dtype = x.dtype
    if x.dtype == torch.bfloat16:
        x = x.float()
    power = x.shape[1]
    y = torch.empty_like(x, dtype=dtype)
    with torch.cuda.device(x.device):
        softmax_kernel[(x.shape[0],)](x, y, scale, power)
    if flip:
        y = y.flip(-1)
    return y
'''
METADATA = "Metadata-Version: 2.1\nName: fla-core\nVersion: 1.2.3\n{licence}\n\nA package.\n"


def made_up(root: Path, files: dict[str, str], *, licence: str = "License: MIT License", metadata: bool = True) -> Path:
    """A folder that holds a package of these files as pip would have put it there."""
    for name, text in {"fla/__init__.py": "", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    if metadata:
        info = root / "fla_core-1.2.3.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(METADATA.format(licence=licence))
        (info / "LICENSE").write_text("MIT License\n\nCopyright (c) 2020 Somebody\n")
        names = [*files, "fla_core-1.2.3.dist-info/METADATA", "fla_core-1.2.3.dist-info/LICENSE"]
        (info / "RECORD").write_text("".join(f"{name},,\n" for name in names))
    return root


@pytest.fixture
def root(tmp_path) -> Path:
    return made_up(tmp_path / "root", {"fla/runtime.py": RUNTIME, "fla/ops/utils/softmax.py": SOFTMAX})


def extracted(root: Path, call: str, *, path: str = "fla.ops.utils.softmax:softmax_fwd", arguments: str = "x", init: str = ""):
    return Extractor(find_package("fla-core", [root])).extract([path], f"return {call}", arguments=list(arguments), init=init)


def functions(source: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}


def one(root: Path, text: str, call: str = "run(x)", arguments: str = "x") -> str:
    """The source that `run` of a module of this text is extracted to."""
    head = "import torch, triton, math, functools, logging\nimport triton.language as tl\n"
    made_up(root, {"fla/one.py": head + text})
    return extracted(root, call, path="fla.one:run", arguments=arguments).source


def own(root: Path) -> tuple[str, ...]:
    """What of the source that `one` gave is this project's text."""
    call = "run(x, y)" if "def run(x, y)" in (root / "fla/one.py").read_text() else "run(x)"
    return extracted(root, call, path="fla.one:run", arguments="xy" if "y" in call else "x").own


KERNEL = "@triton.jit\ndef kernel(x, n, B: tl.constexpr):\n    o = tl.program_id(0) * B + tl.arange(0, B)\n    tl.store(x + o, 1.0, mask=o < n)\n"


# Packages


def test_packages_are_found_by_their_metadata_and_never_imported(root, monkeypatch):
    [package] = find_packages([root])
    monkeypatch.syspath_prepend(str(root))
    assert package == find_package("fla-core")  # where Python looks for modules
    assert (package.distribution, package.version, package.licence) == ("fla-core", "1.2.3", "MIT")
    assert package.copyright == ("Copyright (c) 2020 Somebody",)
    assert package.file_of("fla.ops.utils.softmax").name == "softmax.py" and package.file_of("fla.ops") is None
    assert "fla" not in sys.modules
    assert find_package("flag-gems", [root]) is None


@pytest.mark.parametrize(
    "licence", ["License: Proprietary", "", "License: MIT\nClassifier: License :: OSI Approved :: GNU General Public License v3 (GPLv3)"]
)
def test_a_licence_that_is_not_known_to_be_permissive_is_refused_by_name(tmp_path, licence):
    made_up(tmp_path, {"fla/a.py": "x = 1\n"}, licence=licence)
    with pytest.raises(PackageError, match="fla-core names .*not a licence known to be permissive"):
        find_packages([tmp_path])


@given(st.text(max_size=30))
def test_no_licence_is_permissive_but_those_of_the_table(name):
    known = permissive(name)
    assert known is None or permissive(known) == known
    assert permissive(name + " or anything else") is None


def test_missing_and_empty_packages_say_what_to_do(tmp_path):
    with pytest.raises(PackageError, match="no package of open kernels in .*pip install --no-deps liger-kernel"):
        find_packages([tmp_path])
    with pytest.raises(PackageError, match="no such folder"):
        find_packages([tmp_path / "nowhere"])
    (tmp_path / "fla").mkdir()
    with pytest.raises(PackageError, match="holds no source text"):
        find_packages([tmp_path])
    made_up(tmp_path, {"fla/a.py": "x = 1\n"}, metadata=False)
    with pytest.raises(PackageError, match="there is no metadata of fla-core"):
        find_packages([tmp_path])


# Extraction


def test_a_launcher_becomes_a_module_of_its_own(root):
    got = extracted(root, "softmax_fwd(x)")
    assert set(functions(got.source)) == {"power", "softmax_kernel", "softmax_fwd", "forward"}
    imported = {alias.name for node in ast.walk(ast.parse(got.source)) if isinstance(node, ast.Import) for alias in node.names}
    assert imported == {"torch", "triton", "triton.language"}
    assert got.files == ("fla/runtime.py", "fla/ops/utils/softmax.py")
    assert got.functions == ("fla.runtime:power", "fla.ops.utils.softmax:softmax_kernel", "fla.ops.utils.softmax:softmax_fwd")
    assert got.notices == ("Copyright (c) 2020, the authors of the package",)
    launcher = ast.unparse(functions(got.source)["softmax_fwd"])
    for dropped in ("logger", "assert", "is_cuda", "unknown_road", "bfloat16", "cuda.device", "flip", "Tensor", "Softmax"):
        assert dropped not in launcher, launcher


def test_one_configuration_stands_in_the_launch_and_heuristics_that_are_decided_are_gone(root):
    got = extracted(root, "softmax_fwd(x)")
    assert "autotune" not in got.source and "BLOCK=64, num_warps=2" in got.source  # the fourth of 16 and 64 with 2, 4 and 8 warps
    assert got.configs == (("softmax_kernel", "BLOCK=64, num_warps=2"),)
    kernel = functions(got.source)["softmax_kernel"]
    assert [a.arg for a in kernel.args.args] == ["x", "y", "D", "EVEN", "BLOCK"]
    assert "EVEN" in ast.unparse(kernel.decorator_list[0]) and "HAS_SCALE" not in got.source and "tanh" not in got.source
    scaled = extracted(root, "softmax_fwd(x, s)", arguments="xs")
    assert "tl.load(scale)" in scaled.source and "HAS_SCALE" not in scaled.source


def test_blocks_are_combined_by_operators_that_the_interpreter_has(root):
    assert "(o < D) & (row >= 0)" in extracted(root, "softmax_fwd(x)").source


def test_what_the_device_library_has_is_written_with_plain_operations(tmp_path):
    text = "import triton.language.extra.libdevice as lib\n@triton.jit\ndef kernel(x, B: tl.constexpr):\n    v = tl.load(x + tl.program_id(0))\n"
    source = one(tmp_path, text + "    tl.store(x, lib.tanh(lib.exp(v)) + lib.pow(v, 2))\ndef run(x):\n    kernel[(1,)](x, B=1)\n    return x\n")
    assert "tl.exp(v)" in source and {"tanh", "square"} <= set(functions(source)) and "lib" not in source
    assert own(tmp_path) == ("tanh", "square")
    with pytest.raises(ExtractError, match="needs erfcx of CUDA's device library"):
        one(tmp_path, text + "    tl.store(x, lib.erfcx(v))\ndef run(x):\n    kernel[(1,)](x, B=1)\n    return x\n")


def test_elementwise_functions_get_a_plain_kernel(tmp_path):
    text = (
        "@pointwise_dynamic(is_tensor=[True, True, False], promotion_methods=[(0, 1, 'ALWAYS_BOOL')])\n@triton.jit\n"
        "def above(x, y, margin):\n    return x > y + margin\ndef run(x, y):\n    return above(x, y, 0.5)\n"
    )
    source = one(tmp_path, text, "run(x, y)", "xy")
    assert set(functions(source)) == {"above_scalar", "above_kernel", "above", "run", "forward"}
    assert own(tmp_path) == ("above_kernel", "above")
    assert "dtype=torch.bool" in source and "tl.store(out0_ptr + offsets, out0, mask=mask)" in source


def test_autograd_functions_are_taken_by_their_forward(tmp_path):
    text = (
        KERNEL + "class Fill(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x, n):\n        ctx.n = n\n"
        "        ctx.save_for_backward(x)\n        kernel[(1,)](x, n, B=64)\n        return x\ndef run(x):\n    return Fill.apply(x, 3)\n"
    )
    source = one(tmp_path, text)
    assert "ctx" not in source and "def fill(x):" in source and "kernel[(1,)](x, 3, B=64)" in source


def test_names_that_collide_are_told_apart(tmp_path):
    made_up(tmp_path, {"fla/other.py": "def size(x):\n    return x.numel()\n"})
    text = (
        KERNEL + "from fla import other\ndef size(x):\n    return x.shape[0]\ndef max(x):\n    return size(x)\n"
        "def run(x):\n    size_ = other.size(x)\n    kernel[(1,)](x, size_ + max(x) + size(x), B=64)\n    return x\n"
    )
    source = one(tmp_path, text)
    defined = functions(source)
    assert "max" not in defined and len({name for name in defined if "size" in name}) == 2
    assert "one_max(x)" in source  # not Python's own


def test_a_branch_that_cannot_be_had_is_an_error_when_it_runs_and_a_needed_part_refuses_the_kernel(tmp_path):
    text = KERNEL + "import einops\ndef run(x):\n    if x.ndim == 3:\n        x = einops.rearrange(x, 'a b c -> (a b) c')\n"
    source = one(tmp_path, text + "    kernel[(1,)](x, 5, B=64)\n    return x\n")
    assert "raise NotImplementedError" in source and "einops" not in source
    with pytest.raises(ExtractError, match="needs einops.reduce"):
        one(tmp_path, KERNEL + "import einops\ndef run(x):\n    kernel[(1,)](x, 5, B=64)\n    return einops.reduce(x)\n")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def run(x):\n    return x + 1\n", "launches no kernel"),
        ("def run(x):\n    kernel[(1,)](x, math.log2(x.shape[0]), B=64)\n", "needs math.log2"),
        ("class Box:\n    pass\ndef run(x):\n    kernel[(1,)](x, Box(), B=64)\n", "which is a class"),
        ("@strange\ndef run(x):\n    kernel[(1,)](x, 5, B=64)\n", "decorated with strange"),
        ("def run(x):\n    kernel[(1,)](x, nobody, B=64)\n", "nothing in the module defines nobody"),
        ("def run(x):\n    with torch.fx.tracing():\n        kernel[(1,)](x, 5, B=64)\n", "needs the context"),
        ("import fla.gone as gone\ndef run(x):\n    kernel[(1,)](x, gone.f, B=64)\n", "needs fla.gone.f"),
        ("@triton.heuristics()\n@triton.jit\ndef odd(x):\n    pass\ndef run(x):\n    odd[(1,)](x)\n", "in a way that the rules do not take"),
        ("# SPDX-License-Identifier: GPL-3.0-only\ndef run(x):\n    kernel[(1,)](x, 5, B=64)\n", "is under GPL-3.0-only"),
    ],
)
def test_what_is_not_self_contained_says_why(tmp_path, text, reason):
    with pytest.raises(ExtractError, match=reason):
        one(tmp_path, KERNEL + text)


def test_literal_arguments_go_in_and_what_they_decide_falls_away(tmp_path):
    text = (
        KERNEL + "def run(x, mode='a', scale=2.0, out=None):\n    if out is None:\n        out = x\n    if mode == 'a':\n        n = 3\n"
        "    else:\n        n = missing_helper(x)\n    for i in range(n):\n        n = n + i\n    f = lambda scale: scale * 2\n"
        "    kernel[(1,)](out, n, B=64)\n    return out * scale, f(1)\n"
    )
    run = functions(one(tmp_path, text))["run"]
    assert [a.arg for a in run.args.args] == ["x"]
    said = ast.unparse(run)
    assert "missing_helper" not in said and "mode" not in said
    assert "n = n + i" in said and "n = 3" in said, said  # what changes in a loop stays a variable
    assert "lambda scale: scale * 2" in said and "out * 2.0" in said.replace("out * scale", "out * 2.0")


# The catalogue


def test_the_catalogue_pairs_at_least_sixty_launchers_of_three_packages_with_references():
    problems = catalogue()
    launches = [launch for p in problems for launch in p.launches]
    assert len(launches) >= 60 and {launch.module for launch in launches} == {"liger_kernel", "flag_gems", "fla"}
    suite = {task.name for task in builtin_suite("gpu")} | {task.family for task in builtin_suite("gpu")}
    for p in problems:
        assert {name for name, _ in p.small} == {name for name, _ in p.gpu}
        for size in SIZES:
            task = p.task(size)
            check_reference(task.reference, task.name)
            assert task.name.startswith(PREFIX) and task.name not in suite and task.family not in suite
            assert task.spec is None and task.split == "train" and task.size == size
        names = {n.id for _, draw in (*p.inputs, *p.parameters) for n in ast.walk(ast.parse(draw, mode="eval")) if isinstance(n, ast.Name)}
        assert names <= {"torch", "nn", "F"} | {name for name, _ in p.small}, p.name


TWO = problem(
    "softmax", "Softmax of each row.", {"x": "torch.randn(rows, cols)"}, "torch.softmax(x, dim=-1)",
    [("fla.ops.utils.softmax:softmax_fwd", "softmax_fwd(x)"), ("fla.ops.gone:f", "f(x)"), ("flag_gems.ops.softmax:softmax", "softmax(x, -1)")],
    small={"rows": 3, "cols": 70}, gpu={"rows": 64, "cols": 512},
)  # fmt: skip


def test_nothing_of_the_catalogue_is_dropped_without_a_reason(root):
    ticks = []
    candidates, refusals = extract_all([TWO], find_packages([root]), progress=ticks.append)
    assert [c.launch.path for c in candidates] == ["fla.ops.utils.softmax:softmax_fwd"] and ticks == [1, 1, 1]
    assert candidates[0].techniques == ("online",)
    reasons = {r.launch.path: r.reason for r in refusals}
    assert reasons == {"fla.ops.gone:f": "fla-core 1.2.3 has no fla.ops.gone:f", "flag_gems.ops.softmax:softmax": ABSENT}


# Techniques


def kernel_module(body: str, launch: str) -> str:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    head = "import torch, triton\nimport triton.language as tl\n@triton.jit\ndef k(x, n, B: tl.constexpr):\n"
    return f"{head}{lines}\ndef run(x):\n    k[(1,)](x, 5, {launch})\n"


ROW = "r = tl.program_id(0) * n\no = tl.arange(0, B)\nv = tl.load(x + r + o, mask=o < n)\n"
LOOP = "a = tl.zeros((B,), tl.float32)\nfor s in range(0, n, B):\n"


@pytest.mark.parametrize(
    ("body", "launch", "found"),
    [
        ("o = tl.program_id(0) * B + tl.arange(0, B)\ntl.store(x + o, 1.0, mask=o < n)", "B=2048", ("large_block",)),
        ("o = tl.program_id(0) * B + tl.arange(0, B)\ntl.store(x + o, 1.0, mask=o < n)", "B=64", ()),
        (ROW + "v = v / tl.sum(v, 0)\ntl.store(x + r + o, v, mask=o < n)", "B=triton.next_power_of_2(5)", ("row_in_registers",)),
        (LOOP + "    a += tl.load(x + s + tl.arange(0, B))\ntl.store(x, tl.sum(a, 0))", "B=64", ("block_accumulator",)),
        (LOOP + "    a += tl.sum(tl.load(x + s + tl.arange(0, B)))\ntl.store(x, tl.sum(a, 0))", "B=64", ()),
    ],
)  # fmt: skip
def test_techniques_are_those_that_the_text_shows(body, launch, found):
    assert techniques_of(kernel_module(body, launch)) == found


def test_techniques_are_those_of_the_topics():
    source = Path(techniques_of.__code__.co_filename).read_text()
    known = {t for topic in triton_catalogue() for t in topic.techniques}
    adds = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call) and ast.unparse(n.func) == "out.add"]
    named = {n.args[0].value for n in adds if isinstance(n.args[0], ast.Constant)}
    assert named and named <= known


# Judging and records


def judged(root: Path, journal: Journal | None = None, client: FakeClient | None = None):
    candidates, _ = extract_all([TWO], find_packages([root]))
    judge = make_judge(client or FakeClient(), journal, language="triton", form="module")
    return judge_candidates(candidates, judge, size="small", timed=False)


@pytest.mark.parametrize("name", ["open.jsonl", "open.jsonl.gz"])
def test_records_keep_the_verdict_the_reference_and_where_the_kernel_comes_from(root, tmp_path, name):
    records = judged(root)
    path = tmp_path / name
    save_open_kernels(path, records)
    assert load_records(path) == records and not list(tmp_path.glob("*.part"))
    provenance = records[0].provenance
    assert (provenance.package, provenance.version, provenance.licence) == ("fla-core", "1.2.3", "MIT")
    assert provenance.launcher == "fla.ops.utils.softmax:softmax_fwd" and "fla.runtime:power" in provenance.functions
    tasks, kernels = load_open_kernels(path)
    assert [t.name for t in tasks] == ["open_softmax"] == [k.task for k in kernels] and tasks[0].reference == TWO.reference("small")
    assert kernels[0].intent == "good" and kernels[0].techniques == ("online",)


def test_only_kernels_that_were_judged_correct_are_handed_out(root, tmp_path):
    [record] = judged(root)
    wrong = Verdict(outcome="incorrect", stage="correct", reward=0.0, speedup=0.0, noisy=False, coverage=None, feedback="wrong")
    records = [record, dataclasses.replace(record, kernel=dataclasses.replace(record.kernel, verdict=wrong))]
    save_open_kernels(tmp_path / "open.jsonl", records)
    assert len(load_records(tmp_path / "open.jsonl")) == 2
    assert load_open_kernels(tmp_path / "open.jsonl") == ([record.task], [record.kernel])
    table = counts_table(records, [])
    assert "fla-core       1          1        2" in table and table.splitlines()[-1].split() == ["all", "1", "1", "2"]


@pytest.mark.parametrize(
    "damage",
    [lambda row: "not json", lambda row: json.dumps({**row, "provenance": {**row["provenance"], "licence": "GPL-3.0"}}),
     lambda row: json.dumps({k: v for k, v in row.items() if k != "reference"}), lambda row: json.dumps({**row, "task": "other"})],
)  # fmt: skip
def test_a_damaged_record_is_named_by_file_and_line(root, tmp_path, damage):
    path = tmp_path / "open.jsonl"
    save_open_kernels(path, judged(root))
    good = path.read_text()
    path.write_text(good + damage(json.loads(good)) + "\n")
    with pytest.raises(OpenKernelError, match=r"open\.jsonl:2: not a record"):
        load_open_kernels(path)


def test_a_compressed_file_that_was_cut_short_is_refused(root, tmp_path):
    path = tmp_path / "open.jsonl.gz"
    save_open_kernels(path, judged(root))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(OpenKernelError, match=r"open\.jsonl\.gz:\d+: not a record"):
        load_records(path)


def test_judging_goes_on_from_the_journal(root, tmp_path):
    client = FakeClient()
    journal = Journal(tmp_path / "journal.jsonl")
    first = judged(root, journal, client)
    journal.close()
    again = judged(root, Journal(tmp_path / "journal.jsonl"), client)
    assert again == first and len(client.asked) == 1
