"""Building bare kernels: signature, prelude, cache, and what happens when the machine cannot build."""

import ctypes
import errno
import os
import threading

import pytest

from sandbox.build import BuildFailed, BuildUnavailable, cpp
from sandbox.build.artifacts import ArtifactStore
from sandbox.build.signature import SignatureError, make_signature
from sandbox.jail.faults import JailTimeout
from sandbox.jail.spawn import Zygote

F32 = {"dtype": "float32", "shape": [2, 3]}


def signature(**changes):
    arguments = {
        "arguments": ["x", "scale"],
        "values": [F32, 2.0],
        "state": [("fc.weight", F32)],
        "outputs": [F32],
        "is_tuple": False,
        **changes,
    }
    return make_signature(**arguments)


@pytest.fixture(scope="module")
def zygote(tmp_path_factory):
    zygote = Zygote(modules=["torch"], threads=1, directory=tmp_path_factory.mktemp("zygote"))
    yield zygote
    zygote.close()


@pytest.fixture
def build(zygote, tmp_path):
    store = ArtifactStore(tmp_path / "store")

    def run(source, timeout_s=60.0, **changes):
        return cpp.build_kernel(
            source, signature(**changes), store=store, zygote=zygote, scratch=tmp_path, timeout_s=timeout_s
        )

    run.store = store
    return run


def test_the_declaration_lists_inputs_state_outputs():
    assert signature().declaration == (
        'extern "C" void kernel(const float* x, const float* fc_weight, float* out)'
    )
    two = signature(outputs=[F32, {"dtype": "int64", "shape": []}], is_tuple=True)
    assert two.declaration.endswith("float* out0, long* out1)")
    nested = signature(arguments=["xs"], values=[[F32, F32]])
    assert "const float* xs_0, const float* xs_1" in nested.declaration


def test_names_that_c_cannot_take_or_that_clash_are_changed():
    clash = signature(arguments=["x", "default"], values=[F32, F32], state=[("x", F32)], outputs=[F32])
    assert "const float* x, const float* default_, const float* x_state, float* out" in clash.declaration


def test_the_prelude_holds_sizes_and_values():
    lines = signature(
        arguments=["x", "a", "b", "c", "d", "e"], values=[F32, 2, 0.5, True, None, float("inf")]
    ).prelude.splitlines()
    assert {
        "constexpr long x_n = 6;",
        "constexpr long x_d0 = 2;",
        "constexpr long x_d1 = 3;",
        "constexpr long a = 2L;",
        "constexpr float b = 0.5;",
        "constexpr bool c = true;",
        "constexpr float e = __builtin_inff();",
    } <= set(lines)
    assert lines[-1] == '#line 1 "kernel.cpp"'


def test_what_has_no_c_form_is_named():
    with pytest.raises(SignatureError, match="complex64"):
        signature(values=[{"dtype": "complex64", "shape": [1]}, 1.0])
    with pytest.raises(SignatureError, match="x is a list"):
        signature(values=[[1, 2], 1.0])


def test_a_built_library_exports_only_the_kernel_and_computes(build):
    artifact = build(
        "int helper(int a) { return a + 1; }\n"
        'extern "C" void kernel(const float* x, const float* w, float* out) {\n'
        "for (long i = 0; i < out_n; ++i) out[i] = helper(1) * scale * expf(x[i]); }"
    )
    library = ctypes.CDLL(str(artifact.path))
    with pytest.raises(AttributeError):
        library.helper  # noqa: B018
    x, out = (ctypes.c_float * 6)(*range(6)), (ctypes.c_float * 6)()
    library.kernel(x, None, out)
    assert list(out) == pytest.approx([4 * 2.718281828**n for n in range(6)], rel=1e-4)


def test_equal_sources_are_built_once_and_others_are_not_confused(build):
    source = 'extern "C" void kernel(const float* x, const float* w, float* out) { out[0] = scale; }'
    first, second = build(source), build(source)
    assert (first.cached, second.cached) == (False, True) and first.path == second.path
    other = build(source, values=[F32, 3.0])
    assert not other.cached and other.key != first.key


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('extern "C" void kernel(', "kernel.cpp:1"),
        ("void nothing() {}", "kernel"),
        ('extern "C" void other() {}', "kernel"),
        ('extern int missing(); extern "C" void kernel() { missing(); }', "missing"),
        ("#error told\n", "told"),
        ('#include "no_such_file.h"\n', "no_such_file.h"),
    ],
)
def test_a_refused_source_gives_the_compiler_s_words_without_paths(build, tmp_path, source, words):
    with pytest.raises(BuildFailed, match=words) as caught:
        build(source)
    assert str(tmp_path) not in str(caught.value)
    assert not list(tmp_path.glob("build-*"))


def test_a_build_that_never_ends_is_ended(build, tmp_path):
    loop = "long s = 0; for (long i = 0; i < 200000; ++i) s += i ^ n; return s;"
    slow = f"template <int n> constexpr long f() {{ {loop} }}\n"
    chain = "".join(f"constexpr long v{n} = f<{n}>();\n" for n in range(2000))
    source = slow + chain + 'extern "C" void kernel() {}'
    with pytest.raises(JailTimeout):
        build(source, timeout_s=0.3)
    assert not list(tmp_path.glob("build-*"))


def test_no_compiler_says_how_to_get_one(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    cpp.find_compiler.cache_clear()
    try:
        with pytest.raises(BuildUnavailable, match="apt-get install g\\+\\+"):
            cpp.find_compiler()
    finally:
        cpp.find_compiler.cache_clear()


def test_a_full_disk_is_the_machine_s_fault_and_leaves_nothing(build, monkeypatch, tmp_path):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    build('extern "C" void kernel() {}')
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(BuildUnavailable, match="no space left"):
        build('extern "C" void kernel() { int a; }')
    assert not list(build.store.root.glob("*/.new-*")) and not list(tmp_path.glob("build-*"))


def test_the_store_survives_simultaneous_publishers_and_prunes_the_oldest(tmp_path):
    store = ArtifactStore(tmp_path / "store")
    built = tmp_path / "built"
    built.write_bytes(b"x" * 1000)
    keys = [ArtifactStore.key("a", str(n)) for n in range(3)]
    threads = [threading.Thread(target=store.publish, args=(keys[n % 3], built)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(store.find(key).read_bytes() == built.read_bytes() for key in keys)
    os.utime(store.find(keys[0]), (1, 1))
    assert store.prune(limit_bytes=2500) == 1
    assert store.find(keys[0]) is None and store.find(keys[1]) is not None
    assert ArtifactStore.key("ab", "c") != ArtifactStore.key("a", "bc")


def test_a_library_that_is_a_link_to_another_file_is_not_taken(tmp_path):
    (tmp_path / "secret").write_text("what must not get out")
    (tmp_path / "kernel.so").symlink_to(tmp_path / "secret")
    store = ArtifactStore(tmp_path / "store")
    with pytest.raises(OSError):
        store.publish("ab" * 32, tmp_path / "kernel.so")
    assert store.find("ab" * 32) is None
