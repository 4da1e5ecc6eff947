"""A folder of kernels in the policy's place: which file is whose, and what holes are."""

from __future__ import annotations

import pytest

from dk_jax.agents import policy
from dk_jax.agents.text import TaskView
from dk_jax.evaluation.kernel_folder import MISSING, FolderError, KernelFolder
from dk_jax.rollout.trajectory import Trajectory

NAMES = ("gemm", "rows", "level1_12_Matmul", "level2_3_Conv", "lost")
VIEWS = {name: TaskView(name=name, level=1, reference="", compact="", language="triton", form="module") for name in NAMES}


@pytest.fixture
def folder(tmp_path):
    files = (
        "gemm.py", "rows/0_0.py", "rows/0_1.py", "rows/0_3.py", "rows/1.cu", "rows/notes.txt", "rows/x.py", "level_1_problem_12_sample_0_kernel.py",
        "level_1_problem_12_sample_2_kernel.py", "level_2_problem_30_sample_0_kernel.py", "level2_3_Conv/0.cpp", "other.py",
    )  # fmt: skip
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\nclass ModelNew: ...\n")
    return tmp_path


def said(speaker, task, member, turns=3):
    """What a sample hands in, turn by turn, and whether each turn had something."""
    trajectory = Trajectory(agent="policy", task=task, group=task, member=member)
    room = [speaker.speak([trajectory], ["?"], [0], max_new=1)[0] for _ in range(turns)]
    sources = [policy.parse(turn.text, style="chat").source for turn in trajectory.turns]
    return [source and source.splitlines()[0][2:] for source in sources], room, trajectory


def test_each_sample_and_turn_has_its_file(folder):
    speaker = KernelFolder(folder, VIEWS, style="chat")
    assert said(speaker, "gemm", 0)[:2] == said(speaker, "gemm", 7)[:2] == (["gemm.py"], [True, False, False])
    assert said(speaker, "rows", 0)[:2] == (["rows/0_0.py", "rows/0_1.py"], [True, True, False]), "turns end at the first gap"
    assert said(speaker, "rows", 1)[0] == ["rows/1.cu"]
    assert said(speaker, "level1_12_Matmul", 2)[0] == ["level_1_problem_12_sample_2_kernel.py"]
    assert said(speaker, "level2_3_Conv", 0)[0] == ["level2_3_Conv/0.cpp"]
    assert [speaker.samples(name) for name in NAMES] == [1, 2, 3, 1, 0]
    assert speaker.fits("x" * 10**6, 10**6)


def test_a_hole_is_a_turn_without_a_kernel_that_says_why(folder):
    speaker = KernelFolder(folder, VIEWS, style="chat")
    for task, member in (("lost", 0), ("level1_12_Matmul", 1), ("rows", 2)):
        sources, room, trajectory = said(speaker, task, member)
        assert sources == [None] and room == [True, False, False]
        assert trajectory.turns[0].stop == MISSING and f"no kernel for sample {member}" in trajectory.turns[0].error


def test_folders_that_hold_nothing_of_use_and_files_that_are_no_text_are_named(folder, tmp_path):
    with pytest.raises(FolderError, match="there is no such folder"):
        KernelFolder(tmp_path / "none", VIEWS, style="chat")
    with pytest.raises(FolderError, match=r"no kernel for any of 1 tasks: name files such as lost.py \(there is gemm.py"):
        KernelFolder(folder, {"lost": VIEWS["lost"]}, style="chat")
    (folder / "gemm.py").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FolderError, match="gemm.py: can't be read as UTF-8"):
        said(KernelFolder(folder, VIEWS, style="chat"), "gemm", 0)
