"""The lean road: what it takes, which of its errors say something about a candidate, and that it lacks nothing silently."""

import importlib.machinery
import importlib.util
import re
import shutil
import subprocess

import pytest
import torch

from sandbox.build import BuildFailed, BuildUnavailable
from sandbox.build.artifacts import ArtifactStore
from sandbox.build.cuda import compile_command, find_cuobjdump
from sandbox.build.extension import parse_request
from sandbox.build.headers import BASE_FLAGS
from sandbox.build.lean_road import FORMS, SOURCES, STANDS_FOR, LeanRoad, has_short_floats, in_pytorchs_words, is_light, may_differ, missing_members
from sandbox.build.roads import ROADS, ROADS_VARIABLE, ExtensionBuilder, allowed_roads
from sandbox.build.toolchain import find_cuda, find_toolchain
from sandbox.jail.spawn import Zygote
from tests.sandbox.helpers import needs_extensions


def request(source, **changes):
    return parse_request({"name": "x", "cpp_sources": source, "functions": ["f"], **changes})


@pytest.mark.parametrize(
    ("line", "differs"),
    [
        ("main.cpp:2:14: error: 'missing_thing' was not declared in this scope", False),
        ("cuda.cu(12): error: identifier \"blockIdy\" is undefined", False),
        ("cuda.cu(12): error: expected a \";\"", False),
        ("cuda.cu(82): error: declaration is incompatible with previous \"tile\" (declared at line 82)", False),
        ("main.cpp:9:1: error: expected '}' at end of input", False),
        ("main.cpp:2:14: error: 'at' has not been declared", True),
        ("main.cpp:2:14: error: 'class sandbox_lean::Tensor' has no member named 'index_put_'", True),
        ("cuda.cu(3): error: namespace \"at\" has no member \"einsum\"", True),
        ("cuda.cu(3): error: identifier \"AT_DISPATCH_V2\" is undefined", True),
        ("cuda.cu:1:10: fatal error: ATen/native/cuda/Loops.cuh: No such file or directory", True),
        ("warning: something else", True),
    ],
)
def test_only_an_error_of_the_candidate_s_own_ends_a_build(line, differs):
    assert may_differ(request("int f();"), f"In file included from x:\n{line}\n") is differs


@pytest.mark.parametrize(
    ("lines", "source", "missing"),
    [
        (['cuda.cu(13): error: namespace "torch" has no member "empty_likee"'], "", {"empty_likee"}),
        (['cuda.cu(1): error: class "sandbox_lean::Tensor" has no member "shape"'] * 2, "#include <torch/extension.h>", {"shape"}),
        (["main.cpp:2:9: error: 'zerros' is not a member of 'torch'; did you mean 'zeros'?"], "", {"zerros"}),
        (["main.cpp:2:9: error: \u2018class sandbox_lean::Tensor\u2019 has no member named \u2018shape\u2019"], "", {"shape"}),
        (['cuda.cu(3): error: namespace "torch" has no member "nope"', "cuda.cu(4): error: expected a ;"], "", set()),
        (['cuda.cu(3): error: namespace "at::cuda" has no member "getCurrentCUDABlasHandle"'], "", set()),
        (['cuda.cu(3): error: namespace "at" has no member "x"'], "#include <ATen/native/cuda/Loops.cuh>", set()),
        (['cuda.cu(3): error: namespace "at" has no member "x"'], "using namespace torch;", set()),
        ([], "", set()),
    ],
)
def test_what_a_source_expects_of_pytorch_alone_is_found(lines, source, missing):
    assert missing_members(request(f"{source}\nint f();"), "In file included from x:\n" + "\n".join(lines)) == missing


@needs_extensions
def test_a_name_that_pytorch_has_nowhere_ends_the_build_and_one_that_it_has_goes_on(built_headers, tmp_path):
    zygote = Zygote(modules=[], threads=1, directory=tmp_path)
    try:
        builder = ExtensionBuilder(store=built_headers, zygote=zygote, scratch=tmp_path)
        tried = []
        way = builder._way
        builder._way = lambda road, light, *rest: tried.append((road, light)) or way(road, light, *rest)
        with pytest.raises(BuildFailed, match="empty_likee"):
            builder.build(request("torch::Tensor f(torch::Tensor x) { return torch::empty_likee(x).shape(0); }"), 300.0)
        assert tried == [("lean", True)]
        built = builder.build(request("torch::Tensor f(torch::Tensor x) { return torch::logaddexp(x, x); }"), 300.0)
        assert tried[1:] == [("lean", True), ("lean", False), ("fast", False)] and built.road == "fast"
        # Found by argument-dependent lookup in a header that PyTorch's bring along, without a word of the source's.
        del tried[:]
        built = builder.build(request("torch::Tensor f(torch::Tensor x) { std::vector<int> v{2, 1}; sort(v.begin(), v.end()); return x; }"), 300.0)
        assert tried == [("lean", True), ("lean", False)] and built.road == "lean"
    finally:
        zygote.close()


