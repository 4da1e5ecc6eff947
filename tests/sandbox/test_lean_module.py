"""A PYBIND11_MODULE that only binds functions takes the lean road, and is pybind11's to whoever imports it."""

import importlib.machinery
import importlib.util
import shutil
import subprocess

import pytest
import torch

from sandbox.build import BuildFailed
from sandbox.build.artifacts import ArtifactStore
from sandbox.build.cuda import compile_command
from sandbox.build.extension import parse_request
from sandbox.build.headers import Headers
from sandbox.build.lean_road import LeanRoad, may_differ
from sandbox.build.roads import ROADS, ExtensionBuilder
from sandbox.build.toolchain import find_cuda, find_toolchain
from tests.sandbox.helpers import needs_extensions

SIMPLE = """
#include <torch/extension.h>
torch::Tensor f(torch::Tensor x) { return x; }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("f", &f, "f");
}
"""


@pytest.fixture(scope="module")
def store(built_headers):
    return built_headers


def request(cpp_sources, **changes):
    return parse_request({"name": "x", "cpp_sources": cpp_sources, **changes})


def with_body(body):
    return SIMPLE.replace('m.def("f", &f, "f");', body)


@pytest.mark.parametrize(
    ("source", "changes", "simple"),
    [
        (SIMPLE, {}, True),
        (SIMPLE, {"functions": ["f"]}, True),
        (with_body('m.doc() = "docs"; m.def( "f", f ); m.def("g", [](int x) { return x; });'), {}, True),
        ("int f();", {"cuda_sources": SIMPLE}, True),
        (None, {"files": [["a.cpp", SIMPLE], ["b.cu", "int g;"]]}, True),
        (with_body('m.def("f", &f); m.def("f", &g);'), {}, False),
        (with_body("m.def(NAME, &f);"), {}, False),
        (with_body(""), {}, False),
        (with_body('m.def("f", &f, py::arg("x") = 1);'), {}, False),
        ("#include <pybind11/numpy.h>\n" + SIMPLE, {}, False),
        ("torch::nn::Linear linear(1, 2);\n" + SIMPLE, {}, False),
        (SIMPLE + SIMPLE, {}, False),
        ("PYBIND11_MAKE_OPAQUE(int);\n" + SIMPLE, {}, False),
        (SIMPLE, {"with_pytorch_error_handling": False}, False),
        ("// " + SIMPLE.replace("\n", " "), {}, False),
    ],
)
def test_which_modules_are_simple(source, changes, simple):
    assert request(source, **changes).has_simple_module is simple


@needs_extensions
@pytest.mark.parametrize(
    ("changes", "allowed", "roads"),
    [
        ({}, ROADS, ["lean", "plain"]),
        ({}, ("fast", "plain"), ["plain"]),
        ({"functions": ["f"]}, ROADS, ["lean", "plain"]),
        ({"cpp_sources": None, "files": [["a.cpp", SIMPLE]]}, ROADS, ["lean", "plain"]),
        ({"is_python_module": False}, ROADS, ["plain"]),
        ({"cpp_sources": with_body("m.def(NAME, &f);")}, ROADS, ["plain"]),
        ({"cpp_sources": "int f();"}, ROADS, ["fast", "plain"]),
    ],
)
def test_which_roads_they_take(tmp_path, changes, allowed, roads):
    builder = ExtensionBuilder(store=ArtifactStore(tmp_path / "store"), zygote=None, scratch=tmp_path, roads=allowed)
    assert builder._roads(request(**{"cpp_sources": SIMPLE, **changes})) == roads


def test_what_the_module_lacks_is_tried_on_the_plain_road():
    assert may_differ(request(SIMPLE), "main.cpp:5:5: error: 'class sandbox_binding::Module' has no member named 'attr'")
    assert may_differ(request(SIMPLE), "main.cpp:5:5: error: no matching function for call to 'sandbox_binding::Module::def(int)'")


@needs_extensions
@pytest.mark.parametrize(
    ("source", "changes", "tried", "words"),
    [
        (SIMPLE, {"functions": ["f"]}, [("lean", True)], "PyInit_"),
        (SIMPLE.replace("return x;", "return y;"), {}, [("lean", True), ("lean", False)], "'y' was not declared"),
        (with_body('m.def("f", &f); m.attr("one") = 1;'), {}, [("lean", True), ("lean", False), ("plain", False)], "not today"),
        (with_body('int k = 1; m.def("f", [k](int x) { return x + k; });'), {}, [("lean", True), ("lean", False), ("plain", False)], "not today"),
        (with_body('m.def("f", &f, "doc", 7);'), {}, [("lean", True), ("lean", False), ("plain", False)], "not today"),
        (
            SIMPLE.replace("torch::Tensor f(torch::Tensor x) { return x; }", "at::ScalarType f(at::ScalarType x) { return x; }"),
            {}, [("lean", True), ("lean", False), ("plain", False)], "not today",
        ),
    ],
)  # fmt: skip
def test_errors_of_the_candidate_s_own_end_a_build_and_others_do_not(store, tmp_path, zygote, source, changes, tried, words):
    builder, seen = ExtensionBuilder(store=store, zygote=zygote, scratch=tmp_path), []
    way = builder._way

    def watched(road, light, *rest):
        seen.append((road, light))
        if road == "plain":
            raise BuildFailed("not today")
        return way(road, light, *rest)

    builder._way = watched
    with pytest.raises(BuildFailed, match=words):
        builder.build(request(source, **changes), 300.0)
    assert seen == tried


