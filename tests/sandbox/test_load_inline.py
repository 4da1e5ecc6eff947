"""C++ candidates through an unchanged `load_inline`: built in a compile jail, loaded from sealed memory."""

import shutil
import tempfile
import threading
import time
from pathlib import Path

import pytest

from sandbox.build.extension import parse_request
from sandbox.build.roads import BuildFailed, ExtensionBuilder
from sandbox.jail.faults import JailReply, JailTimeout
from sandbox.jail.limits import Limits
from sandbox.jail.spawn import Zygote
from sandbox.oracle.builds import Builds
from sandbox.protocol import MAX_SOURCE_BYTES
from sandbox.verdict.coverage import OwnKernel
from tests.sandbox.helpers import ADD_BIAS, needs_extensions

pytestmark = needs_extensions

LIMITS = Limits(memory_bytes=2 << 30)
FLAGS = ["-O2"]
"""One set for all tests, so that one header is precompiled."""


@pytest.fixture(scope="module")
def store(built_headers):
    return built_headers


@pytest.fixture(scope="module")
def zygote(tmp_path_factory):
    zygote = Zygote(modules=["torch"], threads=1, directory=tmp_path_factory.mktemp("zygote"))
    yield zygote
    zygote.close()


@pytest.fixture
def builder(store, zygote, tmp_path):
    return ExtensionBuilder(store=store, zygote=zygote, scratch=tmp_path)


@pytest.fixture
def run(builder, zygote):
    """Executes Python in a runner that may build extensions; returns the builds. Raises JailReply."""

    def execute(source, build_s=250.0):
        builds = Builds(build_s)
        with zygote.runner(LIMITS, 2 << 30) as runner:
            runner.serve = builds.served_to(lambda: builder)
            runner.call(
                "load_reference", 60, source=f"{PRELUDE}\n{source}\n{ADD_BIAS}", entry_point="Model",
                dtype="float32", device="cpu", seed=1,
            )  # fmt: skip
        return builds

    return execute


