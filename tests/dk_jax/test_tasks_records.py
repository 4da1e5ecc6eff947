"""Tasks from rows of data sets: where things are, what a bad row is told, what is merged, entry points of other names."""

from __future__ import annotations

import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dk_jax.tasks.builtin import builtin_suite
from dk_jax.tasks.entry_point import EntryPointError, as_model
from dk_jax.tasks.kernelbench import TaskFileError
from dk_jax.tasks.records import Fields, load_records
from dk_jax.tasks.sources import load_source

GOOD = builtin_suite().get("softmax_wide").reference
OTHER = GOOD.replace("dim=-1", "dim=0")


def drkernel(reference: str = GOOD, **extra) -> dict:
    """A row as hkust-nlp/drkernel-rl-data has them."""
    info = {"entry_point": "Model", "uuid": "cuda_llm_1", "level": "0", "module_name": "Model", "ops": '["torch.abs"]', "type": ""}
    return {
        "data_source": "cuda_llm",
        "prompt": [{"role": "user", "content": "Optimize Model"}],
        "ability": "kernel_optimization",
        "reward_model": {"ground_truth": reference, "style": "rule"},
        "extra_info": info | extra,
    }


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_rows_of_the_published_set_are_tasks(tmp_path):
    found = load_records(write(tmp_path / "rl.jsonl", [drkernel(), drkernel(OTHER, uuid="cuda_llm_2", level="3")]))
    assert [(t.name, t.level, t.family) for t in found.tasks] == [("cuda_llm_1", 0, "cuda_llm_1"), ("cuda_llm_2", 3, "cuda_llm_2")]
    assert [t.reference for t in found.tasks] == [GOOD, OTHER] and not found.bad and not found.merged


def test_kernelbenchs_own_table_and_flat_rows_need_no_names(tmp_path):
    rows = [{"code": GOOD, "level": 2, "name": "23_Softmax", "problem_id": 23}, {"reference_code": OTHER}]
    tasks = load_records(write(tmp_path / "kb.jsonl", rows)).tasks
    assert [(t.name, t.level) for t in tasks] == [("23_Softmax", 2), ("kb_2", 1)]


def test_nested_fields_may_be_text_and_code_may_be_fenced(tmp_path):
    row = drkernel()
    row |= {"reward_model": json.dumps({"ground_truth": f"```python\n{GOOD}\n```"}), "extra_info": json.dumps(row["extra_info"])}
    [task] = load_records(write(tmp_path / "rl.jsonl", [row])).tasks
    assert task.reference.strip() == GOOD.strip() and task.name == "cuda_llm_1"


def test_fields_of_other_names_are_given(tmp_path):
    row = {"task": {"torch": GOOD, "class": "Model"}, "id": "a b/c", "group": "norms", "difficulty": "Level 2"}
    fields = Fields(reference=("task.torch",), entry_point=("task.class",), name=("id",), family=("group",), level=("difficulty",))
    [task] = load_records(write(tmp_path / "own.jsonl", [row]), fields).tasks
    assert (task.name, task.family, task.level) == ("a_b_c", "norms", 2)


def test_every_bad_row_is_told_with_its_number_and_reason(tmp_path):
    rows = [
        drkernel(), "{not json", [1, 2], {"prompt": "x"}, drkernel("x = (1,"), drkernel(GOOD.replace("def get_inputs", "def inputs")),
        drkernel(entry_point="Net"), drkernel(level="hard"), drkernel("\ud800" + GOOD), drkernel("#" * (256 * 1024) + "\n" + GOOD), drkernel(OTHER),
    ]  # fmt: skip
    found = load_records(write(tmp_path / "rl.jsonl", rows))
    assert len(found.tasks) == 2
    wanted = {
        2: "not JSON", 3: "a list instead of an object", 4: "no reference in reward_model.ground_truth", 5: "not valid Python",
        6: "no function get_inputs", 7: "no class Net, which is the entry point; there is Model", 8: "its level is 'hard'",
        9: "no UTF-8", 10: "bytes of source",
    }  # fmt: skip
    assert [row.row for row in found.bad] == list(wanted)
    assert all(words in row.reason for row, words in zip(found.bad, wanted.values(), strict=True)), found.bad
    assert str(found.bad[0]).endswith("rl.jsonl: row 2: " + found.bad[0].reason) and "9 can't be used" in found.summary


def test_rows_with_one_reference_are_one_task_and_counted(tmp_path):
    rows = [drkernel(), drkernel(OTHER, uuid="b"), drkernel(uuid="c"), drkernel(uuid="d")]
    found = load_records(write(tmp_path / "rl.jsonl", rows))
    assert [t.name for t in found.tasks] == ["cuda_llm_1", "b"] and found.merged == {"cuda_llm_1": 3}
    assert found.summary == "2 tasks; 2 rows repeat another's reference, 0 can't be used"


