"""What the lean header offers of tensors' operations behaves as PyTorch's, and what no road can build ends at once."""

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
from sandbox.build.lean_road import DISPATCH_OF_TYPE, SOURCES, LeanRoad, hopeless
from sandbox.build.roads import ExtensionBuilder
from sandbox.build.toolchain import extension_standard, find_cuda, find_toolchain
from tests.sandbox.helpers import needs_extensions

OPERATIONS = """
torch::Tensor f(torch::Tensor x, int64_t which) {
  switch (which) {
    case 0: return x.clamp(0, 3);
    case 1: return torch::clamp(x, 0.5, 2.5);
    case 2: return x.clamp(c10::nullopt, 1);
    case 3: return torch::clamp(x, 1);
    case 4: { auto y = x.clone(); y.clamp_(1, 2); return y; }
    case 5: return x.clamp();
    case 6: return x.flip({0});
    case 7: return torch::flip(x, {0, 1});
    case 8: return torch::cumprod(x, 1);
    case 9: return x * 2.0;
    case 10: return 1 + x;
    case 11: return x / 2;
    case 12: return x - true;
    case 13: return x.pow(2.5);
    case 14: return x.contiguous(at::MemoryFormat::Contiguous).clamp(0.0f);
    case 15: TORCH_CHECK(!x.type().is_cuda(), "on a GPU"); return torch::full({2}, 1, x.type());
    case 16: return torch::empty({2}, x.type().options()).fill_(x.type().scalarType() == torch::kLong ? 1 : 0);
    case 17: return torch::full({2}, x.type() == x.clone().type());
    case 18: return torch::full({2}, x.data<float>()[0]);
  }
  return x;
}
torch::Tensor formats(torch::Tensor x, int64_t which) {
  const auto last = x.contiguous(at::MemoryFormat::ChannelsLast);
  switch (which) {
    case 0: return last;
    case 1: return torch::empty_like(last, x.options().memory_format(at::MemoryFormat::Contiguous)).zero_();
    case 2: return torch::zeros_like(last);
    case 3: return torch::full({2}, x.is_contiguous(torch::MemoryFormat::ChannelsLast));
    case 4: return torch::full({2}, last.is_contiguous(torch::MemoryFormat::ChannelsLast) && !last.is_contiguous());
    case 5: return x.to(x.options().dtype(torch::kDouble).memory_format(at::MemoryFormat::ChannelsLast));
    case 6: return x.contiguous(at::MemoryFormat::ChannelsLast3d);
  }
  return x;
}
"""


@pytest.fixture(scope="module")
def store(built_headers):
    return built_headers


def request(cpp_sources, **changes):
    return parse_request({"name": "x", "cpp_sources": cpp_sources, "functions": ["f"], **changes})


def outcome(function, *arguments):
    try:
        found = function(*arguments)
    except Exception as error:
        return type(error).__name__, str(error).splitlines()[0]
    return found.dtype, found.stride(), str(found.tolist())  # as text NaN is itself


@needs_extensions
def test_operations_are_pytorch_s(store, tmp_path, zygote):
    torch.manual_seed(0)
    inputs = [torch.arange(6).reshape(2, 3), 3 * torch.randn(2, 3), torch.randn(3, 2).t().half(), torch.ones(2, 3, dtype=torch.bool)]
    image = torch.randn(1, 2, 4, 4)
    seen = {}
    for road in ("lean", "plain"):
        builder = ExtensionBuilder(store=store, zygote=zygote, scratch=tmp_path, roads=tuple(dict.fromkeys((road, "plain"))))
        built = builder.build(request(OPERATIONS, functions=["f", "formats"]), 300.0)
        assert built.road == road
        loader = importlib.machinery.ExtensionFileLoader(built.module, str(built.path))
        module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(built.module, built.path, loader=loader))
        loader.exec_module(module)
        seen[road] = [outcome(module.f, x, which) for x in inputs for which in range(19)]
        seen[road] += [outcome(module.formats, image, which) for which in range(7)]
    differ = [(lean, plain) for lean, plain in zip(seen["lean"], seen["plain"], strict=True) if lean != plain]
    assert not differ


