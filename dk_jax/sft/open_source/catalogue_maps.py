"""Open kernels that compute each element by itself: activations, arithmetic, gated units, and their gradients."""

from __future__ import annotations

from dk_jax.sft.open_source.catalogue import Problem, problem

_FLAT = dict(small=dict(rows=24, cols=320), gpu=dict(rows=4096, cols=4096))
_GEMS, _NEW, _FLA = "flag_gems.ops", "flag_gems.experimental_ops", "fla.modules.activations.ops"
_NORMAL, _UNIT = "torch.randn(rows, cols)", "torch.rand(rows, cols)"

# name, what is applied, how the input is drawn, launchers that take the input alone or as the call says
_UNARY: tuple[tuple[str, str, str, tuple[tuple[str, str], ...]], ...] = (
    ("abs", "torch.abs(x)", _NORMAL, ((f"{_GEMS}.abs:abs", "abs(x)"), (f"{_NEW}.abs:abs", "abs(x)"))),
    ("arccosh", "torch.acosh(x)", f"1.5 + 4 * {_UNIT}", ((f"{_NEW}.arccosh:arccosh", "arccosh(x)"),)),
    ("arcsinh", "torch.asinh(x)", _NORMAL, ((f"{_GEMS}.arcsinh:arcsinh", "arcsinh(x)"),)),
    ("arctanh", "torch.atanh(x)", f"1.8 * {_UNIT} - 0.9", ((f"{_NEW}.arctanh:arctanh", "arctanh(x)"),)),
    ("celu", "F.celu(x, 1.5)", _NORMAL, ((f"{_NEW}.celu:celu", "celu(x, 1.5)"), (f"{_GEMS}.celu:celu", "celu(x, 1.5)"))),
    ("clamp", "torch.clamp(x, -0.5, 1.0)", _NORMAL, ((f"{_GEMS}.clamp:clamp", "clamp(x, -0.5, 1.0)"),)),
    ("cos", "torch.cos(x)", _NORMAL, ((f"{_GEMS}.cos:cos", "cos(x)"),)),
    ("elu", "F.elu(x, 0.7)", _NORMAL, ((f"{_GEMS}.elu:elu", "elu(x, 0.7)"),)),
    ("elu_plus_one", "F.elu(x) + 1", _NORMAL, ((f"{_FLA}:elu_p1_fwd", "elu_p1_fwd(x)"),)),
    ("erf", "torch.erf(x)", _NORMAL, ((f"{_GEMS}.erf:erf", "erf(x)"),)),
    ("erfinv", "torch.erfinv(x)", f"1.8 * {_UNIT} - 0.9", ((f"{_NEW}.erfinv:erfinv", "erfinv(x)"),)),
    ("exp", "torch.exp(x)", _NORMAL, ((f"{_GEMS}.exp:exp", "exp(x)"),)),
    ("exp2", "torch.exp2(x)", _NORMAL, ((f"{_GEMS}.exp2:exp2", "exp2(x)"), (f"{_NEW}.exp2:exp2", "exp2(x)"))),
    ("frac", "torch.frac(x)", f"8 * {_NORMAL}", ((f"{_NEW}.frac:frac", "frac(x)"),)),
    ("gelu", "F.gelu(x)", _NORMAL, ((f"{_GEMS}.gelu:gelu", "gelu(x)"),)),
    ("gelu_tanh", "F.gelu(x, approximate='tanh')", _NORMAL, ((f"{_GEMS}.gelu:gelu", "gelu(x, approximate='tanh')"),)),
    ("hardshrink", "F.hardshrink(x, 0.4)", _NORMAL, ((f"{_NEW}.hardshrink:hardshrink", "hardshrink(x, 0.4)"),)),
    ("hardsigmoid", "F.hardsigmoid(x)", f"3 * {_NORMAL}", ((f"{_GEMS}.hardsigmoid:hardsigmoid", "hardsigmoid(x)"),)),
    ("hardtanh", "F.hardtanh(x, -0.6, 0.9)", _NORMAL, ((f"{_NEW}.hardtanh:hardtanh", "hardtanh(x, -0.6, 0.9)"),)),
    ("leaky_relu", "F.leaky_relu(x, 0.1)", _NORMAL, ((f"{_NEW}.leaky_relu:leaky_relu", "leaky_relu(x, 0.1)"),)),
    ("log", "torch.log(x)", f"0.1 + {_UNIT}", ((f"{_GEMS}.log:log", "log(x)"),)),
    ("log10", "torch.log10(x)", f"0.1 + {_UNIT}", ((f"{_GEMS}.log10:log10", "log10(x)"),)),
    ("log_sigmoid", "F.logsigmoid(x)", _NORMAL, (
        (f"{_FLA}:logsigmoid_fwd", "logsigmoid_fwd(x)"), (f"{_GEMS}.log_sigmoid:log_sigmoid", "log_sigmoid(x)"),
    )),
    ("logit", "torch.logit(x)", f"0.05 + 0.9 * {_UNIT}", ((f"{_GEMS}.logit:logit", "logit(x)"),)),
    ("nan_to_num", "torch.nan_to_num(x / (x > -1), 0.5, 2.0, -2.0)", _NORMAL, (
        (f"{_GEMS}.nan_to_num:nan_to_num", "nan_to_num(x / (x > -1), 0.5, 2.0, -2.0)"),
    )),
    ("negative", "torch.neg(x)", _NORMAL, ((f"{_NEW}.negative:negative", "negative(x)"), (f"{_GEMS}.neg:neg", "neg(x)"))),
    ("reciprocal", "torch.reciprocal(x)", f"0.2 + {_UNIT}", ((f"{_GEMS}.reciprocal:reciprocal", "reciprocal(x)"),)),
    ("relu", "F.relu(x)", _NORMAL, ((f"{_GEMS}.relu:relu", "relu(x)"), (f"{_NEW}.relu:relu", "relu(x)"))),
    ("relu6", "F.relu6(x)", f"5 * {_NORMAL}", ((f"{_GEMS}.relu6:relu6", "relu6(x)"),)),
    ("relu_squared", "F.relu(x).square()", _NORMAL, (
        ("liger_kernel.ops.relu_squared:relu_squared_forward", "relu_squared_forward(x)"),
        ("fla.ops.rwkv7.channel_mixing:rwkv_relu_and_square_fwd", "rwkv_relu_and_square_fwd(x, inplace=False)"),
    )),
    ("rsqrt", "torch.rsqrt(x)", f"0.2 + {_UNIT}", ((f"{_GEMS}.rsqrt:rsqrt", "rsqrt(x)"),)),
    ("selu", "F.selu(x)", _NORMAL, ((f"{_GEMS}.selu:selu", "selu(x)"),)),
    ("sigmoid", "torch.sigmoid(x)", _NORMAL, (
        (f"{_FLA}:sigmoid_fwd", "sigmoid_fwd(x)"), (f"{_GEMS}.sigmoid:sigmoid", "sigmoid(x)"), (f"{_NEW}.sigmoid:sigmoid", "sigmoid(x)"),
    )),
    ("sign", "torch.sign(x)", _NORMAL, ((f"{_NEW}.sign:sign", "sign(x)"), (f"{_NEW}.sgn:sgn", "sgn(x)"))),
    ("silu", "F.silu(x)", _NORMAL, ((f"{_FLA}:swish_fwd", "swish_fwd(x)"), (f"{_GEMS}.silu:silu", "silu(x)"))),
    ("sin", "torch.sin(x)", _NORMAL, ((f"{_GEMS}.sin:sin", "sin(x)"),)),
    ("sinc", "torch.sinc(x)", _NORMAL, ((f"{_NEW}.sinc:sinc", "sinc(x)"),)),
    ("softplus", "F.softplus(x, 1.5)", f"4 * {_NORMAL}", ((f"{_GEMS}.softplus:softplus", "softplus(x, 1.5)"),)),
    ("softshrink", "F.softshrink(x, 0.4)", _NORMAL, ((f"{_GEMS}.softshrink:softshrink", "softshrink(x, 0.4)"),)),
    ("sqrt", "torch.sqrt(x)", f"0.1 + {_UNIT}", ((f"{_GEMS}.sqrt:sqrt", "sqrt(x)"),)),
    ("tan", "torch.tan(x)", f"2 * {_UNIT} - 1", ((f"{_GEMS}.tan:tan", "tan(x)"),)),
    ("tanh", "torch.tanh(x)", _NORMAL, ((f"{_GEMS}.tanh:tanh", "tanh(x)"),)),
    ("threshold", "F.threshold(x, 0.3, -1.0)", _NORMAL, (
        (f"{_NEW}.threshold:threshold", "threshold(x, 0.3, -1.0)"), (f"{_GEMS}.threshold:threshold", "threshold(x, 0.3, -1.0)"),
    )),
    ("trunc", "torch.trunc(x)", f"8 * {_NORMAL}", ((f"{_NEW}.trunc:trunc", "trunc(x)"), (f"{_NEW}.fix:fix", "fix(x)"))),
)  # fmt: skip

