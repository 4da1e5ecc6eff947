"""Requests for extensions are untrusted data: bounded, checked against lists,
and named by what the compiler sees."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.utils.cpp_extension
from hypothesis import given
from hypothesis import strategies as st

from sandbox.build.artifacts import ArtifactStore
from sandbox.build.cuda import compile_command, host_flags, refusal
from sandbox.build.extension import BINDING_UNIT, RequestRefused, parse_request
from sandbox.build.flags import check_cpp, check_cuda, check_link, header_flags
from sandbox.build.headers import MAX_PRECOMPILED, Headers, names_at_namespace_scope
from sandbox.build.locks import build_lock
from sandbox.build.logs import first_errors
from sandbox.build.toolchain import Cuda, extension_standard, find_toolchain
from sandbox.jail.extensions import Conversation
from sandbox.jail.frames import Channel
from sandbox.oracle.builds import MAX_REQUESTS, Builds
from sandbox.oracle.draft import Draft, Job
from sandbox.protocol import MAX_SOURCE_BYTES, Candidate, EvaluationResult, Options, TaskSpec
from tests.sandbox.helpers import needs_extensions

CALL = {"name": "ext", "cpp_sources": "int f() { return 1; }", "functions": ["f"]}
WITH_CUDA = {**CALL, "cuda_sources": "__global__ void k() {}"}


def key(call=CALL, identity=("g++ 12",), **changes):
    return parse_request({**call, **changes}).key(*identity)


@pytest.mark.parametrize(
    "same", [{"name": "other"}, {"cpp_sources": ["int f() { return 1; }"]}, {"functions": {"f": "f"}},
             {"functions": "f"}, {"extra_cflags": []}, {"extra_cflags": [" "]}]
)  # fmt: skip
def test_what_the_compiler_does_not_see_leaves_the_key_alone(same):
    assert key(**same) == key()


@pytest.mark.parametrize(
    "other", [{"cpp_sources": "int f() { return 2; }"}, {"functions": ["f", "g"]},
    {"functions": {"f": "doc"}},
              {"extra_cflags": ["-O2"]}, {"extra_ldflags": ["-lm"]}, {"with_cuda": True},
              {"cuda_sources": "__global__ void k() {}"}, {"extra_cuda_cflags": ["--use_fast_math"]},
              {"cpp_sources": ["int f()", "{ return 1; }"]}, {"no_implicit_headers": True},
              {"with_pytorch_error_handling": False}, {"is_python_module": False}, {"identity": ("g++ 13",)}]
)  # fmt: skip
def test_what_the_compiler_sees_changes_the_key(other):
    assert key(**other) != key()


@pytest.mark.parametrize(
    "spelled", [{"functions": None, "cpp_sources": "PYBIND11_MODULE(ext, m) {}"},
                {"cpp_sources": "int f(); TORCH_LIBRARY(ext, m) {}"}]
)  # fmt: skip
def test_a_source_that_spells_its_name_is_built_under_it(spelled):
    assert key(**spelled) != key(**spelled, name="other")
    assert parse_request({**CALL, **spelled}).module_name("0" * 64) == "ext"
    assert parse_request(CALL).module_name("0" * 64) == "ext_" + "0" * 24


@pytest.mark.parametrize("flag", [
    "-O3", "-Ofast", "-march=native", "-mavx2", "-mfma", "-ffast-math", "-fopenmp", "-funroll-loops",
    "-std=c++17",
    "-fno-math-errno", "-ftree-vectorize", "-Wall", "-Wno-unused-variable", "-w", "-g", "-DN=128", "-DNDEBUG",
    "-DF(x)=x*2", "-mprefer-vector-width=512", "-pthread", "-ffp-contract=fast",
])  # fmt: skip
def test_honest_c_flags_pass(flag):
    assert check_cpp([flag]) == [flag]


@pytest.mark.parametrize("flag", [
    "-lineinfo", "--use_fast_math", "-arch=sm_90", "-gencode=arch=compute_90,code=sm_90",
    "-Xcompiler=-O3,-fopenmp",
    "--expt-extended-lambda", "-Xptxas=-v,-O3", "--maxrregcount=64", "-std=c++17",
    "-U__CUDA_NO_HALF_OPERATORS__",
    "--ptxas-options=-v", "-arch=sm_90a", "--diag-suppress=177", "--fmad=false",
])  # fmt: skip
def test_honest_cuda_flags_pass(flag):
    assert check_cuda([flag]) == [flag]


def test_several_flags_in_one_entry_are_split_as_a_shell_would():
    assert check_cpp(["-O3 -march=native", " -DN='1' "]) == ["-O3", "-march=native", "-DN=1"]
    with pytest.raises(RequestRefused, match="extra_cflags"):
        parse_request({**CALL, "extra_cflags": ["-DX='"]})


def test_options_in_two_words_are_joined():
    assert check_cuda(["-gencode", "arch=compute_90,code=sm_90", "-Xptxas", "-v"]) == [
        "-gencode=arch=compute_90,code=sm_90", "-Xptxas=-v",
    ]  # fmt: skip


@pytest.mark.parametrize("flags", [
    ["-o", "/x"], ["-o/x"], ["-fplugin=/tmp/x.so"], ["-fplugin-arg-x-y=z"], ["-include", "/etc/passwd"],
    ["-include/etc/passwd"], ["@file"], ["-I/etc"], ["-I", "/etc"], ["-isystem/etc"], ["-iquote/etc"],
    ["-imacros/x"],
    ["-B/tmp"], ["-specs=/tmp/specs"], ["--specs=/x"], ["-wrapper", "/bin/sh"], ["-wrapper,/bin/sh"],
    ["-x", "c"],
    ["-Wp,-MD,/x"], ["-Wl,-rpath,/x"], ["-Wa,-I/etc"], ["-fdump-tree-all=/x"], ["-fprofile-use=/x"],
    ["-save-temps=/x"],
    ["-fdebug-prefix-map=/a=/b"], ["-dumpdir", "/x"], ["-MF/x"], ["-fsanitize-blacklist=/x"],
    ["-fmodules-ts"],
    ["-DX=`id`"], ["-DX=1;rm"], ["-DX=$(id)"], ["-O3 -o /x"], ["-march=native\n-o/x"], ["main.cpp"],
    ["/etc/passwd"],
    ["-L/x"], ["-ffile-prefix-map=/=x"], ["-Xlinker", "-o"], ["-fuse-ld=/x"], ["-flto"], ["-"],
    ["--sysroot=/x"],
])  # fmt: skip
@pytest.mark.parametrize("argument", ["extra_cflags", "extra_cuda_cflags", "extra_ldflags"])
def test_flags_that_name_files_programs_or_plugins_are_refused_by_name(flags, argument):
    with pytest.raises(RequestRefused, match=argument):
        parse_request({**WITH_CUDA, argument: flags})


@pytest.mark.parametrize("flags", [
    ["-Xcompiler", "-fplugin=/x"], ["-Xcompiler=-O2,-o,/x"], ["-Xptxas", "-o /x"],
    ["-Xptxas=--output-file=/x"],
    ["-ccbin", "/x"], ["--pre-include=/etc/passwd"], ["-Xlinker=-o"], ["--options-file=/x"],
    ["-optf", "/x"], ["--keep"],
    ["-odir=/x"], ["--run"], ["-dlink"], ["-Xcompiler"], ["-ldir=/x"], ["--fatbin"],
    ["-Xcudafe=--preinclude=/x"],
])  # fmt: skip
def test_flags_passed_on_by_nvcc_are_held_to_the_same_list(flags):
    with pytest.raises(RequestRefused, match="extra_cuda_cflags"):
        parse_request({**WITH_CUDA, "extra_cuda_cflags": flags})


def test_libraries_are_linked_by_the_names_on_a_list():
    assert check_link(["-lm", "-lgomp", "-lcublas"]) == ["-lm", "-lgomp", "-lcublas"]
    for flag in ("-lnobody", "-l:/tmp/x.a", "/tmp/x.a", "-T/x", "-Wl,--dynamic-linker=/x", "-l../x"):
        with pytest.raises(RequestRefused, match="extra_ldflags"):
            parse_request({**CALL, "extra_ldflags": [flag]})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "../../etc/x"}, "identifier"),
        ({"name": "a/b"}, "identifier"),
        ({"name": "x" * 200}, "identifier"),
        ({"name": "x\n"}, "identifier"),
        ({"name": None}, "identifier"),
        ({"cpp_sources": []}, "no sources"),
        ({"cpp_sources": None}, "no sources"),
        ({"cpp_sources": "x" * (MAX_SOURCE_BYTES + 1)}, "limit"),
        ({"cpp_sources": ["é" * (MAX_SOURCE_BYTES // 2), "x"]}, "limit"),
        ({"cpp_sources": ["x"] * 100}, "at most 64"),
        ({"cpp_sources": [1]}, "text"),
        ({"cpp_sources": {"a": 1}}, "text"),
        ({"cpp_sources": "a\x00b"}, "NUL"),
        ({"extra_include_paths": ["/etc"]}, "extra_include_paths"),
        ({"extra_cflags": ["-O2"] * 65}, "at most"),
        ({"extra_cflags": ["-D" + "X" * 400]}, "at most"),
        ({"functions": ["f", 1]}, "functions"),
        ({"functions": ["f); system(\"id\""]}, "does not name"),
        ({"functions": ["a" + "<>::a" * 38 + "!"]}, "does not name"),
        ({"functions": ["f<int"]}, "does not name"),
        ({"functions": [f"f{n}" for n in range(300)]}, "functions"),
        ({"functions": 3}, "functions"),
        ({"files": [["../x.cpp", ""]]}, "plain names"),
        ({"files": [["/etc/x.cpp", ""]]}, "plain names"),
        ({"files": [["x.so", ""]]}, "plain names"),
        ({"files": [[BINDING_UNIT, ""]]}, "plain names"),
        ({"files": [["-o.cpp", ""]]}, "plain names"),
        ({"files": [["x.cpp", ""], ["x.cpp", ""]]}, "twice"),
        ({"files": "x"}, "sources"),
        ({"files": [["x.cpp"]]}, "pairs"),
    ],
)  # fmt: skip
def test_requests_out_of_bounds_are_refused_in_words(changes, words):
    with pytest.raises(RequestRefused, match=words):
        parse_request({**CALL, **changes})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(sorted({*WITH_CUDA, "files", "extra_cflags", "extra_ldflags", "with_cuda"})), JSON)
def test_whatever_is_in_a_field_is_parsed_or_refused(name, value):
    try:
        request = parse_request({**WITH_CUDA, name: value})
    except RequestRefused as refused:
        assert str(refused)
    else:
        assert all("/" not in file for file in request.units("m", fast=True))


def test_sources_keep_their_own_files_and_bindings_escape_their_texts():
    units = parse_request(
        {**CALL, "cpp_sources": ["int a;", "int b;"], "functions": {"f": 'say "x"\n??/'}}
    ).units("m", fast=False)
    assert units["main_0.cpp"] == "int a;\n" and units["main_1.cpp"] == "int b;\n"
    assert units[BINDING_UNIT].startswith('#include <torch/extension.h>\n#include "main_0.cpp"\n')
    assert r"say \042x\042\012\077\077/" in units[BINDING_UNIT]


def test_a_precompiled_header_serves_all_flags_that_it_can():
    for alike in (["-O1"], ["-O3"], ["-O3", "-DN=1", "-Wall"], ["-O2", "-funroll-loops"], ["-O0", "-O3"]):
        assert header_flags(alike) == ["-O2"]
    for other in (
        [],
        ["-O0"],
        ["-Ofast"],
        ["-O3", "-march=native"],
        ["-O2", "-DNDEBUG"],
        ["-O2", "-fopenmp"],
    ):
        assert header_flags(other) != ["-O2"]


def test_names_at_namespace_scope_leave_bodies_and_parameters_out():
    text = """
    namespace a { namespace b { struct Outer { int member; }; int function(int parameter) { int local; }
    enum Color { red, green }; using Alias = int; } extern "C" { void cee(int argument); } }
    template <typename Kind> inline Kind made(Kind value) { return value; }
    const char* word = "namespace { fake";  int variable = 3;
    """
    names = names_at_namespace_scope(text)
    assert {
        "a",
        "b",
        "Outer",
        "function",
        "Color",
        "red",
        "green",
        "Alias",
        "cee",
        "made",
        "variable",
    } <= names
    assert not {"member", "parameter", "local", "argument", "value", "fake"} & names


def test_a_failed_build_is_shortened_to_the_compilers_errors_without_paths():
    log = (
        "In file included from sandbox_binding.cpp:2:\n"
        "/some/where/build-x/main.cpp:7:5: error: 'z' was not declared in this scope\n"
        "    7 |   out[i] = x[i] / y[i] + z;\n      |                          ^\n"
        "/usr/include/c++/12/bits/stl_vector.h:9:1: note: here\n"
    )
    text = first_errors(log)
    assert text.startswith("main.cpp:7:5: error: 'z' was not declared") and "x[i] / y[i] + z" in text
    assert "/some" not in text and "In file included" not in text
    assert first_errors("a\nb\nKilled\n").endswith("Killed")
    assert len(first_errors("x: error: y\n" * 10_000)) <= 3000


def test_nvcc_compiles_for_the_task_s_gpu_unless_the_candidate_names_one(tmp_path):
    cuda = Cuda(home=tmp_path, nvcc="nvcc", identity="13")
    assert "-gencode=arch=compute_90,code=sm_90" in compile_command(cuda, "sm_90", "g++", [])
    named = compile_command(cuda, "sm_90", "g++", ["-arch=sm_80", "-std=c++17"])
    assert not any("90" in word for word in named) and [word for word in named if "std=" in word] == ["-std=c++17"]
    assert f"-std={extension_standard()}" in compile_command(cuda, "sm_90", "g++", [])
    # Launches without a stream can be captured, unless the candidate wants them on the legacy default stream.
    assert "--default-stream=per-thread" in named
    legacy = compile_command(cuda, "sm_90", "g++", ["-default-stream=legacy"])
    assert [word for word in legacy if "default-stream" in word] == ["-default-stream=legacy"]
    # C++ files beside them have the same.
    assert "-DCUDA_API_PER_THREAD_DEFAULT_STREAM=1" in host_flags([]) and host_flags(["-default-stream=legacy"]) == []


def test_cuda_on_a_machine_without_a_gpu_is_refused_with_a_reason():
    assert refusal("cuda:0") is None
    assert "NVIDIA GPU" in refusal("cpu") and "'cpp'" in refusal("cpu")


HOLDER = """
import sys, time
from pathlib import Path
from sandbox.build.locks import build_lock
with build_lock(Path(sys.argv[1]), 1) as held:
    print(held, flush=True)
    time.sleep(1000)