ALIKE = """
#include <torch/extension.h>
#include <new>
#include <stdexcept>
torch::Tensor f(torch::Tensor x, int64_t how) {
  switch (how) {
    case 1: TORCH_CHECK(false, "one");
    case 2: TORCH_CHECK_INDEX(false, "two");
    case 3: TORCH_CHECK_VALUE(false, "three");
    case 4: TORCH_CHECK_TYPE(false, "four");
    case 5: TORCH_CHECK_NOT_IMPLEMENTED(false, "five");
    case 6: return x.view({3});
    case 7: throw std::invalid_argument("seven");
    case 8: throw std::out_of_range("eight");
    case 9: throw std::domain_error("nine");
    case 10: throw std::length_error("ten");
    case 11: throw std::range_error("eleven");
    case 12: throw std::overflow_error("twelve");
    case 13: throw std::runtime_error("thirteen");
    case 14: throw std::bad_alloc();
    case 15: throw 15;
  }
  return x + how;
}
double half(double x, bool negated) noexcept { return negated ? -x / 2 : x / 2; }
std::vector<torch::Tensor> both(const std::vector<torch::Tensor>& xs, std::optional<double> scale) { return {xs[0] * scale.value_or(2.0), xs[1]}; }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "docs";
  module.def("f", &f, "f's").def("halved", half);
  module.def("both", &both);
  module.def("elements", [](torch::Tensor x) { return x.numel(); }, "a lambda");
}
"""


def observed(module):
    """What calls of ALIKE's functions do; of a wrong argument only the kind of error, whose words are each road's own."""
    x = torch.ones(2)
    calls = {how: lambda how=how: module.f(x, how) for how in range(16)}
    calls |= {
        "halved": lambda: module.halved(3, True), "both": lambda: module.both([x, 2 * x], None), "scaled": lambda: module.both((x, x), 0.5),
        "elements": lambda: module.elements(x), "doc": lambda: module.__doc__, "name": lambda: (module.__name__, module.f.__name__),
        "names": lambda: [name for name in dir(module) if name[0] != "_"], "kind": lambda: type(module.f).__name__,
    }  # fmt: skip
    wrong = [lambda: module.f(x), lambda: module.f(x, 1, 2), lambda: module.f(None, 1), lambda: module.f(x, 1.5), lambda: module.f(x, how=1)]
    wrong += [lambda: module.halved("3", True), lambda: module.both(x, "x"), lambda: module.both([x, None], 1)]

    def outcome(call, words):
        try:
            return repr(call())
        except Exception as error:
            return type(error).__name__, str(error).splitlines()[0] if words else ""

    return [outcome(call, True) for call in calls.values()] + [outcome(call, False) for call in wrong]


@needs_extensions
def test_it_is_pybind11_s_to_whoever_imports_it(store, tmp_path, zygote):
    seen = {}
    for road in ("lean", "plain"):
        builder = ExtensionBuilder(store=store, zygote=zygote, scratch=tmp_path, roads=tuple(dict.fromkeys((road, "plain"))))
        built = builder.build(request(ALIKE, name="alike"), 300.0)
        assert built.road == road and built.module == "alike"
        loader = importlib.machinery.ExtensionFileLoader(built.module, str(built.path))
        module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(built.module, built.path, loader=loader))
        loader.exec_module(module)
        seen[road] = observed(module)
    assert seen["lean"] == seen["plain"]
    assert ("ValueError", "seven") in seen["lean"] and ("IndexError", "two") in seen["lean"] and ("TypeError", "") in seen["lean"]


@needs_extensions
def test_files_of_several_units_share_it(store, tmp_path, zygote):
    of_its_own = "#include <torch/extension.h>\ntorch::Tensor f(torch::Tensor x) { return x; }\n"
    binding = SIMPLE.replace("torch::Tensor f(torch::Tensor x) { return x; }", "torch::Tensor f(torch::Tensor x);")
    builder = ExtensionBuilder(store=store, zygote=zygote, scratch=tmp_path)
    assert builder.build(request(None, files=[["a.cpp", of_its_own], ["b.cpp", binding]]), 300.0).road == "lean"


CUDA = """
#include <torch/extension.h>
#include <cuda_runtime.h>
__global__ void twice(const float* x, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = 2 * x[i];
}
torch::Tensor f(torch::Tensor x) {
  auto out = torch::empty_like(x);
  twice<<<(x.numel() + 255) / 256, 256>>>(x.data_ptr<float>(), out.data_ptr<float>(), x.numel());
  return out;
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "docs";
  m.def("f", &f, "f");
  m.def("g", [](torch::Tensor x) { return f(x); });
}
"""


@needs_extensions
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("light", [True, False])
def test_it_may_stand_in_cuda_sources(tmp_path, light):
    asked = request(None, cuda_sources=CUDA)
    assert asked.binds_in_cuda and not request(SIMPLE, cuda_sources="int g;").binds_in_cuda
    toolchain, cuda = find_toolchain(), find_cuda()
    headers = Headers(ArtifactStore(tmp_path / "store"), toolchain, tmp_path, lambda s: None)
    LeanRoad(ArtifactStore(tmp_path / "store"), toolchain, tmp_path, lambda s: None, headers)._write_headers(tmp_path / "include")
    (tmp_path / "cuda.cu").write_text(CUDA)
    command = [*compile_command(cuda, "sm_90", toolchain.compiler.path, ["-O3"]), "-DTORCH_EXTENSION_NAME=x", "-DSANDBOX_LEAN"]
    command += ["-DSANDBOX_LEAN_CUDA", "-DSANDBOX_LEAN_BINDS", *(["-DSANDBOX_LEAN_LIGHT"] if light else [])]
    command += [f"-I{tmp_path / 'include'}", *headers.include_flags(), "-c", "cuda.cu", "-o", "cuda.o"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert b"PyInit_x" in (tmp_path / "cuda.o").read_bytes()