_BINARY: tuple[tuple[str, str, str, str, tuple[tuple[str, str], ...]], ...] = (
    ("add_scaled", "torch.add(x, y, alpha=0.5)", _NORMAL, _NORMAL, ((f"{_GEMS}.add:add", "add(x, y, alpha=0.5)"),)),
    ("copysign", "torch.copysign(x, y)", _NORMAL, _NORMAL, ((f"{_GEMS}.copysign:copysign", "copysign(x, y)"),)),
    ("divide", "torch.div(x, y)", _NORMAL, f"0.5 + {_UNIT}", ((f"{_GEMS}.div:true_divide", "true_divide(x, y)"),)),
    ("greater", "torch.gt(x, y)", _NORMAL, _NORMAL, ((f"{_GEMS}.gt:gt", "gt(x, y)"), (f"{_GEMS}.greater:greater", "greater(x, y)"))),
    ("heaviside", "torch.heaviside(x, y)", f"torch.randint(-1, 2, (rows, cols)).float() * {_UNIT}", _NORMAL, (
        (f"{_NEW}.heaviside:heaviside", "heaviside(x, y)"),
    )),
    ("hypot", "torch.hypot(x, y)", _NORMAL, _NORMAL, ((f"{_GEMS}.hypot:hypot", "hypot(x, y)"),)),
    ("lerp", "torch.lerp(x, y, 0.3)", _NORMAL, _NORMAL, ((f"{_GEMS}.lerp:lerp_scalar", "lerp_scalar(x, y, 0.3)"),)),
    ("logaddexp", "torch.logaddexp(x, y)", _NORMAL, _NORMAL, ((f"{_GEMS}.logaddexp:logaddexp", "logaddexp(x, y)"),)),
    ("logaddexp2", "torch.logaddexp2(x, y)", _NORMAL, _NORMAL, ((f"{_NEW}.logaddexp2:logaddexp2", "logaddexp2(x, y)"),)),
    ("maximum", "torch.maximum(x, y)", _NORMAL, _NORMAL, (
        (f"{_GEMS}.maximum:maximum", "maximum(x, y)"), (f"{_NEW}.maximum:maximum", "maximum(x, y)"),
    )),
    ("multiply", "torch.mul(x, y)", _NORMAL, _NORMAL, ((f"{_GEMS}.mul:mul", "mul(x, y)"),)),
    ("xlog1py", "torch.special.xlog1py(x, y)", _NORMAL, _UNIT, ((f"{_NEW}.special_xlog1py:special_xlog1py", "special_xlog1py(x, y)"),)),
    ("xlogy", "torch.xlogy(x, y)", _NORMAL, f"0.1 + {_UNIT}", ((f"{_NEW}.xlogy:xlogy_Tensor", "xlogy_Tensor(x, y)"),)),
    ("geglu", "F.gelu(x, approximate='tanh') * y", _NORMAL, _NORMAL, (
        ("liger_kernel.ops.geglu:geglu_forward", "geglu_forward(x, y)[2]"),
        ("flag_gems.fused.gelu_and_mul:gelu_and_mul", "gelu_and_mul(x, y, 'tanh')"),
    )),
    ("swiglu", "F.silu(x) * y", _NORMAL, _NORMAL, (
        ("liger_kernel.ops.swiglu:swiglu_forward", "swiglu_forward(x, y)[2]"), (f"{_FLA}:swiglu_fwd", "swiglu_fwd(x, y)"),
        ("flag_gems.fused.silu_and_mul:silu_and_mul", "silu_and_mul(x, y)"),
    )),
    ("sigmoid_glu", "torch.sigmoid(x) * y", _NORMAL, _NORMAL, ((f"{_FLA}:sigmoidglu_fwd", "sigmoidglu_fwd(x, y)"),)),
    ("gelu_gradient", "torch.ops.aten.gelu_backward(x, y)", _NORMAL, _NORMAL, ((f"{_GEMS}.gelu:gelu_backward", "gelu_backward(x, y)"),)),
    ("relu_squared_gradient", "2 * F.relu(x) * y", _NORMAL, _NORMAL, (
        ("liger_kernel.ops.relu_squared:relu_squared_backward", "relu_squared_backward(x, y)"),
    )),
    ("sigmoid_gradient", "torch.sigmoid(x) * (1 - torch.sigmoid(x)) * y", _NORMAL, _NORMAL, ((f"{_FLA}:sigmoid_bwd", "sigmoid_bwd(x, y)"),)),
    ("silu_gradient", "torch.ops.aten.silu_backward(y, x)", _NORMAL, _NORMAL, (
        (f"{_FLA}:swish_bwd", "swish_bwd(x, y)"), (f"{_GEMS}.silu:silu_backward", "silu_backward(y, x)"),
    )),
    ("tanh_gradient", "y * (1 - x * x)", _NORMAL, _NORMAL, ((f"{_GEMS}.tanh:tanh_backward", "tanh_backward(y, x)"),)),
)  # fmt: skip

