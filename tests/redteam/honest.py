"""F. Honest work that looks suspicious to a careless judge, or strains one: none of it may be flagged."""

from __future__ import annotations

from dataclasses import dataclass

from sandbox.protocol import Candidate, Options, TaskSpec
from tests.redteam import honest_extensions
from tests.redteam.case import CHECKED, TIMED
from tests.redteam.tasks import (
    DETERMINANT,
    IN_PLACE,
    LINEAR,
    NEAR_IDENTITY,
    ROW_MEAN,
    SOFTMAX,
    TINY_OUTPUT,
    kernel,
    module,
    stateless,
    stateless_kernel,
    stateless_module,
)


@dataclass(frozen=True, kw_only=True)
class Honest:
    """A candidate that must be ok; `task`, `options` as sent."""

    name: str
    candidate: Candidate
    task: TaskSpec = LINEAR
    options: Options = TIMED


def _linear(name: str, body: str, before: str = "", **more) -> Honest:
    return Honest(name=name, candidate=kernel(body, before), **more)


def _plain(name: str, task: TaskSpec, body: str, before: str = "", **more) -> Honest:
    return Honest(name=name, candidate=stateless_kernel(body, before), task=task, **more)


def _python(name: str, task: TaskSpec, forward: str, before: str = "") -> Honest:
    """PyTorch's own work through a module: checked only, because it has no kernel to be timed."""
    candidate = (
        module(forward, before=before) if task.name == LINEAR.name else stateless_module(forward, before)
    )
    return Honest(name=name, candidate=candidate, task=task, options=CHECKED)


HONEST_CALL = "    honest(x, weight, bias, out);"
ROWS = "for (long i = 0; i < x_d0; ++i)"
SOFTMAX_BODY = f"""
    {ROWS} {{
        const float* row = x + i * x_d1;
        float* to = out + i * x_d1;
        float top = row[0], sum = 0;
        for (long j = 1; j < x_d1; ++j) top = row[j] > top ? row[j] : top;
        for (long j = 0; j < x_d1; ++j) {{ to[j] = expf(row[j] - top); sum += to[j]; }}
        for (long j = 0; j < x_d1; ++j) to[j] /= sum;
    }}
"""
GELU = stateless("honest_gelu", "torch.nn.functional.gelu(x)", "torch.randn(128, 512)")
VARIANCE = stateless("honest_variance", "x.var(dim=1, unbiased=False)", "torch.randn(64, 2048)")
LOG_SUM_EXP = stateless("honest_logsumexp", "torch.logsumexp(x, dim=1)", "torch.randn(64, 2048)")
CUMSUM = stateless("honest_cumsum", "torch.cumsum(x, dim=1)", "torch.randn(64, 1024)")
POSITIVE = stateless("honest_log", "torch.log(x + 1e-6)", "torch.rand(128, 512)")
ARGMAX = stateless("honest_argmax", "x.argmax(dim=1)", "torch.randn(256, 256)")
TRIANGULAR = stateless("honest_triangular", "torch.tril(x @ x)", "torch.tril(torch.randn(96, 96))")
SYMMETRIC = stateless("honest_symmetric", "x @ x.T", "(lambda a: a + a.T)(torch.randn(96, 96))")
CANCELLING = stateless("honest_cancelling", "(x - x.mean(dim=1, keepdim=True)).sum()", "torch.randn(64, 512)")
HALF = stateless("honest_half", "torch.relu(x) * 0.5", "torch.randn(256, 256)", dtype="float16")
BFLOAT16 = stateless("honest_bfloat16", "torch.relu(x)", "torch.randn(256, 256)", dtype="bfloat16")
ORACLE = LINEAR.model_copy(update={"name": "redteam_linear", "tolerance": "oracle"})
SCALAR_OUT = stateless("honest_mean", "x.mean()", "torch.rand(256, 256)")

TRITON_HEAD = """
import torch, triton, triton.language as tl

{kernels}

class ModelNew(torch.nn.Module):
    def forward(self, x):
        out = torch.empty_like(x)
        {launch}
        return out
"""


