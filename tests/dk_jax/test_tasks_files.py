"""Tasks from a directory of the user's own modules, and the whole of a KernelBench checkout where there is one."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from dk_jax.tasks.builtin import builtin_suite
from dk_jax.tasks.files import load_modules
from dk_jax.tasks.kernelbench import TaskFileError, load_kernelbench, load_task_file
from dk_jax.tasks.task import Suite

GOOD = builtin_suite().get("softmax_wide").reference
CHECKOUT = os.environ.get("KERNELBENCH", "")


def write(root, *names, source=GOOD):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source)


def test_folders_are_families_and_levels(tmp_path):
    write(tmp_path, "rms.py", "norms/layer.py", "norms/group.py", "level2/fused.py", "level2/attention/flash.py")
    tasks = load_modules(tmp_path)
    assert {t.name: (t.level, t.family) for t in tasks} == {
        "level2/attention/flash": (2, "level2/attention"),
        "level2/fused": (2, "level2/fused"),
        "norms/group": (1, "norms"),
        "norms/layer": (1, "norms"),
        "rms": (1, "rms"),
    }
    assert all(t.reference == GOOD and t.spec is None for t in tasks) and len(Suite(tuple(tasks))) == 5


def test_helpers_and_hidden_folders_are_passed_over(tmp_path):
    write(tmp_path, "a.py")
    write(tmp_path, "__init__.py", "_helpers.py", ".git/hook.py", "__pycache__/x.py", "_old/b.py", source="raise SystemExit\n")
    assert [t.name for t in load_modules(tmp_path)] == ["a"]


def test_all_bad_files_are_told_at_once_with_the_remedy(tmp_path):
    write(tmp_path, "good.py")
    write(tmp_path, "norms/bad.py", source="x = 1\n")
    write(tmp_path, "worse.py", source="x = (\n")
    with pytest.raises(TaskFileError, match=r"(?s)bad\.py:1: no class Model.*begin their names with _.*worse\.py:1: not valid Python"):
        load_modules(tmp_path)


def test_nothing_there_is_an_error(tmp_path):
    with pytest.raises(TaskFileError, match="no such directory; give one that holds .py files"):
        load_modules(tmp_path / "gone")
    with pytest.raises(TaskFileError, match="no .py file; expected modules"):
        load_modules(tmp_path)


def test_forward_may_come_from_a_class_of_the_same_file(tmp_path):
    base = GOOD.replace("class Model(nn.Module)", "class Base(nn.Module)") + "\n\nclass Model(Base):\n    pass\n"
    write(tmp_path, "a.py", source=base)
    assert load_task_file(tmp_path / "a.py").reference == base
    write(tmp_path, "b.py", source=base.replace("def forward", "def apply"))
    with pytest.raises(TaskFileError, match="class Model has no forward"):
        load_task_file(tmp_path / "b.py")


def test_a_checkout_is_read_from_its_root_too(tmp_path):
    write(tmp_path, "KernelBench/level1/12_Softmax.py", "KernelBench/level4/3_gpt2_bs1_seq1023.py", "setup.py")
    assert [t.name for t in load_kernelbench(tmp_path, (1,))] == ["level1_12_Softmax"]
    assert [(t.name, t.level) for t in load_kernelbench(tmp_path, (4,))] == [("level4_3_gpt2_bs1_seq1023", 4)]


@pytest.mark.skipif(not CHECKOUT, reason="KERNELBENCH names no checkout")
def test_all_of_kernelbench_loads():
    tasks = load_kernelbench(CHECKOUT)
    assert Counter(t.level for t in tasks) == {1: 100, 2: 100, 3: 50}
    for level, most in ((1, 100), (2, 100), (3, 50)):
        numbers = [int(t.name.split("_")[1]) for t in tasks if t.level == level]
        assert numbers == list(range(1, most + 1))
    assert len({t.name for t in tasks}) == len({t.reference for t in tasks}) == 250
    assert {t.level for t in load_kernelbench(CHECKOUT, (4,))} == {4}