def test_names_that_may_come_from_pytorch_are_tried_on_the_next_road():
    assert may_differ(request("using namespace torch;\nint f();"), "main.cpp:2:14: error: 'einsum' was not declared")
    assert in_pytorchs_words("no member 'x' in 'sandbox_lean::Tensor'") == "no member 'x' in 'at::Tensor'"


@pytest.mark.parametrize(
    ("said", "means"),
    [
        (None, ("lean", "fast", "plain")),
        ("", ("lean", "fast", "plain")),
        ("plain", ("plain",)),
        ("plain, fast", ("fast", "plain")),
        ("plain,lean", ("lean", "plain")),
    ],
)
def test_which_roads_builds_take_can_be_chosen(monkeypatch, said, means):
    monkeypatch.delenv(ROADS_VARIABLE, raising=False)
    if said is not None:
        monkeypatch.setenv(ROADS_VARIABLE, said)
    assert allowed_roads() == means


@pytest.mark.parametrize("said", ["lean", "lean,fast", "plain,highway"])
def test_another_choice_is_refused_by_name(monkeypatch, said):
    monkeypatch.setenv(ROADS_VARIABLE, said)
    with pytest.raises(BuildUnavailable, match=f"SANDBOX_ROADS='{said}': name some of lean, fast, plain, with plain"):
        allowed_roads()


def test_every_function_that_the_header_calls_is_defined_in_the_support_library():
    declared = set(re.findall(r"\b(sandbox_lean_\w+)\(", (SOURCES / "abi.h").read_text()))
    defined = "".join((SOURCES / name).read_text() for name in ("support.cpp", "support_cuda.cpp"))
    assert declared and not {name for name in declared if f"{name}(" not in defined and "##" not in name}
    called = set(re.findall(r"\b(sandbox_lean_\w+)\(", "".join((SOURCES / f"{n}.h").read_text() for n in ("base", "tensor", "cuda"))))
    assert called <= declared


@needs_extensions
@pytest.mark.parametrize(
    ("changes", "allowed", "roads"),
    [
        ({}, ROADS, ["lean", "fast", "plain"]),
        ({}, ("fast", "plain"), ["fast", "plain"]),
        ({}, ("plain",), ["plain"]),
        ({"cuda_sources": "int g;"}, ROADS, ["lean", "fast", "plain"]),
        ({"functions": None}, ROADS, ["fast", "plain"]),
        ({"functions": None, "cpp_sources": 'PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("f", &f); }'}, ROADS, ["lean", "plain"]),
        ({"cpp_sources": "#include <pybind11/pybind11.h>"}, ROADS, ["plain"]),
        ({"with_pytorch_error_handling": False}, ROADS, ["plain"]),
    ],
)
def test_it_takes_what_is_bound_by_us_and_asks_for_nothing_by_name(tmp_path, changes, allowed, roads):
    builder = ExtensionBuilder(store=ArtifactStore(tmp_path / "store"), zygote=None, scratch=tmp_path, roads=allowed)
    assert builder._roads(request("int f();", **changes)) == roads


CUDA = """
#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_fp16.h>

template <typename scalar_t>
__global__ void add_one(const scalar_t* __restrict__ x, scalar_t* out, int64_t n) {
  const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] + static_cast<scalar_t>(1.0f);
}
__global__ void twice(torch::PackedTensorAccessor32<float, 2, torch::RestrictPtrTraits> x) {
  if (threadIdx.x < x.size(1)) x[blockIdx.x][threadIdx.x] *= 2;
}
torch::Tensor f(torch::Tensor x) {
  TORCH_CHECK(x.is_cuda(), "x must be a CUDA tensor");
  const at::cuda::OptionalCUDAGuard guard(device_of(x));
  auto out = torch::empty_like(x);
  auto stream = at::cuda::getCurrentCUDAStream();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::ScalarType::Half, at::ScalarType::BFloat16, x.scalar_type(), "f", [&] {
    add_one<scalar_t><<<(x.numel() + 255) / 256, 256, 0, stream>>>(x.data_ptr<scalar_t>(), out.data_ptr<scalar_t>(), x.numel());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  auto side = at::cuda::getStreamFromPool(false);
  at::cuda::CUDAEvent ready(cudaEventDefault), done;
  ready.record(stream);
  ready.block(side);
  done.record(side);
  done.synchronize();
  twice<<<out.size(0), 256, 0, stream.stream()>>>(out.packed_accessor32<float, 2, torch::RestrictPtrTraits>());
  AT_CUDA_CHECK(cudaGetLastError());
  return out;
}
"""


