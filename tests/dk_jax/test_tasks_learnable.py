"""The learnable set: what is held out is nowhere in training, every task has its kernels, and the estimates are of what eager really moves."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch.overrides import TorchFunctionMode  # noqa: E402

from configs.learnable import get_config  # noqa: E402
from dk_jax.evaluation.scripted_policy import KINDS, kernels_of  # noqa: E402
from dk_jax.sft.contamination import HeldOut, decontaminate  # noqa: E402
from dk_jax.sft.expert import EXPERT, NAIVE, ranked  # noqa: E402
from dk_jax.sft.triton_kernels import TECHNIQUES, triton_variants  # noqa: E402
from dk_jax.tasks.generate import generate_tasks  # noqa: E402
from dk_jax.tasks.learnable import GROUPS, families, group, learnable_tasks, reserved  # noqa: E402
from dk_jax.tasks.learnable_costs import H100, H200, costs  # noqa: E402
from dk_jax.train import setup  # noqa: E402
from dk_jax.train.checks import check_config, check_tasks  # noqa: E402
from tests.dk_jax.test_tasks import reference_of  # noqa: E402
from tests.dk_jax.test_triton_kernels import COMPILE, INTERPRET, ask  # noqa: E402

GPU, SMALL = learnable_tasks("gpu"), learnable_tasks("small")


def of_group(name):
    return [task for task in GPU if group(task) == name]


def test_there_are_families_with_siblings_and_families_held_out_as_a_whole():
    counts = {name: Counter(task.family for task in of_group(name)) for name in GROUPS}
    trained = counts["train"]
    assert len(trained) >= 8 and min(trained.values()) >= 3
    assert counts["sibling"].keys() == trained.keys() and min(counts["sibling"].values()) >= 2
    assert len(counts["held_out_family"]) >= 3 and not counts["held_out_family"].keys() & trained.keys()
    assert len({task.name for task in GPU}) == len(GPU) == sum(counter.total() for counter in counts.values())
    assert EXPERT.keys() == {family.name for family in families()}


def test_both_sizes_are_the_same_tasks():
    assert [(t.name, t.split, t.spec.structure) for t in SMALL] == [(t.name, t.split, t.spec.structure) for t in GPU]
    assert {t.size for t in SMALL} == {"small"} and {t.size for t in GPU} == {"gpu"}
    with pytest.raises(ValueError, match="no size 'cpu': give 'gpu', or 'small'"):
        learnable_tasks("cpu")
    with pytest.raises(ValueError, match="which the learnable set does not have"):
        group(generate_tasks(0, 1, "small")[0])


def test_no_training_member_is_a_held_out_task_in_other_words():
    held_out = [task for task in GPU if task.split == "held_out"]
    found = decontaminate([task for task in GPU if task.split == "train"], HeldOut(held_out))
    assert max(nearest.similarity for nearest in found.nearest) <= 0.75 < get_config().corpus.contaminated
    assert len({task.spec.structure for task in GPU}) == len(GPU)


def test_every_operation_of_a_held_out_task_is_one_that_training_has():
    parts = {part for task in (*of_group("train"), *generate_tasks(0, 300, "small")) for part in task.spec.structure if not reserved(task.spec)}
    for task in GPU:
        assert not [part for part in task.spec.structure if part not in parts and part[0] not in ("Branch", "branch")], task.name


def test_the_recipe_trains_on_members_and_on_generated_tasks_that_give_nothing_held_out_away():
    cfg = get_config()
    check_config(cfg)
    tasks = setup.load_tasks(cfg)
    check_tasks(cfg, tasks)
    assert [t.name for t in tasks.train] == [t.name for t in of_group("train")] and len(tasks.train) == cfg.corpus.timed_tasks
    assert [t.name for t in tasks.held_out] == [t.name for t in GPU if t.split == "held_out"]
    assert {t.name for t in tasks.siblings(tasks.train[0])} == {t.name for t in of_group("train") if t.family == tasks.train[0].family} - {
        tasks.train[0].name
    }
    made = generate_tasks(cfg.seed, cfg.tasks.generated, cfg.tasks.generated_size)
    left_out = {t.name for t in made} - {t.name for t in tasks.generated}
    assert 10 < len(left_out) < 100 and not any(reserved(t.spec) for t in (*tasks.generated, *tasks.train))
    # By their operations as well, read from the references: a whole held-out family is a sequence that no task to train on holds.
    norms, sums = ("softmax", "layernorm", "rmsnorm", "normalize"), ("sum:", "mean:", "amax:", "norm:", "logsumexp:")
    found = decontaminate(tasks.generated, HeldOut(tasks.held_out)).nearest
    for nearest in found:
        kinds = [op for op in nearest.operations if op.startswith((*norms, *sums))]
        assert not (any(op.startswith(norms) for op in kinds) and len(kinds) > 1), nearest
    assert max(nearest.similarity for nearest in found if len(nearest.operations) > 1) < 1


@pytest.mark.parametrize("task", [*GPU, *SMALL], ids=lambda task: f"{task.name}-{task.size}")
def test_every_task_has_an_expert_of_its_family_a_naive_and_a_wrong_kernel(task):
    variants = triton_variants(task)
    assert all(kernels_of(kind, variants, task.family) for kind in KINDS)
    assert EXPERT[task.family] | NAIVE <= TECHNIQUES.keys()
    expert = ranked("expert", task.family, [v for v in variants if v.intent == "good"])[0]
    missing = {"online", "many_warps"} if task.name == "online_long_rows_rms_relu" else set()  # one sweep is all that it needs
    assert expert.source == kernels_of("expert", variants, task.family)[0] and EXPERT[task.family] - expert.techniques <= missing
    naive = ranked("naive", task.family, [v for v in variants if v.intent == "slow"])[0]
    assert "separate_kernels" in naive.techniques and "fused" not in naive.techniques
    assert expert.source.count("\n") < 65 and len(task.reference) < 900  # a small model's context: 700 tokens and 300


def test_of_other_families_experts_come_by_their_techniques_and_naive_kernels_as_they_are():
    variants = triton_variants(generate_tasks(1, 1, "small")[0])
    slow = [v for v in variants if v.intent == "slow"]
    assert ranked("naive", "map", slow) == slow and ranked("expert", "map", slow) != slow


def test_kernels_of_new_schedules_compute_the_reference():
    """Split rows, short rows, and what is normalised twice, reduced or multiplied in one kernel; at sizes that no block divides."""
    names = {"few_long_rows": {"two_stage", "atomic"}, "many_short_rows": {"large_block"}, "matmul_then_norm": {"row_pipeline"}}
    names |= {"norm_then_reduction": {"row_pipeline"}, "norm_after_norm": {"row_pipeline"}}  # of each the first and the last
    jobs = []
    for family, techniques in names.items():
        variants = [(t, v) for t in SMALL if t.family == family for v in triton_variants(t) if v.intent == "good"]
        for technique in sorted(techniques):
            own = [(t, v) for t, v in variants if technique in v.techniques]
            jobs += [own[0], own[-1]]
    said = ask(INTERPRET, [[task.reference, variant.source] for task, variant in jobs], TRITON_INTERPRET="1")
    assert len(jobs) == 12
    for (task, variant), verdict in zip(jobs, said, strict=True):
        assert verdict == "ok", f"{task.name}: {verdict}\n{variant.source}"


def test_experts_compile_for_a_real_gpu_at_its_sizes():
    jobs = []
    for family in ("few_long_rows", "norm_then_reduction", "matmul_then_norm"):
        task = next(t for t in GPU if t.family == family and t.split == "held_out")
        shapes = [argument.shape for argument in task.spec.arguments if not argument.parameter]
        jobs.append([shapes, kernels_of("expert", triton_variants(task), task.family)[0]])
    assert ask(COMPILE, jobs) == ["ok"] * len(jobs)


# --- estimates ------------------------------------------------------------------------------------------------------------------------


class Moved(TorchFunctionMode):
    """Counts what PyTorch's functions read and write, views aside."""

    def __init__(self):
        super().__init__()
        self.bytes = self.kernels = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {value.data_ptr(): value.numel() * value.element_size() for value in args if isinstance(value, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.data_ptr() not in given:
            self.kernels += 1
            self.bytes += sum(given.values()) + out.numel() * out.element_size()
        return out


@pytest.mark.parametrize("family", ["elementwise_chain", "chain_row_reduction", "few_long_rows", "column_reduction", "layout_change", "chain_scan"])
def test_the_estimate_counts_what_eager_moves(family):
    for task in SMALL:
        if task.family != family or "logsumexp" in task.reference or "softsign" in task.reference:  # several kernels under one name
            continue
        model, get_inputs = reference_of(task)
        inputs = get_inputs()
        with torch.no_grad(), Moved() as moved:
            model(*inputs)
        estimate = costs(task.spec)
        assert (estimate.eager_bytes, estimate.eager_kernels) == (moved.bytes, moved.kernels), task.name
        out = 4 * torch.Size(task.spec.out_shape).numel()
        assert estimate.tensors_bytes == estimate.fused_bytes == sum(4 * value.numel() for value in inputs) + out


def test_rows_too_long_for_registers_are_read_twice_and_products_take_their_arithmetic():
    by_name = {task.name: costs(task.spec) for task in GPU}
    long, items = by_name["online_long_rows_bias_softmax"], 4 * 512 * 32768
    assert long.fused_bytes - long.tensors_bytes == items + 4 * 32768  # x and the bias, for the statistics
    product = by_name["matmul_epilogue_gelu"]
    assert product.flops == 2 * 16384 * 64 * 1024 and product.fused_s(H200) == product.flops / H200.flops_per_s


@pytest.mark.parametrize("task", GPU, ids=lambda task: task.name)
def test_a_good_kernel_should_beat_eager_by_far_at_a_size_that_a_sandbox_can_hold(task):
    estimate = costs(task.spec)
    for card in (H100, H200):
        assert estimate.speedup(card) > 2 and 50e-6 < estimate.eager_s(card) < 2e-3
    assert 64 << 20 <= estimate.tensors_bytes <= 256 << 20  # above the 50 MB of L2; several sets of inputs are under 2 GiB


@pytest.mark.parametrize("task", SMALL, ids=lambda task: task.name)
def test_nothing_lazy_passes(task):
    model, get_inputs = reference_of(task)
    inputs = get_inputs()
    with torch.no_grad():
        out, other = model(*inputs), model(*get_inputs())
    assert tuple(out.shape) == task.spec.out_shape and out.is_contiguous() and out.isfinite().all()
    answers = {"zeros": torch.zeros_like(out), "a constant": torch.full_like(out, out.mean()), "other inputs": other}
    answers |= {f"input {i}": x for i, x in enumerate(inputs) if x.shape == out.shape}
    for name, answer in answers.items():
        assert not torch.allclose(answer, out, atol=1e-4, rtol=1e-4), f"{name} would pass"


# --- the bench ------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts" / "bench"))
    from scripts.bench import learnable_tasks as module

    return module


def row(task, *kernels):
    return {"group": group(task), "family": task.family, "estimate": {"eager_ms": 0.1, "speedup": 3.0}, "kernels": list(kernels)}


def timed(kind, outcome, speedup=None):
    return {"kind": kind, "outcome": outcome, "feedback": "why", **({"speedup": speedup} if speedup else {})}


def test_the_benchs_summary_is_of_the_best_correct_expert(bench):
    one, two = of_group("train")[:2]
    rows = {one.name: row(one, timed("expert", "ok", 2.0), timed("expert", "ok", 4.0), timed("expert", "incorrect", 9.0), timed("naive", "ok", 0.9))}
    rows[two.name] = row(two, timed("expert", "ok", 1.0), timed("naive", "ok", 0.9))
    found = bench.summary(rows)["train"]
    assert (found["tasks"], found["expert"], found["naive"], found["estimated"]) == (2, 2.0, 0.9, 3.0)
    assert found["over"] == {"1.0": 1, "1.2": 1, "1.5": 1, "2.0": 1} and bench.summary(rows)[one.family] == found


def test_the_bench_tells_kernels_that_are_not_what_they_are_meant_to_be(bench):
    task = GPU[0]
    fine = row(task, timed("expert", "ok"), timed("wrong", "incorrect"))
    assert bench.surprises("a", fine | {"compiled": {"expert": "", "naive": ""}}) == []
    for outcome, kind in (("incorrect", "expert"), ("ok", "wrong"), ("infra_error", "wrong"), ("task_rejected", "wrong")):
        [said] = bench.surprises("a", row(task, timed(kind, outcome)))
        assert said == f"a: a kernel meant to be {kind} was judged {outcome}: why"
    [said] = bench.surprises("a", fine | {"compiled": {"expert": "no", "naive": ""}})
    assert "does not compile for sm_90: no" in said


def test_the_bench_goes_on_with_its_own_file_and_refuses_anothers(bench, tmp_path):
    path = tmp_path / "out.json"
    assert bench.resumed(path, {"device": "cpu"}) == {}
    path.write_text(json.dumps({"settings": {"device": "cpu"}, "tasks": {"a": {}}}))
    assert bench.resumed(path, {"device": "cpu"}) == {"a": {}}
    with pytest.raises(SystemExit, match="was measured with"):
        bench.resumed(path, {"device": "cuda:0"})


def test_the_benchs_table_names_every_task(bench):
    table = bench.listed()
    assert all(task.name[len(task.family) + 1 :] in table for task in GPU) and f"{len(GPU)} tasks of {len(families())} families" in table
    wrong = bench.kernels("wrong", SMALL[-1], 1)
    assert wrong[0].intent == "wrong" and '"tf32"' not in wrong[0].source