def test_names_that_come_twice_are_told_apart(tmp_path):
    names = [t.name for t in load_records(write(tmp_path / "rl.jsonl", [drkernel(), drkernel(OTHER)])).tasks]
    assert names == ["cuda_llm_1", "cuda_llm_1_rl_2"]


def test_a_directory_of_shards_is_read_in_order_up_to_the_rows_asked_for(tmp_path):
    for number, source in enumerate((GOOD, OTHER)):
        write(tmp_path / f"part-{number}.jsonl", [drkernel(source, uuid=str(number))])
    assert [t.name for t in load_records(tmp_path).tasks] == ["0", "1"]
    assert [t.name for t in load_records(tmp_path, rows=1).tasks] == ["0"]


def test_nothing_to_read_is_an_error(tmp_path):
    with pytest.raises(TaskFileError, match="no such file; give one of .jsonl, .parquet"):
        load_records(tmp_path / "gone.jsonl")
    (tmp_path / "rows.csv").write_text("a,b\n")
    with pytest.raises(TaskFileError, match="rows are read from .jsonl and .parquet files"):
        load_records(tmp_path / "rows.csv")
    with pytest.raises(TaskFileError, match="no .jsonl or .parquet file in it"):
        load_records(tmp_path)
    with pytest.raises(TaskFileError, match="none of 1 rows can be used: .*row 1: not JSON"):
        load_records(write(tmp_path / "bad.jsonl", ["nothing"]))
    with pytest.raises(TaskFileError, match="no task of level 1, 2: there are levels 0"):
        load_source("records", write(tmp_path / "rl.jsonl", [drkernel()]), levels={1, 2})


def test_parquet_is_read_as_jsonl_is(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    pa = pytest.importorskip("pyarrow")
    rows = [drkernel(), drkernel("x ="), drkernel(OTHER, uuid="b")] + [drkernel(uuid=str(n)) for n in range(600)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rl.parquet")
    found, same = load_records(tmp_path / "rl.parquet"), load_records(write(tmp_path / "rl.jsonl", rows))
    assert found.tasks == same.tasks and found.merged == same.merged == {"cuda_llm_1": 601}
    assert [(row.row, row.reason) for row in found.bad] == [(row.row, row.reason) for row in same.bad] == [(2, found.bad[0].reason)]
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "rl.parquet").read_bytes()[:-100])
    with pytest.raises(TaskFileError, match="can't be read as parquet .*; is it whole"):
        load_records(tmp_path / "cut.parquet")


def test_parquet_without_its_reader_says_what_to_install(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "rl.parquet").write_bytes(b"PAR1")
    with pytest.raises(TaskFileError, match="pip install pyarrow, or give JSONL"):
        load_records(tmp_path / "rl.parquet")


# --- entry points ---------------------------------------------------------------------------------------------------------------------

NET = '''import torch.nn as nn
class Model(nn.Module):
    """Not the entry point."""
    def forward(self, x):
        return x + 1
class Net(Model):  # Net is what counts
    kind = "Net"
    def __init__(self, width):
        super(Net, self).__init__()
        self.Net = nn.Linear(width, width)
    def forward(self, x):
        return self.Net(Model.forward(self, x))
'''


def test_another_entry_point_becomes_model_and_what_was_model_another_name():
    source = as_model(NET, "Net")
    tree = ast.parse(source)
    assert [node.name for node in tree.body if isinstance(node, ast.ClassDef)] == ["ModelBase", "Model"]
    assert "class Model(ModelBase):  # Net is what counts" in source and "super(Model, self)" in source
    assert 'kind = "Net"' in source and "self.Net(ModelBase.forward(self, x))" in source


def test_the_rewritten_reference_computes_the_same():
    torch = pytest.importorskip("torch")
    results = []
    for source, name in ((NET, "Net"), (as_model(NET, "Net"), "Model")):
        names: dict = {}
        exec(compile(source, "reference", "exec"), names)  # noqa: S102  of this file
        torch.manual_seed(0)
        results.append(names[name](4)(torch.ones(2, 4)))
    assert torch.equal(*results)


def test_model_stays_as_it_is_and_an_unknown_class_is_named():
    assert as_model(GOOD, "Model") == GOOD
    with pytest.raises(EntryPointError, match="no class Nett, which is the entry point; there is Model, Net"):
        as_model(NET, "Nett")
    with pytest.raises(EntryPointError, match="not valid Python"):
        as_model("class (", "Model")


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=40), st.sampled_from(["\n", "\r\n"]))
def test_whatever_stands_in_comments_and_texts_stays(words, ending):
    said = words.replace("\n", " ").replace("\r", " ").replace("\x00", " ").replace("\f", " ")
    source = ending.join([f"# {said}", f"text = {words!r}", "class Net:", "    pass", "net = Net()", ""])
    assert as_model(source, "Net") == source.replace("class Net:", "class Model:").replace("net = Net()", "net = Model()")
