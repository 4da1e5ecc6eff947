"""`load_inline` is served from a cache keyed by what the compiler sees; failures read like a compiler's."""

import os
import shutil
import subprocess
import sys

import pytest
from torch.utils import cpp_extension

from sandbox.build import cuda
from sandbox.jail.device import BuildError

CALL = {
    "name": "ext",
    "cpp_sources": "int f();",
    "cuda_sources": "__global__ void k() {}",
    "functions": ["f"],
    "extra_cuda_cflags": None,
    "verbose": False,
    "build_directory": None,
}


def key(arch="sm_90", tools="nvcc 13.0", **changes):
    return cuda.extension_key({**CALL, **changes}, arch=arch, tools=tools)


@pytest.mark.parametrize(
    "same", [{"name": "other"}, {"verbose": True}, {"build_directory": "/tmp/x"},
             {"cpp_sources": ["int f();"]}, {"functions": {"f": "f"}}]
)  # fmt: skip
def test_what_the_compiler_does_not_see_leaves_the_key_alone(same):
    assert key(**same) == key()


@pytest.mark.parametrize(
    "other", [{"cpp_sources": "long f();"}, {"cuda_sources": "__global__ void j() {}"}, {"functions": ["g"]},
              {"extra_cuda_cflags": ["--use_fast_math"]}, {"arch": "sm_80"}, {"tools": "nvcc 12.8"}]
)  # fmt: skip
def test_what_the_compiler_sees_changes_the_key(other):
    assert key(**other) != key()


def test_a_source_that_spells_its_name_is_built_under_it():
    spelled = {"functions": None, "cpp_sources": "PYBIND11_MODULE(ext, m) {}"}
    assert cuda.keeps_name({**CALL, **spelled})
    assert key(**spelled) != key(**spelled, name="other")
    assert cuda.keeps_name({**CALL, "cpp_sources": "TORCH_LIBRARY(ext, m) {}"})
    assert not cuda.keeps_name(CALL)


NINJA_LOG = """Error building extension 'vector_add': [1/3] nvcc -c /private/build-x/cuda.cu -o cuda.cuda.o
FAILED: cuda.cuda.o
/usr/local/bin/nvcc -DTORCH_EXTENSION_NAME=ext -c /private/build-x/cuda.cu
/private/build-x/cuda.cu(7): error: identifier "z" is undefined
      if (i < n) out[i] = x[i] + z[i];
                                 ^

1 error detected in the compilation of "/private/build-x/cuda.cu".
ninja: build stopped: subcommand failed.
"""


def test_a_failed_build_is_shortened_to_the_compilers_errors():
    text = cuda.first_errors(NINJA_LOG, ["/private/build-x"])
    assert text.startswith('cuda.cu(7): error: identifier "z" is undefined')
    assert "out[i] = x[i] + z[i]" in text
    assert "/private" not in text and "FAILED" not in text


def test_a_log_without_a_recognised_error_keeps_its_end():
    assert cuda.first_errors("a\nb\nKilled\n").endswith("Killed")


def test_cuda_on_a_machine_without_a_gpu_is_refused_with_a_reason():
    assert cuda.refusal("cuda:0") is None
    assert "NVIDIA GPU" in cuda.refusal("cpu") and "'cpp'" in cuda.refusal("cpu")


EXTENSION = """
#include <Python.h>
static PyObject* answer(PyObject* self, PyObject* args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {0}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "%s", 0, -1, methods};
PyMODINIT_FUNC PyInit_%s(void) { return PyModule_Create(&definition); }
"""