class Headers:
    """As the road needs them to write its own."""

    @staticmethod
    def write_binding(path):
        path.write_text("")


@needs_extensions
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("form", [FORMS[0], FORMS[2]], ids=["whole", "light"])
def test_cuda_sources_compile_against_it(tmp_path, form):
    """Against the header alone: the support library's part for CUDA compiles only where PyTorch has CUDA (tests/gpu)."""
    toolchain, cuda = find_toolchain(), find_cuda()
    LeanRoad(ArtifactStore(tmp_path / "store"), toolchain, tmp_path, lambda s: None, Headers())._write_headers(tmp_path / "include")

    def compiled(source):
        (tmp_path / "cuda.cu").write_text(source)
        command = [*compile_command(cuda, "sm_90", toolchain.compiler.path, ["-O3"]), "-DSANDBOX_LEAN", "-DSANDBOX_LEAN_CUDA", *form]
        command += [f"-I{tmp_path / 'include'}", *(word for path in toolchain.includes for word in ("-isystem", str(path)))]
        return subprocess.run([*command, "-c", "cuda.cu", "-o", "cuda.o"], cwd=tmp_path, capture_output=True, text=True, check=False)

    done = compiled(CUDA)
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = subprocess.run([find_cuobjdump(), "-res-usage", "cuda.o"], cwd=tmp_path, capture_output=True, text=True, check=True)
    names = re.findall(r"Function (\S+):", kernels.stdout + kernels.stderr)
    assert sum("add_one" in name for name in names) == 4 and sum("twice" in name for name in names) == 1, names
    failed = compiled(CUDA.replace("threadIdx.x;", "missing;"))
    log = failed.stdout + failed.stderr
    assert failed.returncode != 0 and "missing" in log and not may_differ(request("int f();", cuda_sources=CUDA), log), log


def test_pytorch_s_headers_are_replaced_by_name(tmp_path):
    road = LeanRoad(ArtifactStore(tmp_path / "store"), None, tmp_path, lambda s: None, Headers())
    road._write_headers(tmp_path / "include")
    for name in STANDS_FOR:
        assert "sandbox_lean/lean.h" in (tmp_path / "include" / name).read_text()
    assert (tmp_path / "include" / "sandbox_lean" / "lean.h").exists()


@pytest.mark.parametrize(
    ("source", "light", "short"),
    [
        ("torch::Tensor f(torch::Tensor x, std::vector<int64_t> n) { return x; }", True, False),
        ("cudaStream_t s = at::cuda::getCurrentCUDAStream(); printf(cudaGetErrorString(e)); x.to(torch::kHalf);", True, False),
        ("// std::string in a comment\nint f();", True, False),
        ("std::string f();", False, False),
        ("std :: ostringstream text;", False, False),
        ("using namespace std;\nvector<int> f();", False, False),
        ("at::Half f();", True, True),
        ("AT_DISPATCH_FLOATING_TYPES_AND_HALF(x.scalar_type(), \"f\", [&] {});", True, True),
        ("AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), \"f\", [&] {});", True, False),
        ("auto text = c10::str(1);", False, False),
        ("__half f(__half x);", True, True),
        ("half2 f(half2 x);", True, True),
        ("__nv_bfloat16 f();", True, True),
        ("#include <cuda_fp16.h>\n__half f(__half x); half2 g(half2 x);", True, False),
        ("#include <cuda_fp16.h>\n__nv_bfloat16 f();", True, True),
        ("#include <cuda_bf16.h>\n__nv_bfloat16 f(); half g(half x);", True, False),
        ("#include <cuda_fp16.h>\nat::Half f();", True, True),
        ("// a half, in bfloat16 /* of it */\n/* at::Half\n std::string */ int f();", True, False),
        ("for (int half = n / 2; half > 0; half /= 2) f(half);", True, False),
        ("const int half_width = n / 2;", True, False),
    ],
)
def test_sources_without_strings_and_streams_take_the_light_form_with_16_bit_types_where_they_need_them(source, light, short):
    assert is_light(request(source)) is light and has_short_floats(request(source)) is short


