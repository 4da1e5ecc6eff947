"""Triton candidates on a GPU: compiled, checked, timed, and held to their own kernels."""

import pytest

from sandbox.jail import nvml

WORDS_BYTES = 4
ADD_BYTES = 3 * 2048 * 4096 * WORDS_BYTES
FASTEST_BYTES_PER_S = 9e12
"""No GPU of today streams faster than this; a shorter time was not measured but made up."""


def test_an_honest_add_is_as_fast_as_eager_and_covers_its_time(judge):
    result = judge("task_add", "add_triton")
    assert result.outcome == "ok"
    assert all(trial.ok for trial in result.trials)
    assert result.coverage > 0.95
    assert 0.7 < result.timing.speedup < 1.5
    assert result.timing.candidate.median_ms / 1e3 > ADD_BYTES / FASTEST_BYTES_PER_S
    assert result.reward.total == pytest.approx(sum(result.reward.parts.values()))
    assert result.reward.total > 1.2


def test_an_honest_softmax_passes(judge):
    result = judge("task_softmax", "softmax_triton")
    assert result.outcome == "ok"
    assert result.coverage > 0.95
    assert result.timing.speedup > 0.7


def test_an_autotuned_fused_chain_is_faster_than_eager(judge):
    result = judge("task_chain", "chain_triton")
    assert result.outcome == "ok"
    assert result.coverage > 0.95
    assert result.timing.speedup > 1.8
    assert not result.timing.noisy
    spans = [result.timing.candidate, result.timing.baselines["eager"]]
    assert all(0.001 < span.host_ms < 1.0 for span in spans), "what the host takes to issue a call is reported apart"


def test_a_kernel_named_like_a_librarys_counts_as_its_authors(judge):
    result = judge("task_add", "add_triton", change=("add_kernel", "vectorized_elementwise_kernel"))
    assert result.outcome == "ok"
    assert result.coverage > 0.95


def test_a_wrong_kernel_is_incorrect_and_earns_nothing(judge):
    result = judge("task_add", "add_triton", change=(") + tl.load", ") - tl.load"))
    assert result.outcome == "incorrect"
    assert result.reward.total == 0
    assert result.timing is None


def test_a_syntax_error_names_its_line(judge):
    result = judge("task_add", "add_triton", change=("Module):", "Module:"))
    assert result.outcome == "load_failed"
    assert "SyntaxError" in result.feedback and "line 17" in result.feedback


def test_a_kernel_that_does_not_compile_shows_the_compilers_words(judge):
    result = judge("task_add", "add_triton", change=("tl.load(x_ptr", "tl.lod(x_ptr"))
    assert result.outcome == "build_failed"
    assert "lod" in result.feedback


def test_pytorch_alone_is_no_kernel(judge):
    result = judge("task_add", "add_torch_only")
    assert result.outcome == "integrity"
    assert result.coverage < 0.05
    assert result.reward.total == 0
    assert any("%" in finding.evidence for finding in result.integrity)


def test_a_decoy_beside_the_librarys_matmul_is_no_kernel(judge):
    result = judge("task_matmul", "matmul_decoy")
    assert result.outcome == "integrity"
    assert result.coverage < 0.05
    assert any("matmul_kernel" in kernel.name for kernel in result.kernels)


def test_the_same_source_is_judged_once(judge):
    first = judge("task_softmax", "softmax_triton", suffix="\n# judged once\n")
    again = judge("task_softmax", "softmax_triton", suffix="\n# judged once\n")
    assert (first.cached, again.cached) == (False, True)
    assert again.timing == first.timing


def test_repeated_timings_of_one_kernel_agree(judge):
    medians = [
        judge("task_chain", "chain_triton", suffix=f"\n# timing {n}\n").timing.candidate.median_ms
        for n in range(3)
    ]
    assert max(medians) / min(medians) < 1.10


def test_the_driver_describes_the_gpu_without_a_context():
    (gpu, *_) = nvml.gpus()
    assert gpu.arch.startswith("sm_") and gpu.total_bytes > 1 << 30
    assert isinstance(nvml.memory_by_process(gpu.index), dict)
