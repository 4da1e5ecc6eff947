"""Open kernels that work on rows or columns of a tensor: softmax, normalisation, reductions, scans."""

from __future__ import annotations

from dk_jax.sft.open_source.catalogue import Problem, problem

_ROWS = dict(small=dict(rows=24, cols=320), gpu=dict(rows=8192, cols=4096))
_LIGER, _GEMS, _NEW = "liger_kernel.ops", "flag_gems.ops", "flag_gems.experimental_ops"
_X = {"x": "torch.randn(rows, cols)"}
_WEIGHT = {"weight": "1 + 0.1 * torch.randn(cols)"}
_WEIGHT_BIAS = {**_WEIGHT, "bias": "0.1 * torch.randn(cols)"}
_RMS = "x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight"

_SOFTMAX = (
    ("softmax", "Softmax of each row.", "torch.softmax(x, dim=-1)", (
        (f"{_LIGER}.softmax:_softmax_forward", "_softmax_forward(x)[0]"), (f"{_GEMS}.softmax:softmax", "softmax(x, -1)"),
        ("fla.ops.utils.softmax:softmax_fwd", "softmax_fwd(x)"), (f"{_GEMS}._safe_softmax:_safe_softmax", "_safe_softmax(x, -1)"),
    )),
    ("softmax_of_columns", "Softmax of each column.", "torch.softmax(x, dim=0)", ((f"{_GEMS}.softmax:softmax", "softmax(x, 0)"),)),
    ("log_softmax", "Logarithm of the softmax of each row.", "torch.log_softmax(x, dim=-1)", (
        (f"{_GEMS}.log_softmax:log_softmax", "log_softmax(x, -1)"),
    )),
    ("logsumexp", "Logarithm of the sum of exponentials of each row.", "torch.logsumexp(x, dim=-1)", (
        ("fla.ops.utils.logsumexp:logsumexp_fwd", "logsumexp_fwd(x)"),
        ("fla.modules.fused_linear_cross_entropy.ops:logsumexp_fwd", "logsumexp_fwd(x)"),
    )),
)  # fmt: skip

_NORMS = (
    ("rms_norm", "Root mean square norm of each row, with a weight.", _RMS, _WEIGHT, (
        (f"{_LIGER}.rms_norm:rms_norm_forward", "rms_norm_forward(x, self.weight, 1e-6, 0.0, 'llama', True)[0]"),
        (f"{_LIGER}.rms_norm:rms_norm_forward", "rms_norm_forward(x, self.weight, 1e-6, 0.0, 'llama', False)[0]"),
        (f"{_GEMS}.rms_norm:rms_norm_forward", "rms_norm_forward(x, [x.shape[-1]], self.weight, 1e-6)[0]"),
        (f"{_NEW}.rmsnorm:rmsnorm", "rmsnorm(x, self.weight, 1e-6)"),
        ("fla.modules.norm.layernorm:layer_norm_fwd", "layer_norm_fwd(x, self.weight, None, 1e-6, is_rms_norm=True)[0]"),
    )),
    ("gemma_rms_norm", "Root mean square norm of each row, with a weight that is counted from one.", _RMS.replace("self.weight", "(1 + self.weight)"),
     {"weight": "0.1 * torch.randn(cols)"}, (
        (f"{_LIGER}.rms_norm:rms_norm_forward", "rms_norm_forward(x, self.weight, 1e-6, 1.0, 'gemma', True)[0]"),
    )),
    ("layer_norm", "Layer norm of each row, with weight and bias.", "F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, 1e-5)", _WEIGHT_BIAS, (
        (f"{_LIGER}.layer_norm:layer_norm_forward", "layer_norm_forward(x, self.weight, self.bias, 1e-5)[0]"),
        (f"{_GEMS}.layernorm:layer_norm", "layer_norm(x, [x.shape[-1]], self.weight, self.bias, 1e-5)[0]"),
        ("fla.modules.norm.layernorm:layer_norm_fwd", "layer_norm_fwd(x, self.weight, self.bias, 1e-5)[0]"),
        ("fla.modules.norm.layernorm_gated:layer_norm_fwd", "layer_norm_fwd(x, self.weight, self.bias, 1e-5)[0]"),
    )),
    ("poly_norm", "Weighted sum of the normed first three powers of each row, with a bias.",
     "sum(w * (x ** p) * torch.rsqrt((x ** p).square().mean(-1, keepdim=True) + 1e-6) for w, p in zip(self.weight, (3, 2, 1))) + self.bias",
     {"weight": "torch.rand(3)", "bias": "torch.rand(1)"}, (
        (f"{_LIGER}.poly_norm:poly_norm_forward", "poly_norm_forward(x, self.weight, self.bias)[0]"),
    )),
    ("dynamic_tanh", "Tanh of a scaled row, with weight and bias, in place of a norm.", "torch.tanh(self.alpha * x) * self.weight + self.bias",
     {"alpha": "torch.rand(1)", **_WEIGHT_BIAS}, ((f"{_LIGER}.dyt:liger_dyt_fwd", "liger_dyt_fwd(x, self.alpha, self.weight, self.bias)"),)),
    ("l2_norm", "Each row divided by its Euclidean norm.", "x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)", {}, (
        ("fla.modules.norm.l2norm:l2norm_fwd", "l2norm_fwd(x, 1e-6)[0]"),
    )),
    ("sparsemax", "Sparsemax (arXiv 1602.02068) of each row.",
     "torch.relu(x - ((x.sort(-1, True)[0].cumsum(-1) - 1) / torch.arange(1, x.shape[-1] + 1, device=x.device)).amax(-1, keepdim=True))", {}, (
        (f"{_LIGER}.sparsemax:_sparsemax_forward", "_sparsemax_forward(x, -1)[0]"),
    )),
)  # fmt: skip

