"""Loading a directory of KernelBench files."""

import subprocess
import sys

import pytest

from dk_jax.tasks.builtin import builtin_suite
from dk_jax.tasks.kernelbench import TaskFileError, load_kernelbench, load_task_file

GOOD = builtin_suite().get("softmax_wide").reference


@pytest.fixture
def directory(tmp_path):
    for level, names in {1: ("10_Softmax.py", "2_Relu.py"), 2: ("1_Gemm_Relu.py",)}.items():
        (tmp_path / f"level{level}").mkdir()
        for name in names:
            (tmp_path / f"level{level}" / name).write_text(GOOD)
    return tmp_path


def test_tasks_come_by_level_and_number(directory):
    tasks = load_kernelbench(directory, (1, 2))
    assert [(t.name, t.level) for t in tasks] == [
        ("level1_2_Relu", 1),
        ("level1_10_Softmax", 1),
        ("level2_1_Gemm_Relu", 2),
    ]
    assert all(task.reference == GOOD and task.spec is None and task.arguments == () for task in tasks)
    assert tasks[0].family == "level1_relu"
    assert tasks[0].compact == "x = softmax(x, dim=-1)"


def test_a_task_without_spec_says_where_its_signature_is_known(directory):
    with pytest.raises(ValueError, match="kernel_signature"):
        _ = load_kernelbench(directory, (2,))[0].cpp_signature


def test_a_missing_directory_or_level_is_named(directory, tmp_path):
    with pytest.raises(TaskFileError, match=r"nowhere: no such directory; give one that holds level1/"):
        load_kernelbench(tmp_path / "nowhere")
    with pytest.raises(TaskFileError, match=r"level3: no task files; .* leave 3 out of levels"):
        load_kernelbench(directory)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = (1,\ny = 2\n", r"bad\.py:1: not valid Python .*; fix the syntax"),
        (GOOD.replace("class Model(", "class Network("), r"bad\.py:\d+: no class Model; define `class Model"),
        (GOOD.replace("def forward", "def apply"), r"bad\.py:5: class Model has no forward; define"),
        (GOOD.replace("def get_inputs", "def inputs"), r"bad\.py:\d+: no function get_inputs; define"),
        (
            GOOD.replace("def get_init_inputs", "def more"),
            r"bad\.py:\d+: no function get_init_inputs; define",
        ),
        ("", r"bad\.py:1: no class Model"),
        ("\0", r"bad\.py:1: not valid Python"),
    ],
)
def test_a_bad_file_is_named_with_line_and_remedy(tmp_path, source, message):
    path = tmp_path / "bad.py"
    path.write_text(source)
    with pytest.raises(TaskFileError, match=message):
        load_task_file(path)


def test_unreadable_files_are_named(tmp_path):
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    with pytest.raises(TaskFileError, match=r"latin\.py: not UTF-8 text \(byte 2\)"):
        load_task_file(tmp_path / "latin.py")
    with pytest.raises(TaskFileError, match=r"gone\.py: cannot be read"):
        load_task_file(tmp_path / "gone.py")


def test_all_bad_files_are_listed_at_once(directory):
    for name in ("3_A.py", "4_B.py"):
        (directory / "level1" / name).write_text("pass\n")
    with pytest.raises(TaskFileError, match=r"(?s)3_A\.py:1: no class Model.*4_B\.py:1: no class Model"):
        load_kernelbench(directory, (1,))


def test_loading_runs_nothing_and_needs_no_torch(tmp_path):
    (tmp_path / "level1").mkdir()
    (tmp_path / "level1" / "1_Loud.py").write_text("raise SystemExit(3)\n" + GOOD)
    code = (
        "import sys\nfrom dk_jax.tasks.kernelbench import load_kernelbench\n"
        f"assert len(load_kernelbench({str(tmp_path)!r}, (1,))) == 1\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