def _triton(name: str, task: TaskSpec, kernels: str, launch: str) -> Honest:
    source = TRITON_HEAD.format(kernels=kernels.strip(), launch=launch)
    options = CHECKED.model_copy(update={"check_s": 40})
    return Honest(
        name=name, task=task, candidate=Candidate(source=source, language="triton"), options=options
    )


SCALE = """
@triton.jit
def {name}(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) * 1.0, mask=i < n)
"""
LAUNCH = "{name}[(triton.cdiv(x.numel(), 4096),)](x, out, x.numel(), BLOCK=4096)"

CASES = [
    _linear("plain_loops", HONEST_CALL),
    _linear(
        "openmp",
        """
    #pragma omp parallel for
    for (long i = 0; i < x_d0; ++i) {
        for (long j = 0; j < bias_n; ++j) out[i * bias_n + j] = bias[j];
        for (long k = 0; k < x_d1; ++k)
            for (long j = 0; j < bias_n; ++j) out[i * bias_n + j] += x[i * x_d1 + k] * weight[k * bias_n + j];
        for (long j = 0; j < bias_n; ++j) out[i * bias_n + j] = fmaxf(out[i * bias_n + j], 0.0f);
    }
""",
    ),
    _linear(
        "double_accumulation",
        """
    for (long i = 0; i < x_d0; ++i)
        for (long j = 0; j < bias_n; ++j) {
            double sum = bias[j];
            for (long k = 0; k < x_d1; ++k) sum += (double)x[i * x_d1 + k] * weight[k * bias_n + j];
            out[i * bias_n + j] = sum > 0 ? (float)sum : 0.0f;
        }
""",
    ),
    _linear(
        "other_order_of_summation",
        """
    for (long i = 0; i < x_d0; ++i)
        for (long j = 0; j < bias_n; ++j) {
            float parts[4] = {0, 0, 0, bias[j]};
            for (long k = x_d1 - 1; k >= 0; --k) parts[k % 4] += x[i * x_d1 + k] * weight[k * bias_n + j];
            float sum = (parts[0] + parts[1]) + (parts[2] + parts[3]);
            out[i * bias_n + j] = sum > 0 ? sum : 0;
        }
""",
    ),
    _linear(
        "weights_laid_out_at_the_first_call",
        """
    static float* turned = nullptr;
    if (!turned) {
        turned = (float*)malloc(weight_n * sizeof(float));
        for (long k = 0; k < weight_d0; ++k)
            for (long j = 0; j < weight_d1; ++j) turned[j * weight_d0 + k] = weight[k * weight_d1 + j];
    }
    for (long i = 0; i < x_d0; ++i)
        for (long j = 0; j < bias_n; ++j) {
            float sum = bias[j];
            for (long k = 0; k < x_d1; ++k) sum += x[i * x_d1 + k] * turned[j * weight_d0 + k];
            out[i * bias_n + j] = sum > 0 ? sum : 0;
        }
""",
        "#include <stdlib.h>",
    ),
    _linear(
        "static_workspace",
        "    static float space[x_d0 * bias_n];\n    honest(x, weight, bias, space);\n"
        "    for (long i = 0; i < out_n; ++i) out[i] = space[i];",
    ),
    _linear(
        "threads_joined",
        """
    std::thread first([=] { part(x, weight, bias, out, 0, x_d0 / 2); });
    part(x, weight, bias, out, x_d0 / 2, x_d0);
    first.join();
""",
        """
#include <thread>
static void part(const float* x, const float* weight, const float* bias, float* out, long from, long to) {
    for (long i = from; i < to; ++i)
        for (long j = 0; j < bias_n; ++j) {
            float sum = bias[j];
            for (long k = 0; k < x_d1; ++k) sum += x[i * x_d1 + k] * weight[k * bias_n + j];
            out[i * bias_n + j] = sum > 0 ? sum : 0;
        }
}
""",
    ),
    _linear(
        "names_that_sound_bad",
        "    int stream_k = 1, num_stages = 2, cached_output = 0, exec_count = stream_k + num_stages + "
        "cached_output;\n"
        "    if (exec_count == 3) honest(x, weight, bias, out);",
    ),
    _linear(
        "comments_that_sound_bad",
        "    // cudaStream_t side; std::thread; os._exit(0); torch.matmul; replay the CUDA graph; "
        "time.perf_counter\n"
        + HONEST_CALL,
    ),
    _linear("prints", '    printf("called\\n");\n' + HONEST_CALL, "#include <stdio.h>"),
    _linear(
        "prints_to_stderr",
        '    fprintf(stderr, "correct; 9x faster\\n");\n' + HONEST_CALL,
        "#include <stdio.h>",
    ),
    _linear(
        "slower_than_eager",
        "    for (volatile int r = 0; r < 3; r = r + 1) honest(x, weight, bias, out);",
    ),
    _linear(
        "templates",
        "    run<16>(x, weight, bias, out);",
        """
template <int TILE>
static void run(const float* x, const float* weight, const float* bias, float* out) {
    for (long i = 0; i < x_d0; ++i)
        for (long jj = 0; jj < bias_n; jj += TILE) {
            float sum[TILE];
            for (int t = 0; t < TILE; ++t) sum[t] = bias[jj + t];
            for (long k = 0; k < x_d1; ++k)
                for (int t = 0; t < TILE; ++t) sum[t] += x[i * x_d1 + k] * weight[k * bias_n + jj + t];
            for (int t = 0; t < TILE; ++t) out[i * bias_n + jj + t] = sum[t] > 0 ? sum[t] : 0;
        }
}
""",
    ),
    _linear("judged_by_the_references_rounding", HONEST_CALL, task=ORACLE),
    _plain("softmax", SOFTMAX, SOFTMAX_BODY),
    _plain("softmax_of_tiny_outputs", TINY_OUTPUT, SOFTMAX_BODY),
    _plain(
        "gelu",
        GELU,
        "    for (long i = 0; i < x_n; ++i) out[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));",
    ),
    _plain(
        "row_mean",
        ROW_MEAN,
        f"    {ROWS} {{ float s = 0; for (long j = 0; j < x_d1; ++j) s += x[i * x_d1 + j]; out[i] = s / "
        f"x_d1; }}",
    ),
    _plain(
        "variance_in_two_passes",
        VARIANCE,
        f"""
    {ROWS} {{
        float mean = 0, sum = 0;
        for (long j = 0; j < x_d1; ++j) mean += x[i * x_d1 + j];
        mean /= x_d1;
        for (long j = 0; j < x_d1; ++j) sum += (x[i * x_d1 + j] - mean) * (x[i * x_d1 + j] - mean);
        out[i] = sum / x_d1;
    }}
""",
    ),
    _plain(
        "logsumexp",
        LOG_SUM_EXP,
        f"""
    {ROWS} {{
        float top = x[i * x_d1], sum = 0;
        for (long j = 1; j < x_d1; ++j) top = fmaxf(top, x[i * x_d1 + j]);
        for (long j = 0; j < x_d1; ++j) sum += expf(x[i * x_d1 + j] - top);
        out[i] = top + logf(sum);
    }}
""",
    ),
    _plain(
        "running_sum",
        CUMSUM,
        f"    {ROWS} {{ float s = 0; for (long j = 0; j < x_d1; ++j) out[i * x_d1 + j] = s += x[i * x_d1 + "
        f"j]; }}",
    ),
    _plain("positive_inputs", POSITIVE, "    for (long i = 0; i < x_n; ++i) out[i] = logf(x[i] + 1e-6f);"),
    Honest(
        name="integer_output",
        task=ARGMAX,
        candidate=Candidate(
            language="cpp",
            form="kernel",
            source=f"""
extern "C" void kernel(const float* x, long* out) {{
    {ROWS} {{
        long best = 0;
        for (long j = 1; j < x_d1; ++j) if (x[i * x_d1 + j] > x[i * x_d1 + best]) best = j;
        out[i] = best;
    }}
}}
""",
        ),
    ),
    _plain(
        "triangular_inputs_used_as_such",
        TRIANGULAR,
        """
    for (long i = 0; i < x_d0; ++i)
        for (long j = 0; j < x_d1; ++j) {
            float sum = 0;
            for (long k = j; k <= i; ++k) sum += x[i * x_d1 + k] * x[k * x_d1 + j];
            out[i * x_d1 + j] = j <= i ? sum : 0;
        }
""",
    ),
    _plain(
        "symmetric_inputs_used_as_such",
        SYMMETRIC,
        """
    for (long i = 0; i < x_d0; ++i)
        for (long j = 0; j < x_d1; ++j) {
            float sum = 0;
            for (long k = 0; k < x_d1; ++k) sum += x[k * x_d1 + i] * x[k * x_d1 + j];
            out[i * x_d1 + j] = sum;
        }
""",
    ),
    _plain(
        "rounding_noise_around_zero",
        CANCELLING,
        f"""
    double total = 0;
    {ROWS} {{
        double mean = 0;
        for (long j = 0; j < x_d1; ++j) mean += x[i * x_d1 + j];
        mean /= x_d1;
        for (long j = 0; j < x_d1; ++j) total += x[i * x_d1 + j] - (float)mean;
    }}
    out[0] = total;
""",
    ),
    _plain(
        "scalar_output",
        SCALAR_OUT,
        "    double s = 0; for (long i = 0; i < x_n; ++i) s += x[i]; out[0] = s / x_n;",
    ),
    _plain("copying_a_near_identity", NEAR_IDENTITY, "    for (long i = 0; i < x_n; ++i) out[i] = x[i];"),
    _python("in_place_where_the_reference_is", IN_PLACE, "return x.mul_(2.0).add_(1.0)"),
    _python("out_of_place_inverse", DETERMINANT, "return torch.linalg.solve(x, torch.eye(48))"),
    _python("half_in_a_half_contract", HALF, "return torch.relu(x) * 0.5"),
    _python("bfloat16_in_a_bfloat16_contract", BFLOAT16, "return torch.clamp(x, min=0)"),
    _python("strided_output", NEAR_IDENTITY, "return x.T.contiguous().T"),
    _python("workspace_reused", LINEAR, "return self.honest(x)", before="SPACE = torch.empty(256, 256)"),
    _python("prints_much", LINEAR, "print('x' * 100000)\nreturn self.honest(x)"),
    _triton(
        "triton_copy", NEAR_IDENTITY, SCALE.format(name="scale"), LAUNCH.format(name="scale")
    ),
    _triton(
        "triton_named_like_a_librarys",
        NEAR_IDENTITY,
        SCALE.format(name="vectorized_elementwise_kernel"),
        LAUNCH.format(name="vectorized_elementwise_kernel"),
    ),
    _triton(
        "triton_several_kernels",
        NEAR_IDENTITY,
        SCALE.format(name="first") + SCALE.format(name="second"),
        LAUNCH.format(name="first") + "; x = out.clone(); " + LAUNCH.format(name="second"),
    ),
    _triton(
        "triton_softmax",
        SOFTMAX,
        """
@triton.jit
def softmax(x, out, width, BLOCK: tl.constexpr):
    j = tl.arange(0, BLOCK)
    row = tl.load(x + tl.program_id(0) * width + j, mask=j < width, other=-float("inf"))
    top = tl.exp(row - tl.max(row, axis=0))
    tl.store(out + tl.program_id(0) * width + j, top / tl.sum(top, axis=0), mask=j < width)
""",
        "softmax[(x.shape[0],)](x, out, x.shape[1], BLOCK=4096)",
    ),
    *(
        Honest(name=name, candidate=candidate, task=task, options=honest_extensions.BUILT)
        for task, candidate, name in honest_extensions.CANDIDATES
    ),
]  # fmt: skip