_REDUCTIONS = (
    ("sum_of_rows", "Sum of each row.", "x.sum(-1)", ((f"{_GEMS}.sum:sum_dim", "sum_dim(x, [-1])"),)),
    ("mean_of_rows", "Mean of each row.", "x.mean(-1)", ((f"{_GEMS}.mean:mean_dim", "mean_dim(x, -1)"),)),
    ("mean_of_columns", "Mean of each column.", "x.mean(0)", ((f"{_GEMS}.mean:mean_dim", "mean_dim(x, 0)"),)),
    ("max_of_rows", "Maximum of each row.", "x.amax(-1)", ((f"{_GEMS}.amax:amax", "amax(x, [-1])"),)),
    ("min_of_rows", "Minimum of each row.", "x.amin(-1)", ((f"{_NEW}.amin:_amin_impl", "_amin_impl(x, -1)"),)),
    ("argmax_of_rows", "Index of each row's maximum.", "x.argmax(-1)", ((f"{_GEMS}.argmax:argmax", "argmax(x, -1)"),)),
    ("norm_of_rows", "Euclidean norm of each row.", "torch.linalg.vector_norm(x, 2, -1)", ((f"{_GEMS}.vector_norm:vector_norm",
        "vector_norm(x, 2, [-1])"),)),
    ("deviation_of_rows", "Standard deviation of each row.", "x.std(-1)", ((f"{_GEMS}.std:std", "std(x, [-1])"),)),
    ("any_above", "Whether any element of each row is above 3.", "(x > 3).any(-1)", ((f"{_GEMS}.any:any_dim", "any_dim(x > 3, -1)"),)),
    ("all_below", "Whether all elements of each row are below 3.", "(x < 3).all(-1)", ((f"{_GEMS}.all:all_dim", "all_dim(x < 3, -1)"),)),
)  # fmt: skip

_SCANS = (
    ("cumsum_of_rows", "Cumulative sum of each row.", "x.cumsum(-1)", ((f"{_GEMS}.cumsum:cumsum", "cumsum(x, 1)"),)),
    ("cumsum_of_columns", "Cumulative sum of each column.", "x.cumsum(0)", ((f"{_GEMS}.cumsum:cumsum", "cumsum(x, 0)"),)),
    ("normed_cumsum", "Cumulative sum of each row over its sum.", "x.cumsum(-1) / x.sum(-1, keepdim=True)", (
        (f"{_GEMS}.cumsum:normed_cumsum", "normed_cumsum(x, -1)"),
    )),
)  # fmt: skip
_SEQUENCE = dict(small=dict(batch=2, length=96, heads=4, width=32), gpu=dict(batch=4, length=4096, heads=16, width=64))