BINDING = "sandbox_binding.cpp:6:40: error: 'f' was not declared in this scope; did you mean 'std::f'?\n"
IN_CUDA = 'cuda.cu(8): error: class "sandbox_lean::Tensor" has no member "einsum"\n'


@pytest.mark.parametrize(
    ("source", "log", "so"),
    [
        ("", BINDING, True),
        ("", BINDING.replace("'", "\u2018", 1).replace("'", "\u2019", 1) + IN_CUDA, True),
        ("", "main.cpp:1:1: error: 'einsum' is not a member of 'torch'\n" + BINDING, False),
        ("", "main.cpp:1:10: fatal error: other.h: No such file or directory\n", False),
        ("", BINDING.replace("'f'", "'g'"), False),
        ("using namespace at;", BINDING, False),
        ("", IN_CUDA, False),
        ("", IN_CUDA + "main.cpp:4:1: error: redefinition of 'PyObject* PyInit_x()'", True),
        ("", "/usr/bin/ld: cuda.o: multiple definition of `PyInit_x'; main.o: first defined here", True),
        ("", IN_CUDA + f'dispatch.h(9): error: static assertion failed with "PyTorch\'s {DISPATCH_OF_TYPE}"', True),
    ],
)
def test_errors_that_every_road_ends_in(source, log, so):
    assert hopeless(request(source + " int g();"), log) is so


def test_the_header_says_what_is_looked_for():
    assert DISPATCH_OF_TYPE in (SOURCES / "dispatch.h").read_text()


OF_TYPE = """
#include <torch/extension.h>
torch::Tensor f(torch::Tensor x) {
  AT_DISPATCH_FLOATING_TYPES(x.type(), "f", [&] { x.data_ptr<scalar_t>(); });
  return x;
}
"""


@needs_extensions
@pytest.mark.parametrize(("changes", "words"), [({}, DISPATCH_OF_TYPE), ({"functions": ["g"]}, "'g' was not declared")])
def test_what_is_hopeless_is_tried_once(store, tmp_path, zygote, changes, words):
    source = OF_TYPE if not changes else OF_TYPE.replace("type()", "scalar_type()")
    builder, tried = ExtensionBuilder(store=store, zygote=zygote, scratch=tmp_path), []
    way = builder._way
    builder._way = lambda road, light, *rest: tried.append((road, light)) or way(road, light, *rest)
    with pytest.raises(BuildFailed) as failed:
        builder.build(request(source, **changes), 300.0)
    assert words in str(failed.value) and tried == [("lean", True)]


@needs_extensions
def test_pytorch_does_not_take_it_either(tmp_path):
    (tmp_path / "of_type.cpp").write_text(OF_TYPE.replace("torch/extension.h", "torch/types.h"))
    toolchain = find_toolchain()
    headers = Headers(ArtifactStore(tmp_path / "store"), toolchain, tmp_path, lambda s: None)
    command = [toolchain.compiler.path, f"-std={extension_standard()}", "-fsyntax-only", *headers.include_flags(), "of_type.cpp"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "DeprecatedTypeProperties" in done.stderr, done.stderr


@needs_extensions
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_nvcc_says_it_too(tmp_path):
    toolchain, cuda = find_toolchain(), find_cuda()
    headers = Headers(ArtifactStore(tmp_path / "store"), toolchain, tmp_path, lambda s: None)
    LeanRoad(ArtifactStore(tmp_path / "store"), toolchain, tmp_path, lambda s: None, headers)._write_headers(tmp_path / "include")
    (tmp_path / "cuda.cu").write_text(OF_TYPE)
    command = [*compile_command(cuda, "sm_90", toolchain.compiler.path, []), "-DSANDBOX_LEAN", "-DSANDBOX_LEAN_CUDA", "-DSANDBOX_LEAN_LIGHT"]
    command += [f"-I{tmp_path / 'include'}", *headers.include_flags(), "-c", "cuda.cu", "-o", "cuda.o"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and hopeless(request("int f();", cuda_sources=OF_TYPE), done.stdout + done.stderr)