PRELUDE = f"""
import torch
from torch.utils.cpp_extension import load_inline
def build(source, functions, **options):
    return load_inline(name="ext", cpp_sources=source, functions=functions,
                       **{{"extra_cflags": {FLAGS!r}, **options}})
def raised(call, *args):
    try:
        call(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")
"""
EVERY_TYPE = '''
source = """
#include <tuple>
using torch::Tensor;
torch::Tensor add(torch::Tensor x, const at::Tensor& y) { return x + y; }
void fill(torch::Tensor& x, double value) { x.fill_(value); }
torch::Tensor maybe(std::optional<at::Tensor> x, c10::optional<double> scale) {
  return x.has_value() ? *x * scale.value_or(2.0) : torch::Tensor();
}
std::vector<torch::Tensor> twice(std::vector<torch::Tensor> xs) { for (auto& x : xs) x = x * 2; return xs; }
std::tuple<torch::Tensor, int64_t, double, bool, std::string> mixed(
    const torch::Tensor& x, int64_t n, int m, double a, float b, bool flag, const std::string& word,
    std::vector<int64_t> sizes, at::IntArrayRef more, std::vector<double> weights) {
  int64_t sum = n + m;
  for (int64_t size : sizes) sum += size;
  for (int64_t size : more) sum += size;
  for (double weight : weights) a += weight;
  return {x + 1, sum, a + b, !flag, word + "!"};
}
std::pair<Tensor, Tensor> both(Tensor x) { return {x, -x}; }
std::optional<int64_t> none() { return std::nullopt; }
torch::Tensor checked(torch::Tensor x) {
  TORCH_CHECK(x.dim() == 2, "x must be a matrix, it has ", x.dim());
  return x;
}
void throws(int kind) {
  if (kind == 0) throw std::invalid_argument("told so");
  if (kind == 1) TORCH_CHECK_INDEX(false, "out of range");
  if (kind == 2) TORCH_CHECK_VALUE(false, "bad value");
  throw 5;
}
template <typename T> T square(T x) { return x * x; }
template <typename scalar_t> void relu_kernel(const scalar_t* x, scalar_t* out, int64_t n) {
  at::parallel_for(0, n, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) out[i] = x[i] > 0 ? x[i] : scalar_t(0);
  });
}
torch::Tensor my_relu(torch::Tensor x) {
  torch::NoGradGuard no_grad;
  auto out = torch::empty_like(x);
  AT_DISPATCH_FLOATING_TYPES_AND_HALF(x.scalar_type(), "my_relu", [&] {
    relu_kernel<scalar_t>(x.data_ptr<scalar_t>(), out.data_ptr<scalar_t>(), x.numel());
  });
  return out;
}
MORE
"""
ext = build(source, ["add", "fill", "maybe", "twice", "mixed", "both", "none", "checked", "throws",
                     "square<double>", "my_relu"])
x = torch.randn(3, 4)
assert torch.equal(ext.add(x, x), 2 * x)
y = x.clone()
assert ext.fill(y, 3) is None and torch.equal(y, torch.full_like(x, 3))
assert torch.equal(ext.maybe(x, None), 2 * x) and torch.equal(ext.maybe(x, 0.5), 0.5 * x)
assert ext.maybe(None, None) is None
doubled = ext.twice([x, y])
assert type(doubled) is list and torch.equal(doubled[0], 2 * x) and ext.twice(()) == []
first, total, real, flag, word = ext.mixed(x, 1, 2, 0.5, 0.25, True, "wörd", [3, 4], (5,), [1, 2.0])
assert torch.equal(first, x + 1) and (total, real, flag, word) == (15, 3.75, False, "wörd!")
assert type(ext.both(x)) is tuple and torch.equal(ext.both(x)[1], -x)
assert ext.none() is None and getattr(ext, "square<double>")(3) == 9.0
for dtype in (torch.float32, torch.float64, torch.float16):
    assert torch.equal(ext.my_relu(x.to(dtype)), x.to(dtype).relu())
assert raised(ext.my_relu, x.int())[0] == "NotImplementedError", raised(ext.my_relu, x.int())
assert torch.equal(ext.add(torch.nn.Parameter(x), x), 2 * x)
kind, text = raised(ext.checked, x[0])
assert kind == "RuntimeError" and text.startswith("x must be a matrix, it has 1"), (kind, text)
assert raised(ext.throws, 0) == ("RuntimeError", "told so")
assert raised(ext.throws, 1)[0] == "IndexError" and raised(ext.throws, 2)[0] == "ValueError"
for call in (lambda: ext.add(x), lambda: ext.add(x, None), lambda: ext.add(x, 1), lambda: ext.add(x, x, x),
             lambda: ext.fill(x, "1"), lambda: ext.throws(1.5), lambda: ext.throws(2**40),
             lambda: ext.twice(x, 1), lambda: ext.twice([x, None]),
             lambda: ext.checked(x=x), lambda: ext.mixed(x)):
    kind, text = raised(call)
    assert kind == "TypeError", (kind, text)
for value, means in ((1, True), (0, False), (None, False), (torch.tensor(True), True)):
    assert ext.mixed(x, 1, 2, 0.5, 0.25, value, "", [], [], [])[3] is not means
loose = ext.mixed(x, torch.tensor(3), True, 1, torch.tensor(0.5), False, b"b", torch.Size([1]), [], ())
assert loose[1:3] == (5, 1.5)
'''


@pytest.mark.parametrize(
    ("road", "more"),
    [
        ("lean", ""),
        ("fast", "at::Tensor norm(at::Tensor x) { return at::frobenius_norm(x, {0}); }"),
        ("plain", "py::object same(py::object value) { return value; }"),
    ],
)
def test_every_argument_and_result_type_behaves_alike_on_all_roads(run, road, more):
    builds = run(EVERY_TYPE.replace("MORE", more))
    assert f"by the {road} road" in builds._notes[0], builds._notes


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "torch::Tensor f(torch::Tensor x) {\n  return x + missing_thing;\n}",
            "main.cpp:2:14: error: 'missing_thing'",
        ),
        ("torch::Tensor f(torch::Tensor x) {\n\n  return x\n}", "main.cpp:3:11: error: expected ';'"),
        ("torch::Tensor f(torch::Tensor x) { return x.no_such(); }", "no_such"),
        ("torch::Tensor f(torch::Tensor x) { return x; ", "expected '}'"),
        ('#include "no_such_file.h"\n', "no_such_file.h"),
        ("#error told\n", "told"),
        (
            "torch::Tensor g(torch::Tensor); torch::Tensor f(torch::Tensor x) { return g(x); }",
            "g(at::Tensor)",
        ),
    ],
)
def test_compile_errors_come_back_in_the_compilers_words(run, tmp_path, store, source, words):
    with pytest.raises(JailReply) as caught:
        run(f"build({source!r}, ['f'])")
    text = str(caught.value)
    assert caught.value.kind == "build_failed" and words in text, text
    assert str(tmp_path) not in text and str(store.root) not in text and "site-packages" not in text
    assert not list(tmp_path.glob("build-*"))


