"""Which parts of CUB stand for its umbrella header."""

import re
import subprocess

import pytest

from sandbox.build.artifacts import ArtifactStore
from sandbox.build.cub import cub_parts, macro, umbrella
from sandbox.build.extension import parse_request
from sandbox.build.roads import ExtensionBuilder
from sandbox.build.toolchain import find_toolchain
from tests.cuda_corpus import CASES
from tests.sandbox.helpers import needs_extensions

REDUCE, SCAN = "cub/block/block_reduce.cuh", "cub/block/block_scan.cuh"


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("#include <cub/cub.cuh>\nusing R = cub::BlockReduce<float, 64>;", (REDUCE,)),
        ("# include \"cub/cub.cuh\"\nusing R = cub :: BlockReduce<float, 64, cub::BLOCK_REDUCE_RAKING>; cub::BlockScan<int, 64> s;", (REDUCE, SCAN)),
        ("#include <cub/cub.cuh>\nauto s = at::cuda::getCurrentCUDAStream(); cub::WarpReduce<float> w;", ("cub/warp/warp_reduce.cuh",)),
        ("#include <cub/block/block_reduce.cuh>\ncub::BlockReduce<float, 64> r;", ()),
        ("#include <cub/cub.cuh>\ncub::BlockReduce<float, 64> r; cub::BlockHistogram<int, 64, 4, 8> h;", ()),
        ("#include <cub/cub.cuh>\nusing namespace cub; BlockReduce<float, 64> r;", ()),
        ("#include <cub/cub.cuh>\ncub::BlockReduce<float, 64> r; cuda::std::plus<> p;", ()),
        ("#include <cub/cub.cuh>\ncub::BlockReduce<float, 64> r; thrust::plus<float> p;", ()),
        ("#include <cub/cub.cuh>\ncub::BlockReduce<float, 64> r; CUB_LOG_WARP_THREADS(0);", ()),
        ("#include <cub/cub.cuh>\nnamespace c = cub; c::BlockReduce<float, 64> r; cub::BlockScan<int, 64> s;", ()),
        ("#include <cub/cub.cuh>\nint f();", ()),
    ],
)
def test_parts_stand_for_the_whole_only_where_every_name_is_known(source, parts):
    assert cub_parts(source) == parts


def preprocessed(tmp_path, *flags):
    return subprocess.run(
        [find_toolchain().compiler.path, "-E", "-P", *flags, f"-I{tmp_path}/ours", f"-I{tmp_path}/theirs", "-x", "c++", "-"],
        input="#include <cub/cub.cuh>\n", capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip


@needs_extensions
def test_the_umbrella_includes_what_is_asked_for_and_else_all_of_the_real_one(tmp_path):
    headers = {name: name.replace("/", "_").replace(".", "_") for name in ("cub/cub.cuh", *re.findall(r"#include <(.*)>", umbrella()))}
    for name, word in headers.items():
        (tmp_path / "theirs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "theirs" / name).write_text(f"{word}\n")
    (tmp_path / "ours" / "cub").mkdir(parents=True)
    (tmp_path / "ours" / "cub" / "cub.cuh").write_text(umbrella())
    assert preprocessed(tmp_path) == ["cub_cub_cuh"]
    asked = ["-DSANDBOX_CUB_PARTS", *(f"-D{macro(part)}" for part in (REDUCE, SCAN))]
    assert preprocessed(tmp_path, *asked) == [headers[REDUCE], headers[SCAN]]


@needs_extensions
def test_the_whole_is_tried_where_the_parts_fail(tmp_path):
    builder = ExtensionBuilder(store=ArtifactStore(tmp_path / "store"), zygote=None, scratch=tmp_path)
    source = "#include <cub/cub.cuh>\nusing R = cub::BlockReduce<float, 64>;\nstd::string text();"
    request = parse_request({"name": "x", "cpp_sources": "int f();", "cuda_sources": source, "functions": ["f"]})
    assert builder._attempts(request)[:2] == [("lean", True), ("lean", False)]
    assert builder._next_may_differ("lean", True, request, 'cuda.cu(3): error: namespace "cub" has no member "Sum"')


def test_the_corpus_has_a_candidate_that_takes_parts():
    assert {case.name for case in CASES if cub_parts(case.candidate)} >= {"logsumexp_cub", "global_average_cub"}
