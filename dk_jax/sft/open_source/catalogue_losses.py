"""Open kernels that compute losses of logits or of pairs of tensors, and distances between distributions."""

from __future__ import annotations

from dk_jax.sft.open_source.catalogue import Problem, problem

_LOGITS = dict(small=dict(rows=24, classes=320), gpu=dict(rows=4096, classes=8192))
_PAIR = dict(small=dict(rows=24, cols=320), gpu=dict(rows=4096, cols=4096))
_LIGER, _GEMS, _NEW = "liger_kernel.ops", "flag_gems.ops", "flag_gems.experimental_ops"
_CE = "fla.modules.fused_cross_entropy.ops:cross_entropy_fwd"
_GIVEN = {"logits": "torch.randn(rows, classes)", "target": "torch.randint(0, classes, (rows,))"}
_TWO = {"x": "torch.randn(rows, cols)", "y": "torch.randn(rows, cols)"}
_SIGNS = {"x": "torch.randn(rows, cols)", "y": "2.0 * torch.randint(0, 2, (rows, cols)) - 1"}
_PROBABILITIES = {"x": "torch.log_softmax(torch.randn(rows, classes), dim=-1)", "y": "torch.softmax(torch.randn(rows, classes), dim=-1)"}


def _liger(rest: str) -> tuple[str, str]:
    return f"{_LIGER}.cross_entropy:cross_entropy_forward", f"cross_entropy_forward(logits, target, {rest})[0]"


def loss_problems() -> tuple[Problem, ...]:
    """Losses."""
    out = [
        problem(
            "cross_entropy", "Cross entropy of each row's logits with its class.", _GIVEN, "F.cross_entropy(logits, target, reduction='none')",
            [
                _liger("None, -100, 0.0, 0.0, 'none', None, False"), (_CE, "cross_entropy_fwd(logits, target)[0]"),
                ("flag_gems.fused.cross_entropy_loss:CrossEntropyLoss.forward", "CrossEntropyLoss(logits, target, None, 0, -100, 0.0)"),
            ],
            **_LOGITS,
        ),
        problem(
            "smooth_cross_entropy", "Cross entropy of each row's logits with its class, with label smoothing.", _GIVEN,
            "F.cross_entropy(logits, target, reduction='none', label_smoothing=0.1)",
            [_liger("None, -100, 0.0, 0.1, 'none', None, False"), (_CE, "cross_entropy_fwd(logits, target, label_smoothing=0.1)[0]")], **_LOGITS,
        ),
        problem(
            "capped_cross_entropy", "Cross entropy of each row's logits, softly capped at 20, with its class.", _GIVEN,
            "F.cross_entropy(20 * torch.tanh(logits / 20), target, reduction='none')",
            [_liger("None, -100, 0.0, 0.0, 'none', 20.0, False"), (_CE, "cross_entropy_fwd(logits, target, logit_softcapping=20.0)[0]")], **_LOGITS,
        ),
        problem(
            "weighted_cross_entropy", "Cross entropy of each row's logits with its class, weighted by class.",
            {**_GIVEN, "weight": "0.5 + torch.rand(classes)"}, "F.cross_entropy(logits, target, weight, reduction='none')",
            [_liger("weight, -100, 0.0, 0.0, 'none', None, False")], **_LOGITS,
        ),
        problem(
            "scaled_cross_entropy", "Cross entropy of each row's logits, scaled, with its class, and a penalty on its normaliser.", _GIVEN,
            "F.cross_entropy(0.5 * logits, target, reduction='none') + 1e-3 * torch.logsumexp(0.5 * logits, -1).square()",
            [(_CE, "cross_entropy_fwd(logits, target, logit_scale=0.5, lse_square_scale=1e-3)[0]")], **_LOGITS,
        ),
        problem(
            "nll_loss", "Negative log likelihood of each row's class.", {**_GIVEN, "logits": "torch.log_softmax(torch.randn(rows, classes), -1)"},
            "F.nll_loss(logits, target, reduction='none')",
            [(f"{_GEMS}.nllloss:nll_loss_forward", "nll_loss_forward(logits, target, None, 0)[0]")], **_LOGITS,
        ),
        problem(
            "selective_log_softmax", "Log-probability of each position's next token at a temperature.",
            {"logits": "torch.randn(batch, length + 1, classes)", "tokens": "torch.randint(0, classes, (batch, length))"},
            "torch.log_softmax(logits[:, :-1] / 0.9, -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)",
            [(f"{_LIGER}.grpo_loss:fused_selective_log_softmax", "fused_selective_log_softmax(logits, tokens, 0.9)")],
            small=dict(batch=2, length=12, classes=500), gpu=dict(batch=8, length=1024, classes=8192),
        ),
        problem(
            "kl_divergence_of_logs", "Kullback-Leibler divergence of each row's distribution, both as log-probabilities.",
            {"x": _PROBABILITIES["x"], "y": _PROBABILITIES["x"]}, "F.kl_div(x, y, reduction='none', log_target=True).sum(-1)",
            [(f"{_LIGER}.kl_div:kldiv_forward_triton", "kldiv_forward_triton(x, y, True, 'none', 1e-10).sum(-1)")], **_LOGITS,
        ),
        problem(
            "total_variation", "Terms of the total variation distance of pairs of distributions.", {"x": _PROBABILITIES["y"],
                "y": _PROBABILITIES["y"]},
            "0.5 * (x - y).abs()",
            [(f"{_LIGER}.tvd:tv_distance_forward_triton", "tv_distance_forward_triton(x, y, None, 'none', -100, False)[0]")], **_LOGITS,
        ),
        problem(
            "cross_entropy_and_distance", "Cross entropy of each row's logits, and their total variation distance to a teacher's.",
            {**_GIVEN, "teacher": "torch.randn(rows, classes)"},
            "(F.cross_entropy(logits, target, reduction='none'), 0.5 * (logits.softmax(-1) - teacher.softmax(-1)).abs().sum(-1))",
            [(f"{_LIGER}.fused_ce_tvd:fused_ce_tvd_forward", "fused_ce_tvd_forward(logits, teacher, target, -100)[:2]")], **_LOGITS,
        ),
        problem("squared_difference", "Squared difference of each element.", _TWO, "F.mse_loss(x, y, reduction='none')",
                [(f"{_GEMS}.mse_loss:mse_loss", "mse_loss(x, y, 0)")], **_PAIR),
        problem("huber_loss", "Huber loss of each element.", _TWO, "F.huber_loss(x, y, reduction='none', delta=0.8)",
                [(f"{_NEW}.huber_loss:huber_loss", "huber_loss(x, y, 0, 0.8)")], **_PAIR),
        problem("soft_margin_loss", "Soft margin loss of each element.", _SIGNS, "F.soft_margin_loss(x, y, reduction='none')",
                [(f"{_GEMS}.soft_margin_loss:soft_margin_loss", "soft_margin_loss(x, y, 'none')")], **_PAIR),
        problem("margin_ranking_loss", "Margin ranking loss of each element.", {**_TWO, "target": _SIGNS["y"]},
            "F.margin_ranking_loss(x, y, target, 0.2, reduction='none')",
                [(f"{_GEMS}.margin_ranking_loss:margin_ranking_loss", "margin_ranking_loss(x, y, target, 0.2, 'none')")], **_PAIR),
    ]  # fmt: skip
    return tuple(out)