_HALVES = (
    ("fused_geglu", "F.gelu(x[:, :cols], approximate='tanh') * x[:, cols:]", (("flag_gems.fused.geglu:geglu", "geglu(x)"),)),
    ("fused_reglu", "F.relu(x[:, :cols]) * x[:, cols:]", (("flag_gems.fused.reglu:reglu", "reglu(x)"),)),
    ("fused_swiglu", "F.silu(x[:, :cols]) * x[:, cols:]", (
        ("flag_gems.fused.swiglu:swiglu", "swiglu(x)"),
        ("liger_kernel.ops.swiglu:swiglu_fused_gate_up_forward", "swiglu_fused_gate_up_forward(x)[1]"),
    )),
    ("glu", "F.glu(x, -1)", ((f"{_NEW}.glu:glu", "glu(x, -1)"),)),
)  # fmt: skip


def map_problems() -> tuple[Problem, ...]:
    """Elementwise problems."""
    out = [
        problem(name, f"Elementwise {name.replace('_', ' ')}.", {"x": draw}, forward, launches, **_FLAT)
        for name, forward, draw, launches in _UNARY
    ]
    out += [
        problem(name, f"Elementwise {name.replace('_', ' ')} of two tensors.", {"x": x, "y": y}, forward, launches, **_FLAT)
        for name, forward, x, y, launches in _BINARY
    ]
    out += [
        problem(name, f"Gated unit of a tensor's halves: {name.replace('_', ' ')}.", {"x": "torch.randn(rows, 2 * cols)"}, forward, launches, **_FLAT)
        for name, forward, launches in _HALVES
    ]
    three = {"x": _NORMAL, "a": _NORMAL, "b": f"0.5 + {_UNIT}"}
    out += [
        problem(
            "addcmul", "A product of two tensors added to a third.", three, "torch.addcmul(x, a, b, value=0.5)",
            [(f"{_GEMS}.addcmul:addcmul", "addcmul(x, a, b, value=0.5)")], **_FLAT,
        ),
        problem(
            "addcdiv", "A quotient of two tensors added to a third.", three, "torch.addcdiv(x, a, b, value=0.5)",
            [(f"{_NEW}.addcdiv:addcdiv", "addcdiv(x, a, b, value=0.5)")], **_FLAT,
        ),
        problem(
            "masked_fill", "A number in place of the elements that a mask chooses.", {"x": _NORMAL, "mask": f"{_UNIT} < 0.3"},
            "x.masked_fill(mask, -1.0)", [(f"{_GEMS}.masked_fill:masked_fill", "masked_fill(x, mask, -1.0)")], **_FLAT,
        ),
        problem(
            "prelu", "Leaky ReLU with a learnt slope for each column.", {"x": _NORMAL}, "F.prelu(x, self.weight)",
            [(f"{_GEMS}.prelu:prelu", "prelu(x, self.weight)")], parameters={"weight": "torch.rand(cols)"}, **_FLAT,
        ),
    ]  # fmt: skip
    return tuple(out)