"""


def test_a_lock_left_by_sigkill_stops_nobody(tmp_path):
    path = tmp_path / "locks" / "k"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert holder.stdout.readline().strip() == "True"
    with build_lock(path, 0.1) as held:
        assert not held
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    with build_lock(path, 0.1) as held:
        assert held


def test_a_waiting_builder_can_be_called_off(tmp_path):
    def cancelled(_seconds):
        raise KeyboardInterrupt

    with (
        build_lock(tmp_path / "k", 1),
        pytest.raises(KeyboardInterrupt),
        build_lock(tmp_path / "k", 60, cancelled),
    ):
        pass


def test_what_a_jail_left_is_published_only_as_an_ordinary_file(tmp_path):
    store, secret = ArtifactStore(tmp_path / "store"), tmp_path / "secret"
    secret.write_text("secret")
    (tmp_path / "link").symlink_to(secret)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "absent"):
        with pytest.raises(OSError):
            store.publish("ab" * 32, tmp_path / name)
    assert store.find("ab" * 32) is None and not list((tmp_path / "store").glob("*/.new-*"))


@needs_extensions
def test_precompiled_headers_are_bounded_and_the_least_recently_used_go(tmp_path):
    headers = Headers(ArtifactStore(tmp_path / "store"), find_toolchain(), tmp_path, time.sleep)
    for number in range(MAX_PRECOMPILED + 3):
        (headers.root / f"k{number}").mkdir(parents=True)
        os.utime(headers.root / f"k{number}", (number, number))
    headers._forget_old(headers.root / "k0")
    left = {path.name for path in headers.root.iterdir()}
    assert "k0" in left and f"k{MAX_PRECOMPILED + 2}" in left
    assert len(left) == MAX_PRECOMPILED and "k1" not in left


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    yield left, right
    left.close()
    right.close()


def test_nothing_is_asked_for_outside_an_order_and_threads_take_turns(pair):
    oracle, conversation = Channel(pair[0], "n"), Conversation(Channel(pair[1], "n"))
    with pytest.raises(RuntimeError, match="while the module loads"):
        conversation.request("extension", name="x")
    oracle.send({"command": "load_module"})
    assert conversation.order(0).header["command"] == "load_module"
    answers = []
    askers = [
        threading.Thread(target=lambda n=n: answers.append((n, conversation.request("x", n=n).header["n"])))
        for n in range(4)
    ]
    for asker in askers:
        asker.start()
    for _ in askers:
        request = oracle.receive(0).header
        oracle.send({"n": request["n"]})
    for asker in askers:
        asker.join()
    assert sorted(answers) == [(n, n) for n in range(4)]
    conversation.reply({"ok": True})
    assert oracle.receive(0).header["ok"]
    with pytest.raises(RuntimeError, match="while the module loads"):
        conversation.request("extension", name="x")


def test_requests_are_counted_and_end_with_the_checks():
    def no_builder():
        raise AssertionError("nothing was to be built")

    builds = Builds(60.0)
    serve = builds.served_to(no_builder)
    assert "no such service" in serve({"request": "shell"})[0]["error"]
    for _ in range(MAX_REQUESTS):
        assert "identifier" in serve({"request": "extension", "name": "/x"})[0]["error"]
    assert f"may build {MAX_REQUESTS}" in serve({"request": "extension", **CALL})[0]["error"]
    named = Builds(60.0)
    serve = named.served_to(no_builder)
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    for name in ("\ud800", "x\n\x1b[2J", "é" * 1000, nested, None):
        assert "identifier" in serve({"request": "extension", "name": name})[0]["error"]
    draft = Draft(Job(id="1", task=TaskSpec(reference="x"), candidate=Candidate(source="x", language="cpp"), options=Options()))
    named.book(draft, "load")
    result = draft.result("build_failed", "")
    assert [build.name for build in result.builds] == ["\\ud800", "x\\n\\x1b[2J", "\\xe9" * 60, "<list>", "<NoneType>"]
    assert EvaluationResult.model_validate_json(result.model_dump_json()) == result
    later = Builds(60.0)
    serve = later.served_to(no_builder)
    later.close()
    assert "not later" in serve({"request": "extension", **CALL})[0]["error"]


@pytest.mark.parametrize("name", ["f", "ns::f", "::ns::f<float, 4>", "f<ns::T*>", "ns::g<a<b>>"])
def test_functions_may_be_qualified_and_have_template_arguments(name):
    assert parse_request({**CALL, "functions": [name]}).functions[0][0] == name


def test_a_source_full_of_openings_of_comments_is_read_at_once():
    hostile = "/*a" * (MAX_SOURCE_BYTES // 4)
    assert parse_request({**CALL, "cpp_sources": hostile}).text.strip() == ""


@pytest.mark.parametrize(
    ("text", "standard"), [("['-std=c++17'] x '-std=c++17', '-std=c++20'", "c++17"), ("cflags + ['-std=c++20']", "c++20"), ("", "c++20")]
)
def test_the_standard_is_the_one_that_pytorch_names(text, standard, tmp_path, monkeypatch):
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils" / "cpp_extension.py").write_text(text)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr("sandbox.build.toolchain.importlib.util.find_spec", lambda name: spec)
    assert extension_standard.__wrapped__() == standard


def test_the_standard_is_pytorchs_own():
    """As its own road compiles: `_write_ninja_file_to_build_library` asks for it."""
    source = Path(torch.utils.cpp_extension.__file__).read_text()
    ninja = source[source.index("def _write_ninja_file_to_build_library") :]
    assert f"'-std={extension_standard()}'" in ninja