def row_problems() -> tuple[Problem, ...]:
    """Problems of rows and columns."""
    out = [problem(name, title, _X, forward, launches, **_ROWS) for name, title, forward, launches in (*_SOFTMAX, *_REDUCTIONS)]
    positive = {"x": "0.1 + torch.rand(rows, cols)"}
    out += [
        problem(name, title, positive if name == "normed_cumsum" else _X, forward, launches, **_ROWS) for name, title, forward, launches in _SCANS
    ]
    out += [problem(name, title, _X, forward, launches, parameters=parameters, **_ROWS) for name, title, forward, parameters, launches in _NORMS]
    out += [
        problem(
            "variance_of_rows", "Variance of each row.", _X, "x.var(-1)",
            [(f"{_GEMS}.var_mean:var_mean", "var_mean(x, [-1])[0]"), (f"{_GEMS}.var:var", "var(x, [-1])")],
            small=dict(rows=4, cols=40), gpu=dict(rows=8192, cols=4096),  # Welford's algorithm takes an interpreter long
        ),
        problem(
            "softmax_gradient", "Gradient of softmax from its output and the output's gradient.",
            {"y": "torch.softmax(torch.randn(rows, cols), dim=-1)", "grad": "torch.randn(rows, cols)"},
            "y * (grad - (y * grad).sum(-1, keepdim=True))",
            [("fla.ops.utils.softmax:softmax_bwd", "softmax_bwd(y, grad)"), (f"{_GEMS}.softmax:softmax_backward",
                "softmax_backward(grad, y, -1, y.dtype)")],
            **_ROWS,
        ),
        problem(
            "log_softmax_gradient", "Gradient of log-softmax from its output and the output's gradient.",
            {"y": "torch.log_softmax(torch.randn(rows, cols), dim=-1)", "grad": "torch.randn(rows, cols)"},
            "grad - torch.exp(y) * grad.sum(-1, keepdim=True)",
            [(f"{_GEMS}.log_softmax:log_softmax_backward", "log_softmax_backward(grad, y, -1, y.dtype)")], **_ROWS,
        ),
        problem(
            "add_rms_norm", "Root mean square norm of the sum of two tensors, with a weight; and the sum.",
            {**_X, "residual": "torch.randn(rows, cols)"},
            "((x + residual) * torch.rsqrt((x + residual).square().mean(-1, keepdim=True) + 1e-6) * self.weight, x + residual)",
            [(f"{_LIGER}.fused_add_rms_norm:fused_add_rms_norm_forward",
                "fused_add_rms_norm_forward(x, residual, self.weight, 1e-6, 0.0, 'llama')[:2]")],
            parameters=_WEIGHT, **_ROWS,
        ),
        problem(
            "modulated_rms_norm", "Root mean square norm of each row, with a weight, and scale and shift of each row's own.",
            {**_X, "scale": "0.1 * torch.randn(rows, cols)", "shift": "torch.randn(rows, cols)"},
            "x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight * (1 + scale) + shift",
            [(f"{_LIGER}.modulated_rms_norm:modulated_rms_norm_forward",
              "modulated_rms_norm_forward(x, self.weight, scale, shift, 1e-6, 0.0, 'llama')[0]")],
            parameters=_WEIGHT, **_ROWS,
        ),
        problem(
            "gated_layer_norm", "Layer norm of each row times a gate's SiLU.", {**_X, "gate": "torch.randn(rows, cols)"},
            "F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, 1e-5) * F.silu(gate)",
            [("fla.modules.norm.fused_norm_gate:layer_norm_gated_fwd", "layer_norm_gated_fwd(x, gate, self.weight, self.bias)[0]")],
            parameters=_WEIGHT_BIAS, small=dict(rows=24, cols=320), gpu=dict(rows=16384, cols=1024),
        ),
        problem(
            "gated_rms_norm", "Root mean square norm of each row times a gate's sigmoid.", {**_X, "gate": "torch.randn(rows, cols)"},
            "x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight * torch.sigmoid(gate)",
            [("fla.modules.norm.fused_norm_gate:layer_norm_gated_fwd",
              "layer_norm_gated_fwd(x, gate, self.weight, None, 'sigmoid', 1e-5, is_rms_norm=True)[0]")],
            parameters=_WEIGHT, small=dict(rows=24, cols=320), gpu=dict(rows=16384, cols=1024),
        ),
        problem(
            "group_norm", "Group norm of images, with weight and bias.", {"x": "torch.randn(batch, channels, side, side)"},
            "F.group_norm(x, 8, self.weight, self.bias, 1e-5)",
            [(f"{_GEMS}.groupnorm:group_norm",
              "group_norm(x, self.weight, self.bias, x.shape[0], x.shape[1], x.shape[2] * x.shape[3], 8, 1e-5)[0]")],
            parameters={"weight": "1 + 0.1 * torch.randn(channels)", "bias": "0.1 * torch.randn(channels)"},
            small=dict(batch=2, channels=32, side=8), gpu=dict(batch=64, channels=256, side=32),
        ),
        problem(
            "group_norm_of_sequences", "Group norm of sequences, with weight and bias.", {"x": "torch.randn(batch, channels, length)"},
            "F.group_norm(x, 4, self.weight, self.bias, 1e-6)",
            [(f"{_LIGER}.group_norm:group_norm_forward", "group_norm_forward(x, x.shape[1], 4, self.weight, self.bias, 1e-6)[0]")],
            parameters={"weight": "1 + 0.1 * torch.randn(channels)", "bias": "0.1 * torch.randn(channels)"},
            small=dict(batch=3, channels=16, length=40), gpu=dict(batch=64, channels=256, length=1024),
        ),
        problem(
            "batch_norm", "Batch norm of images by statistics that are given, with weight and bias.",
            {"x": "torch.randn(batch, channels, side, side)", "mean": "torch.randn(channels)", "var": "0.5 + torch.rand(channels)"},
            "F.batch_norm(x, mean, var, self.weight, self.bias, False, 0.1, 1e-5)",
            [(f"{_GEMS}.batch_norm:batch_norm", "batch_norm(x, self.weight, self.bias, mean, var, False, 0.1, 1e-5)[0]")],
            parameters={"weight": "1 + 0.1 * torch.randn(channels)", "bias": "0.1 * torch.randn(channels)"},
            small=dict(batch=4, channels=8, side=6), gpu=dict(batch=128, channels=256, side=28),
        ),
        problem(
            "weight_norm", "Rows of a matrix brought to lengths that are given.", {"v": "torch.randn(rows, cols)", "g": "0.5 + torch.rand(rows, 1)"},
            "v * (g / torch.linalg.vector_norm(v, 2, 1, keepdim=True))",
            [(f"{_GEMS}.weightnorm:weight_norm_interface", "weight_norm_interface(v, g, 0)[0]")], **_ROWS,
        ),
        problem(
            "chunk_cumsum", "Cumulative sum along sequences, from anew in each chunk of 32.", {"x": "torch.randn(batch, length, heads)"},
            "x.view(x.shape[0], -1, 32, x.shape[2]).cumsum(2).view_as(x)",
            [("fla.ops.utils.cumsum:chunk_local_cumsum_scalar", "chunk_local_cumsum_scalar(x, 32)")], **_SEQUENCE,
        ),
        problem(
            "chunk_cumsum_of_vectors", "Cumulative sum of vectors along sequences, from anew in each chunk of 32.",
            {"x": "torch.randn(batch, length, heads, width)"},
            "x.view(x.shape[0], -1, 32, x.shape[2], x.shape[3]).cumsum(2).view_as(x)",
            [("fla.ops.utils.cumsum:chunk_local_cumsum_vector", "chunk_local_cumsum_vector(x, 32)")], **_SEQUENCE,
        ),
        problem(
            "cumsum_of_sequences", "Cumulative sum along sequences.", {"x": "torch.randn(batch, length, heads)"}, "x.cumsum(1)",
            [("fla.ops.utils.cumsum:chunk_global_cumsum_scalar", "chunk_global_cumsum_scalar(x)")], **_SEQUENCE,
        ),
        problem(
            "cumsum_of_vectors", "Cumulative sum of vectors along sequences.", {"x": "torch.randn(batch, length, heads, width)"}, "x.cumsum(1)",
            [("fla.ops.utils.cumsum:chunk_global_cumsum_vector", "chunk_global_cumsum_vector(x)")], **_SEQUENCE,
        ),
        problem(
            "reversed_cumsum_of_sequences", "Cumulative sum along sequences, from their ends.", {"x": "torch.randn(batch, length, heads)"},
            "x.flip(1).cumsum(1).flip(1)",
            [("fla.ops.utils.cumsum:chunk_global_cumsum_scalar", "chunk_global_cumsum_scalar(x, reverse=True)")], **_SEQUENCE,
        ),
    ]  # fmt: skip
    return tuple(out)