def test_an_error_can_be_caught_and_another_extension_built(run):
    builds = run(
        "kind, text = raised(build, 'int f( {', ['f'])\n"
        "assert kind == 'BuildError' and 'error' in text\n"
        "assert build('int f() { return 1; }', ['f']).f() == 1"
    )
    assert ["not built" in note for note in builds._notes] == [True, False]


def test_several_extensions_of_one_name_live_side_by_side(run):
    run(
        "first = build('int f() { return 1; }', ['f'])\n"
        "sources = ['int g();', 'int f() { return g(); }', 'int g() { return 2; }']\n"
        "second = build(sources, {'f': 'a \"doc\"'})\n"
        "assert (first.f(), second.f(), first.f()) == (1, 2, 1) and second.f.__doc__ == 'a \"doc\"'"
    )


def test_functions_may_stand_where_older_versions_of_pytorch_had_them(run):
    run(
        "from torch.utils.cpp_extension import load_inline\n"
        "assert load_inline('old', 'int f() { return 3; }', None, ['f']).f() == 3\n"
        "kind, text = raised(load_inline, 'old', 'int f() { return 3; }', None, 'int f(sycl::queue q) {}')\n"
        "assert kind == 'BuildError' and 'SYCL' in text"
    )


def test_files_that_the_candidate_wrote_are_built_by_load(run):
    run(
        "from torch.utils.cpp_extension import load\n"
        "open('my.cpp', 'w').write('#include <Python.h>\\n'\n"
        "                          'static PyModuleDef m = {PyModuleDef_HEAD_INIT, \"mine\"};'\n"
        "                          'PyMODINIT_FUNC PyInit_mine() { return PyModule_Create(&m); }')\n"
        f"assert load(name='mine', sources=['my.cpp'], extra_cflags={FLAGS!r}).__name__ == 'mine'"
    )


def test_a_library_can_register_operators_instead_of_a_module(run):
    run(
        "source = 'at::Tensor twice(const at::Tensor& x) { return x * 2; }' \\\n"
        "         'TORCH_LIBRARY(my_ops, m) { m.def(\"twice\", &twice); }'\n"
        "build(source, None, is_python_module=False)\n"
        "assert torch.equal(torch.ops.my_ops.twice(torch.ones(2)), torch.full((2,), 2.0))"
    )


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (f"build('/*' + 'x' * {MAX_SOURCE_BYTES} + '*/', ['f'])", "limit is"),
        ("load_inline(name='../x', cpp_sources='int f();', functions=['f'])", "identifier"),
        ("build('int f();', ['f'], extra_cflags=['-O2', '-o', '/x'])", "'-o' is not allowed"),
        ("build('int f();', ['f'], extra_cflags=['-fplugin=/x.so'])", "is not allowed"),
        ("build('int f();', ['f'], extra_cflags=['-include', '/etc/passwd'])", "is not allowed"),
        ("build('int f();', ['f'], extra_ldflags=['@/etc/passwd'])", "is not allowed"),
        ("build('int f();', ['f'], extra_include_paths=['/etc'])", "no other directory"),
        ("build('int f();', ['f'], cuda_sources='__global__ void k() {}')", "needs an NVIDIA GPU"),
        ("[raised(build, 'int f();', ['a b']) for _ in range(16)]; build('int f();', ['f'])", "may build 16"),
        ("build('int f();', ['f'], extra_cflags=3)", "is not allowed"),
    ],
)
def test_hostile_requests_are_refused_in_words(run, call, words):
    with pytest.raises(JailReply, match=words) as caught:
        run(call)
    assert caught.value.kind == "build_failed"


def test_a_runner_that_nobody_serves_is_told_so(zygote):
    with zygote.runner(LIMITS, 2 << 30) as runner, pytest.raises(JailReply, match="nothing is built"):
        runner.call(
            "load_reference", 20, source=f"{PRELUDE}\nbuild('int f();', ['f'])\n{ADD_BIAS}",
            entry_point="Model", dtype="float32", device="cpu", seed=1,
        )  # fmt: skip


