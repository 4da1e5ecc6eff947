"""Triton's launchers are built once for a signature, in a jail, and served to runners, which do without where they are refused."""

import ctypes
import os
import socket
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from sandbox.build import BuildFailed, BuildUnavailable
from sandbox.build.artifacts import ArtifactStore
from sandbox.build.launcher import MAX_SOURCE_CHARS, build_launcher
from sandbox.jail import launchers
from sandbox.jail.extensions import Conversation
from sandbox.jail.frames import Channel, make_pair
from sandbox.oracle import builds
from sandbox.oracle.builds import Builds

SOURCE = '#include "cuda.h"\n#include <Python.h>\nint answer(void) { return 42 + (int)sizeof(CUtensorMap) - 128; }\n'


@pytest.fixture
def build(zygote, tmp_path):
    store = ArtifactStore(tmp_path / "store")
    return lambda source, timeout_s=60.0: build_launcher(source, store=store, zygote=zygote, scratch=tmp_path, timeout_s=timeout_s)


def test_a_source_is_built_against_triton_s_headers_and_kept_by_its_content(build):
    path, found = build(SOURCE)
    assert not found and ctypes.CDLL(str(path)).answer() == 42
    assert build(SOURCE) == (path, True)
    assert build(SOURCE + "\n")[0] != path


def test_what_triton_writes_for_a_kernel_is_built(build):
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    source = driver.make_launcher({}, {0: "*fp32", 1: "*fp16", 2: "i32", 3: "fp32", 4: "constexpr"}, None)
    path, _ = build(source)
    assert b"PyInit___triton_launcher" in path.read_bytes()


def test_what_does_not_compile_is_refused_with_the_compiler_s_words(build):
    with pytest.raises(BuildFailed, match="no_such_thing"):
        build("int f(void) { return no_such_thing; }")
    with pytest.raises(BuildFailed, match="[Ff]ile|signal"):  # real ones take tens of KB
        build("char a[60 << 20] = {1};")
    with pytest.raises(BuildFailed, match="shadow"):
        build('#include "/etc/shadow"\n')


def answers(served, request):
    header, fds = served(request)
    texts = []
    for fd in fds:
        with os.fdopen(fd, "rb") as file:
            file.seek(0)
            texts.append(file.read())
    return header, texts


def test_the_oracle_serves_so_many_and_none_once_kernels_are_timed(tmp_path, monkeypatch):
    (tmp_path / "library").write_bytes(b"library")
    monkeypatch.setattr(builds, "MAX_LAUNCHERS", 7)
    asked = []

    def launcher(source, timeout_s):
        asked.append(source)
        if source == "wrong":
            raise BuildFailed("no")
        if source == "nowhere":
            raise BuildUnavailable("no compiler")
        return tmp_path / "library"

    served = Builds(10.0)
    serve = served.served_to(lambda: None, launcher)
    ask = {"request": "launcher"}
    assert answers(serve, {**ask, "source": "a"}) == ({}, [b"library"])
    assert answers(serve, {**ask, "source": "wrong"}) == ({"error": "no"}, [])
    assert answers(serve, {**ask, "source": "nowhere"}) == ({"error": "no compiler"}, [])
    for source in (None, 3, "x" * (MAX_SOURCE_CHARS + 1)):
        assert "error" in answers(serve, {**ask, "source": source})[0]
    assert answers(serve, {**ask, "source": "b"})[1] and "error" in answers(serve, {**ask, "source": "c"})[0]
    slow = Builds(0.05)
    serve = slow.served_to(lambda: None, lambda source, timeout_s: time.sleep(timeout_s + 0.01) or launcher(source, timeout_s))
    assert answers(serve, {**ask, "source": "e"})[1] and "error" in answers(serve, {**ask, "source": "f"})[0]
    closed = Builds(10.0)
    serve = closed.served_to(lambda: None, launcher)
    closed.close()
    assert "error" in answers(serve, {**ask, "source": "d"})[0]
    assert asked == ["a", "wrong", "nowhere", "b", "e"]


@pytest.fixture
def triton_build(monkeypatch):
    """Stands for triton.runtime.build; what it compiles itself is noted."""
    module = SimpleNamespace(here=[])
    module._build = lambda name, src, srcdir, *rest: module.here.append(name) or "compiled here"
    monkeypatch.setitem(sys.modules, "triton.runtime.build", module)
    return module


@pytest.mark.parametrize("refused", [False, True])
def test_a_runner_asks_for_launchers_alone_and_compiles_what_it_does_not_get(tmp_path, triton_build, refused):
    ours, theirs = make_pair()
    conversation = Conversation(Channel(theirs, "n", max_fds=1))
    launchers.install(conversation)
    (tmp_path / "source.c").write_text(SOURCE)
    oracle = Channel(ours, "n")

    def answer():
        with ours:  # whatever goes wrong here, the other end is not left waiting
            serve()

    def serve():
        oracle.send({"command": "run"})
        message = oracle.receive(0)
        assert (message.header["request"], message.header["source"]) == ("launcher", SOURCE)
        fd = os.memfd_create("library")
        os.write(fd, b"library")
        oracle.send({"error": "no"} if refused else {}, fds=() if refused else (fd,))
        os.close(fd)

    thread = threading.Thread(target=answer)
    thread.start()
    conversation.order(0)
    path = triton_build._build(launchers.LAUNCHER, str(tmp_path / "source.c"), str(tmp_path), [], [], [], [])
    thread.join()
    if refused:
        assert path == "compiled here" and triton_build.here == [launchers.LAUNCHER]
    else:
        with open(path, "rb") as file:
            assert file.read() == b"library"
    assert triton_build._build("cuda_utils", str(tmp_path / "source.c"), str(tmp_path), [], [], [], []) == "compiled here"
    assert triton_build.here[-1] == "cuda_utils"


def test_between_orders_nothing_is_asked_for(tmp_path, triton_build):
    sockets = socket.socketpair()
    launchers.install(Conversation(Channel(sockets[0], "n")))
    (tmp_path / "source.c").write_text(SOURCE)
    assert triton_build._build(launchers.LAUNCHER, str(tmp_path / "source.c"), str(tmp_path), [], [], [], []) == "compiled here"