@pytest.fixture
def builder(tmp_path, monkeypatch):
    """Installs the cache around a stand-in for load_inline that builds a plain C extension (the real one
    takes 30 s)."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    import sysconfig

    calls = []

    def load_inline(name, cpp_sources, cuda_sources=None, functions=None, build_directory=None, verbose=False,
                    use_pch=False, is_python_module=True):  # fmt: skip
        calls.append((name, build_directory))
        source = os.path.join(build_directory, "main.c")
        with open(source, "w") as file:
            file.write(EXTENSION % (int(cpp_sources), name, name) if cpp_sources.isdigit() else cpp_sources)
        library = os.path.join(build_directory, f"{name}.so")
        include = sysconfig.get_paths()["include"]
        done = subprocess.run(
            ["gcc", "-O0", "-shared", "-fPIC", f"-I{include}", source, "-o", library],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"Error building extension '{name}': {done.stderr}")
        return cpp_extension._import_module_from_library(name, build_directory, is_python_module)

    monkeypatch.setattr(cpp_extension, "load_inline", load_inline)
    monkeypatch.setattr(cpp_extension, "remove_extension_h_precompiler_headers", lambda: None)
    monkeypatch.setattr(
        cuda, "library_kernels", lambda path: (cuda.OwnKernel(name="k", origin="cuda", registers=8),)
    )

    def install(job):
        private = tmp_path / job
        private.mkdir()
        cache = cuda.ExtensionCache(root=tmp_path / "cache", private=private, arch="sm_90")
        monkeypatch.setattr(cpp_extension, "load_inline", load_inline)
        return cuda.install(cache, tools="test"), cpp_extension.load_inline, cache

    return install, calls


def test_an_identical_source_is_built_once_and_loaded_from_the_cache(builder):
    install, calls = builder
    log, load_inline, _ = install("first")
    assert load_inline(name="a", cpp_sources="41", functions=["answer"]).answer() == 41
    assert [record.cached for record in log.records] == [False]
    log, load_inline, _ = install("second")
    assert load_inline(name="b", cpp_sources="41", functions=["answer"]).answer() == 41
    assert [record.cached for record in log.records] == [True]
    assert log.kernels == (cuda.OwnKernel(name="k", origin="cuda", registers=8),)
    assert len(calls) == 1


def test_two_sources_under_one_name_are_two_libraries(builder):
    install, _ = builder
    _, load_inline, _ = install("job")
    first = load_inline(name="a", cpp_sources="1", functions=["answer"])
    second = load_inline(name="a", cpp_sources="2", functions=["answer"])
    assert (first.answer(), second.answer()) == (1, 2)


def test_a_lock_left_in_a_directory_the_candidate_names_stops_nobody(builder, tmp_path):
    install, calls = builder
    _, load_inline, cache = install("job")
    stale = tmp_path / "stale"
    stale.mkdir()
    (stale / "lock").touch()
    load_inline(name="a", cpp_sources="1", functions=["answer"], build_directory=str(stale))
    assert calls[0][1].startswith(str(cache.private))


def test_a_half_published_entry_counts_as_absent(builder):
    install, calls = builder
    log, load_inline, cache = install("first")
    load_inline(name="a", cpp_sources="1", functions=["answer"])
    entry = cache.find(log.records[0].key)
    next(entry.glob("*.so")).unlink()
    assert cache.find(log.records[0].key) is None
    _, load_inline, _ = install("second")
    assert load_inline(name="a", cpp_sources="1", functions=["answer"]).answer() == 1
    assert len(calls) == 2


def test_a_build_failure_raises_the_compilers_words_and_is_remembered_when_caught(builder):
    install, _ = builder
    log, load_inline, cache = install("job")
    with pytest.raises(BuildError, match="error:"):
        load_inline(name="broken", cpp_sources="int f( {", functions=["f"])
    assert "error" in log.error and str(cache.private) not in log.error
    assert log.seconds > 0
    assert cache.find(log.records[0].key) is None


def test_the_environment_of_a_build_is_private_and_bounded(tmp_path):
    cache = cuda.ExtensionCache(root=tmp_path, private=tmp_path / "job", arch="sm_90")
    assert cuda.build_environment(cache, 4) == {
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "job"), "TORCH_CUDA_ARCH_LIST": "9.0", "MAX_JOBS": "4",
    }  # fmt: skip
    assert cuda.build_environment(
        cuda.ExtensionCache(root=tmp_path, private=tmp_path, arch="sm_120"), 0
    )["MAX_JOBS"] == "1"  # fmt: skip


DEVICE_CODE = r"""
__global__ void add_kernel(const float* a, float* b) { b[threadIdx.x] += a[threadIdx.x]; }
template <typename T, int B> __global__ void scale_kernel(T* a) { a[threadIdx.x] *= B; }
namespace { __global__ void hidden(float* a) { a[0] = 1; } }
extern "C" void go(float* a) { add_kernel<<<1, 1>>>(a, a); scale_kernel<float, 3><<<1, 1>>>(a); hidden<<<1,
1>>>(a); }
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_own_kernels_are_read_from_the_device_code_of_the_library(tmp_path):
    (tmp_path / "k.cu").write_text(DEVICE_CODE)
    library = tmp_path / "k.so"
    subprocess.run(
        ["nvcc", "-arch=sm_90", "-shared", "-Xcompiler", "-fPIC", str(tmp_path / "k.cu"), "-o", str(library)],
        check=True,
    )
    kernels = cuda.library_kernels(library)
    assert {kernel.name for kernel in kernels} == {
        "add_kernel(float const*, float*)", "void scale_kernel<float, 3>(float*)",
        "(anonymous namespace)::hidden(float*)",
    }  # fmt: skip
    assert all(kernel.registers > 0 for kernel in kernels)


def test_the_trusted_side_imports_the_gpu_modules_without_torch():
    code = (
        "import sandbox.build.cuda, sandbox.jail.device_cuda, sandbox.jail.nvml, sandbox.verdict.coverage;"
        "import sys;"
        "assert not {'torch', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_a_library_without_device_code_defines_no_kernels(tmp_path):
    (tmp_path / "f.c").write_text("int f(void) { return 1; }")
    subprocess.run(
        ["gcc", "-shared", "-fPIC", str(tmp_path / "f.c"), "-o", str(tmp_path / "f.so")], check=True
    )
    assert cuda.library_kernels(tmp_path / "f.so") == ()