def request(source, **changes):
    return parse_request(
        {"name": "x", "cpp_sources": source, "functions": ["f"], "extra_cflags": FLAGS, **changes}
    )


def test_what_the_fast_road_lacks_is_built_by_the_plain_one(builder):
    """A type without a fast conversion, and a name that only the whole header declares."""
    built = builder.build(
        request("at::ScalarType f(at::ScalarType x) { torch::OrderedDict<std::string, int> d; return x; }"),
        250,
    )
    assert built.road == "plain"


def test_identical_sources_of_two_workers_are_built_once(store, tmp_path, builder):
    asked, built = request(f"int f() {{ return {time.time_ns() % 10**9}; }}"), []

    def work(number):
        scratch = Path(tempfile.mkdtemp(dir=tmp_path))
        zygote = Zygote(modules=[], threads=1, directory=scratch)
        try:
            worker = ExtensionBuilder(store=store, zygote=zygote, scratch=scratch)
            built.append(worker.build(asked, 250))
        finally:
            zygote.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.cached for one in built) == [False, True]
    assert built[0].path == built[1].path and built[0].path.read_bytes()[:4] == b"\x7fELF"
    again = builder.build(asked, 250)
    assert again.cached and again.road == "lean"
    again.path.unlink()
    assert not builder.build(asked, 250).cached


def test_a_build_that_never_ends_is_ended_and_charged(builder, tmp_path):
    loop = "long s = 0; for (long i = 0; i < 200000; ++i) s += i ^ n; return s;"
    slow = f"template <int n> constexpr long g() {{ {loop} }}\n" + "".join(
        f"constexpr long v{n} = g<{n}>();\n" for n in range(2000)
    )
    builder.build(request("int f() { return 0; }"), 250)
    before_s = builder.spent_s
    with pytest.raises(JailTimeout):
        builder.build(request(slow + "int f() { return 1; }"), 1.0)
    assert builder.spent_s - before_s >= 1.0
    assert builder.build(request("int f() { return 0; }"), 250).cached, "other builds are kept"
    assert not list(tmp_path.glob("build-*"))


def test_a_build_ends_when_whoever_asked_for_it_takes_too_much(store, zygote, tmp_path):
    from sandbox.build.roads import RequesterGrew

    builder = ExtensionBuilder(store=store, zygote=zygote, scratch=tmp_path, excess=lambda: "used 9 GB")
    with pytest.raises(RequesterGrew, match="9 GB"):
        builder.build(request(f"int f() {{ return {time.time_ns() % 10**9}; }} // grows"), 250)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_cuda_sources_are_compiled_without_a_gpu_and_their_kernels_known(store, zygote, tmp_path):
    builder = ExtensionBuilder(store=store, zygote=zygote, scratch=tmp_path, arch="sm_90")
    cuda = (
        "template <typename T> __global__ void scale(T* x) { x[threadIdx.x] *= 2; }\n"
        "namespace { __global__ void hidden(float* x) { x[0] = 1; } }\n"
        "void go(float* x) { scale<float><<<1, 32>>>(x); hidden<<<1, 1>>>(x); }"
    )
    cpp = (
        "#include <torch/extension.h>\nvoid go(float*);\nvoid f(torch::Tensor x) { go(x.data_ptr<float>()); }"
    )
    asked = request(cpp, cuda_sources=cuda, no_implicit_headers=True, extra_cuda_cflags=["--use_fast_math"])
    built = builder.build(asked, 250)
    assert {kernel.name for kernel in built.kernels} == {
        "void scale<float>(float*)", "(anonymous namespace)::hidden(float*)",
    }  # fmt: skip
    assert all(type(kernel) is OwnKernel and kernel.registers > 0 for kernel in built.kernels)
    again = builder.build(asked, 250)
    assert again.cached and again.kernels == built.kernels
    other = ExtensionBuilder(store=store, zygote=zygote, scratch=tmp_path, arch="sm_80")
    assert other.key(asked) != builder.key(asked)
    broken = request(cpp, cuda_sources=cuda.replace("*= 2", "*= two"), no_implicit_headers=True)
    with pytest.raises(BuildFailed, match=r'cuda.cu\(1\): error: identifier "two" is undefined'):
        builder.build(broken, 250)