@needs_extensions
def test_the_light_form_is_tried_before_the_whole_one_and_nothing_else_changes(tmp_path):
    builder = ExtensionBuilder(store=ArtifactStore(tmp_path / "store"), zygote=None, scratch=tmp_path)
    assert builder._attempts(request("int f();")) == [("lean", True), ("lean", False), ("fast", False), ("plain", False)]
    assert builder._attempts(request("std::string f();")) == [("lean", False), ("fast", False), ("plain", False)]


DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
MESSAGES = r"""
torch::Tensor f(torch::Tensor x, int64_t k, double y) {
  signed char letter = 'c';
  TORCH_CHECK(x.dim() == 1, "sizes ", x.sizes(), ", type ", x.scalar_type(), " and ", x.dtype(), " on ", x.device(), ", k = ", k, '.');
  TORCH_CHECK(k > 0, letter, y, " ", 1.5f, " ", -3, " ", 7u, " ", true, " ", (int64_t)1 << 40, " ", 1e-20, " ", torch::Device("cuda:3"));
  TORCH_CHECK(k < 9);
  AT_DISPATCH_INTEGRAL_TYPES(x.scalar_type(), "f", [&] { x.data_ptr<scalar_t>(); });
  return x;
}
"""


@needs_extensions
def test_messages_read_alike_in_either_form(built_headers, tmp_path):
    """Also what PyTorch's own header makes of them."""
    zygote = Zygote(modules=[], threads=1, directory=tmp_path)
    try:
        said = {}
        for form, source, roads in (
            ("light", MESSAGES, ROADS),
            ("short", MESSAGES + "at::Half unused();", ROADS),
            ("whole", MESSAGES + "std::string unused();", ROADS),
            ("pytorch", MESSAGES, ("fast", "plain")),
        ):
            builder = ExtensionBuilder(store=built_headers, zygote=zygote, scratch=tmp_path, roads=roads)
            built = builder.build(request(source), 300.0)
            assert built.road == roads[0] and (form == "whole") is not is_light(request(source))
            loader = importlib.machinery.ExtensionFileLoader(built.module, str(built.path))
            spec = importlib.util.spec_from_file_location(built.module, built.path, loader=loader)
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
            calls = [(torch.ones(2, 3).to(dtype), 1) for dtype in DTYPES]
            calls += [(torch.ones(2, dtype=torch.float16), k) for k in (-1, 9, 1)]
            said[form] = []
            for x, k in calls:
                with pytest.raises(RuntimeError) as error:
                    module.f(x, k, 2.25)
                said[form].append(str(error.value).splitlines()[0])
        assert said["light"] == said["short"] == said["whole"] == said["pytorch"]
        assert said["light"][0] == "sizes [2, 3], type Float and float on cpu, k = 1." and "not implemented for 'Half'" in said["light"][-1]
    finally:
        zygote.close()


@needs_extensions
def test_the_compiler_takes_the_precompiled_header_and_the_linker_reads_none_of_pytorchs_libraries(built_headers, tmp_path):
    zygote = Zygote(modules=[], threads=1, directory=tmp_path)
    try:
        builder = ExtensionBuilder(store=built_headers, zygote=zygote, scratch=tmp_path)
        built = builder.build(request("torch::Tensor f(torch::Tensor x) { return x + 1; }", extra_cflags=["-O3"]), 300.0)
        lean = builder._lean_road.prepare(None, zygote)
    finally:
        zygote.close()
    assert built.road == "lean" and {path.name for path in lean.stubs.iterdir()} >= {"libc10.so", "libtorch_cpu.so", "libtorch_python.so"}
    needed = subprocess.run(["objdump", "-p", built.path], capture_output=True, text=True, check=True).stdout
    assert {"libc10.so", "libtorch_cpu.so", "libtorch_python.so"} <= set(re.findall(r"NEEDED\s+(\S+)", needed))
    toolchain = find_toolchain()
    assert sum(path.stat().st_size for path in lean.stubs.iterdir()) < (toolchain.libraries / "libtorch_cpu.so").stat().st_size / 100
    for form in FORMS:
        for level in ([], ["-O1"], ["-O3"]):
            command = [toolchain.compiler.path, *BASE_FLAGS, "-DSANDBOX_LEAN", "-DTORCH_EXTENSION_NAME=x", *form, *level, f"-I{lean.include}"]
            command += [word for path in toolchain.includes for word in ("-isystem", str(path))]
            said = subprocess.run(
                [*command, "-H", "-fsyntax-only", "-x", "c++", "-"], input="#include <torch/extension.h>\nint f();\n",
                capture_output=True, text=True, check=True,
            ).stderr  # fmt: skip
            assert re.search(r"^! .*extension\.h\.gch/\d\.gch$", said, re.MULTILINE), (form, level, said[:500])
