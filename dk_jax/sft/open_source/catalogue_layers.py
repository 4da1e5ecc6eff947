"""Open kernels that move elements, multiply matrices, pool, convolve, attend, or run recurrences."""

from __future__ import annotations

from dk_jax.sft.open_source.catalogue import Problem, problem

_GEMS, _NEW, _LIGER, _FUSED = "flag_gems.ops", "flag_gems.experimental_ops", "liger_kernel.ops", "flag_gems.fused"
_IMAGES = dict(small=dict(batch=2, channels=4, side=12), gpu=dict(batch=32, channels=128, side=64))
_MATRIX = dict(small=dict(rows=48, cols=80), gpu=dict(rows=4096, cols=8192))
_SQUARE = dict(small=dict(side=40), gpu=dict(side=8192))
_X, _IMAGE = {"x": "torch.randn(rows, cols)"}, {"x": "torch.randn(batch, channels, side, side)"}
_MM = dict(small=dict(m=48, n=40, k=72), gpu=dict(m=2048, n=2048, k=2048))
_AB = {"a": "torch.randn(m, k) / 8", "b": "torch.randn(k, n) / 8"}

_RECURRENCE = """
h = torch.zeros_like(x[:, 0])
out = []
for t in range(x.shape[1]):
    h = g[:, t].exp() * h + x[:, t]
    out.append(h)
return torch.stack(out, 1)
"""
_DELTA_RULE = """
h = torch.zeros_like(k[:, 0, :, :, None] * v[:, 0, :, None])
out = []
for t in range(q.shape[1]):
    u = beta[:, t, :, None] * (v[:, t] - torch.einsum('bhkv,bhk->bhv', h, k[:, t]))
    h = h + k[:, t, :, :, None] * u[:, :, None]
    out.append(torch.einsum('bhkv,bhk->bhv', h, 0.2 * q[:, t]))
return torch.stack(out, 1)
"""
_ROTATED = """
half = q.shape[-1] // 2
turned = torch.cat([-q[..., half:], q[..., :half]], -1)
return q * torch.cat([cos, cos], -1)[:, None] + turned * torch.cat([sin, sin], -1)[:, None]
"""
_ROTATED_PAIR = """
half = q.shape[-1] // 2
return tuple(x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin for x in (q, k))
"""
_OVER_BLOCKS = """
normed = blocks * torch.rsqrt(blocks.square().mean(-1, keepdim=True) + 1e-6) * self.norm
weights = (normed * self.query).sum(-1).softmax(0)
return (weights.unsqueeze(-1) * blocks).sum(0)
"""
_SINKHORN = """
for _ in range(10):
    x = x - torch.logsumexp(x, -2, keepdim=True)
    x = x - torch.logsumexp(x, -1, keepdim=True)
return x.exp()
"""


def _matmuls() -> list[Problem]:
    return [
        problem("matmul", "Product of two matrices.", _AB, "a @ b", [
            ("fla.ops.utils.matmul:matmul", "matmul(a, b)"), (f"{_GEMS}.mm:mm", "mm(a, b)"),
        ], **_MM),
        problem("addmm", "Product of two matrices added to a third.", {"c": "torch.randn(m, n)", **_AB},
            "torch.addmm(c, a, b, beta=0.5, alpha=2.0)", [
            (f"{_GEMS}.addmm:addmm", "addmm(c, a, b, beta=0.5, alpha=2.0)"),
        ], **_MM),
        problem("bmm", "Products of pairs of matrices.", {"a": "torch.randn(batch, m, k) / 8", "b": "torch.randn(batch, k, n) / 8"},
            "torch.bmm(a, b)", [
            (f"{_GEMS}.bmm:bmm", "bmm(a, b)"),
        ], small=dict(batch=3, m=40, n=24, k=48), gpu=dict(batch=64, m=512, n=512, k=512)),
        problem("baddbmm", "Products of pairs of matrices added to others.", {
            "c": "torch.randn(batch, m, n)", "a": "torch.randn(batch, m, k) / 8", "b": "torch.randn(batch, k, n) / 8",
        }, "torch.baddbmm(c, a, b)", [
            (f"{_GEMS}.baddbmm:baddbmm", "baddbmm(c, a, b)"),
        ], small=dict(batch=3, m=40, n=24, k=48), gpu=dict(batch=64, m=512, n=512, k=512)),
        problem("mv", "Product of a matrix and a vector.", {**_X, "v": "torch.randn(cols)"}, "torch.mv(x, v)", [
            (f"{_GEMS}.mv:mv", "mv(x, v)"), (f"{_NEW}.mv:mv", "mv(x, v)"),
        ], **_MATRIX),
        problem("addmv", "Product of a matrix and a vector added to a vector.", {"y": "torch.randn(rows)", **_X, "v": "torch.randn(cols)"},
            "torch.addmv(y, x, v)", [
            (f"{_GEMS}.addmv:addmv", "addmv(y, x, v)"),
        ], **_MATRIX),
        problem("outer", "Outer product of two vectors.", {"a": "torch.randn(rows)", "b": "torch.randn(cols)"}, "torch.outer(a, b)", [
            (f"{_FUSED}.outer:Outer.forward", "Outer(a, b)"),
        ], **_MATRIX),
        problem("kron", "Kronecker product of two matrices.", {"a": "torch.randn(m, m)", "b": "torch.randn(n, n)"}, "torch.kron(a, b)", [
            (f"{_GEMS}.kron:kron", "kron(a, b)"),
        ], small=dict(m=6, n=10), gpu=dict(m=64, n=128)),
        problem("conv2d", "Convolution of images.", {**_IMAGE, "weight": "torch.randn(filters, channels, 3, 3) / 8"},
            "F.conv2d(x, weight, padding=1)", [
            (f"{_GEMS}.conv2d:Conv2d.forward", "Conv2d(x, weight, None, 1, 1, 1, 1)"),
        ], small=dict(batch=2, channels=4, side=8, filters=8), gpu=dict(batch=16, channels=64, side=56, filters=64)),
        problem("causal_conv1d", "Depthwise convolution of sequences with their past, with a bias.", {
            "x": "torch.randn(batch, length, width)", "weight": "torch.randn(width, 4) / 2", "bias": "torch.randn(width)",
        }, "F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), weight.unsqueeze(1), bias, groups=x.shape[2]).transpose(1, 2)", [
            ("fla.modules.causal_conv1d.ops:causal_conv1d_fwd", "causal_conv1d_fwd(x, weight, bias, None)[0]"),
        ], small=dict(batch=2, length=80, width=48), gpu=dict(batch=8, length=4096, width=1024)),
        problem("causal_conv1d_silu", "SiLU of a depthwise convolution of sequences with their past.", {
            "x": "torch.randn(batch, length, width)", "weight": "torch.randn(width, 4) / 2",
        }, "F.silu(F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), weight.unsqueeze(1), groups=x.shape[2])).transpose(1, 2)", [
            ("fla.modules.causal_conv1d.ops:causal_conv1d_fwd", "causal_conv1d_fwd(x, weight, None, None, activation='silu')[0]"),
        ], small=dict(batch=2, length=80, width=48), gpu=dict(batch=8, length=4096, width=1024)),
    ]  # fmt: skip


def _moves() -> list[Problem]:
    flat = {"x": "torch.randn(rows, cols)", "y": "torch.randn(rows, cols)"}
    return [
        problem("triu", "Upper triangle of a matrix.", {"x": "torch.randn(side, side)"}, "torch.triu(x, 1)", [
            (f"{_GEMS}.triu:triu", "triu(x, 1)"), (f"{_NEW}.triu:triu", "triu(x, 1)"),
        ], **_SQUARE),
        problem("tril", "Lower triangle of a matrix.", {"x": "torch.randn(side, side)"}, "torch.tril(x)", [(f"{_GEMS}.tril:tril", "tril(x)")],
            **_SQUARE),
        problem("diag", "Matrix of a diagonal.", {"x": "torch.randn(side)"}, "torch.diag(x)", [
            (f"{_GEMS}.diag:diag_1d_to_2d", "diag_1d_to_2d(x)"),
        ], **_SQUARE),
        problem("transpose", "Transpose of a matrix, in memory.", _X, "x.t().contiguous()", [(f"{_GEMS}.t_copy:t_copy", "t_copy(x)")], **_MATRIX),
        problem("permute", "Dimensions of images reordered, in memory.", _IMAGE, "x.permute(0, 2, 3, 1).contiguous()", [
            (f"{_NEW}.permute_copy:permute_copy", "permute_copy(x, (0, 2, 3, 1))"),
        ], **_IMAGES),
        problem("roll", "Rows shifted in a circle.", _X, "torch.roll(x, 3, 1)", [(f"{_GEMS}.roll:roll", "roll(x, 3, 1)")], **_MATRIX),
        problem("stack", "Two matrices stacked.", flat, "torch.stack([x, y], 1)", [(f"{_GEMS}.stack:stack", "stack([x, y], 1)")], **_MATRIX),
        problem("cat", "Two matrices side by side.", flat, "torch.cat([x, y], 1)", [
            (f"{_GEMS}.cat:cat", "cat([x, y], 1)"), (f"{_GEMS}.hstack:hstack", "hstack([x, y])"),
        ], **_MATRIX),
        problem("vstack", "Two matrices, one above the other.", flat, "torch.vstack([x, y])", [(f"{_GEMS}.vstack:vstack", "vstack([x, y])")],
            **_MATRIX),
        problem("slice_scatter", "A part of a matrix replaced.", {**_X, "part": "torch.randn(rows, cols // 2)"},
            "torch.slice_scatter(x, part, 1, 8, 8 + x.shape[1] // 2)", [
            (f"{_NEW}.slice_scatter:slice_scatter", "slice_scatter(x, part, 1, 8, 8 + x.shape[1] // 2)"),
        ], **_MATRIX),
        problem("index_select", "Rows of a matrix by index.", {**_X, "index": "torch.randint(0, rows, (rows // 2,))"}, "x.index_select(0, index)", [
            (f"{_GEMS}.index_select:index_select", "index_select(x, 0, index)"),
        ], **_MATRIX),
        problem("embedding", "Rows of a table by token.", {"table": "torch.randn(rows, cols)", "tokens": "torch.randint(0, rows, (batch, 64))"},
            "F.embedding(tokens, table)", [(f"{_GEMS}.embedding:embedding", "embedding(table, tokens)")],
            small=dict(rows=100, cols=80, batch=2), gpu=dict(rows=32768, cols=2048, batch=256)),
        problem("take", "Elements by their flat index.", {**_X, "index": "torch.randint(0, rows * cols, (rows, cols))"}, "torch.take(x, index)", [
            (f"{_NEW}.take:take", "take(x, index)"),
        ], small=dict(rows=24, cols=80), gpu=dict(rows=2048, cols=8192)),
        problem("one_hot", "One-hot vectors of classes.", {"x": "torch.randint(0, 100, (rows,))"}, "F.one_hot(x, 100)", [
            (f"{_GEMS}.one_hot:one_hot", "one_hot(x, 100)"),
        ], small=dict(rows=64), gpu=dict(rows=1 << 18)),
        problem("pixel_shuffle", "Channels of images turned into pixels.", _IMAGE, "F.pixel_shuffle(x, 2)", [
            (f"{_NEW}.pixel_shuffle:pixel_shuffle", "pixel_shuffle(x, 2)"),
        ], **_IMAGES),
        problem("pixel_unshuffle", "Pixels of images turned into channels.", _IMAGE, "F.pixel_unshuffle(x, 2)", [
            (f"{_GEMS}.pixel_unshuffle:pixel_unshuffle", "pixel_unshuffle(x, 2)"),
        ], **_IMAGES),
        problem("im2col", "Patches of images as columns.", _IMAGE, "F.unfold(x, 3, padding=1)", [
            (f"{_NEW}.im2col:im2col", "im2col(x, (3, 3), (1, 1), (1, 1), (1, 1))"),
        ], small=dict(batch=2, channels=4, side=12), gpu=dict(batch=8, channels=64, side=64)),
        problem("reflection_pad2d", "Images with reflected borders.", _IMAGE, "F.pad(x, (2, 1, 3, 2), mode='reflect')", [
            (f"{_GEMS}.reflection_pad2d:reflection_pad2d", "reflection_pad2d(x, (2, 1, 3, 2))"),
        ], **_IMAGES),
        problem("reflection_pad1d", "Sequences with reflected ends.", {"x": "torch.randn(batch, channels, length)"},
            "F.pad(x, (3, 2), mode='reflect')", [
            (f"{_GEMS}.reflection_pad1d:reflection_pad1d", "reflection_pad1d(x, (3, 2))"),
        ], small=dict(batch=2, channels=4, length=50), gpu=dict(batch=32, channels=256, length=4096)),
        problem("replication_pad2d", "Images with repeated borders.", _IMAGE, "F.pad(x, (2, 1, 3, 2), mode='replicate')", [
            (f"{_NEW}.replication_pad2d:replication_pad2d", "replication_pad2d(x, (2, 1, 3, 2))"),
        ], **_IMAGES),
        problem("causal_mask", "Scores above the diagonal set to 0.", {"x": "torch.randn(batch, length, length)"}, "torch.tril(x)", [
            (f"{_LIGER}.multi_token_attention:_mask_zero_forward", "_mask_zero_forward(x)"),
        ], small=dict(batch=2, length=40), gpu=dict(batch=32, length=2048)),
        problem("token_shift", "Each token's difference to the one before it.", {"x": "torch.randn(batch, length, width)"},
            "F.pad(x, (0, 0, 1, 0))[:, :-1] - x", [("fla.modules.token_shift:token_shift_fwd", "token_shift_fwd(x)[0]")],
            small=dict(batch=2, length=40, width=48), gpu=dict(batch=8, length=4096, width=1024)),
    ]  # fmt: skip


def _pools() -> list[Problem]:
    return [
        problem("avg_pool2d", "Average pooling of images.", _IMAGE, "F.avg_pool2d(x, 2)", [
            (f"{_GEMS}.avg_pool2d:avg_pool2d", "avg_pool2d(x, 2, 2)"),
        ], **_IMAGES),
        problem("max_pool2d", "Maximum pooling of images.", _IMAGE, "F.max_pool2d(x, 3, 2, 1)", [
            (f"{_GEMS}.max_pool2d_with_indices:max_pool2d_with_indices", "max_pool2d_with_indices(x, 3, 2, 1)[0]"),
        ], **_IMAGES),
        problem("adaptive_avg_pool3d", "Average pooling of volumes to a given size.", {"x": "torch.randn(batch, channels, side, side, side)"},
            "F.adaptive_avg_pool3d(x, 4)", [
            (f"{_NEW}._adaptive_avg_pool3d:_adaptive_avg_pool3d", "_adaptive_avg_pool3d(x, (4, 4, 4))"),
        ], small=dict(batch=2, channels=3, side=8), gpu=dict(batch=16, channels=64, side=32)),
        problem("mean_pooling", "Mean of each chunk of 16 of sequences.", {"x": "torch.randn(batch, length, heads, width)"},
            "x.view(x.shape[0], -1, 16, x.shape[2], x.shape[3]).mean(2)", [("fla.ops.utils.pooling:mean_pooling_fwd", "mean_pooling_fwd(x, 16)")],
            small=dict(batch=2, length=64, heads=2, width=40), gpu=dict(batch=8, length=4096, heads=16, width=64)),
        problem("upsample_nearest2d", "Images twice as large by repeated pixels.", _IMAGE, "F.interpolate(x, scale_factor=2, mode='nearest')", [
            (f"{_GEMS}.upsample_nearest2d:upsample_nearest2d", "upsample_nearest2d(x, (2 * x.shape[2], 2 * x.shape[3]), 2.0, 2.0)"),
        ], small=dict(batch=2, channels=3, side=8), gpu=dict(batch=16, channels=128, side=64)),
        problem("upsample_nearest1d", "Sequences twice as long by repetition.", {"x": "torch.randn(batch, channels, length)"},
            "F.interpolate(x, scale_factor=2, mode='nearest')", [
            (f"{_NEW}.upsample_nearest1d:upsample_nearest1d", "upsample_nearest1d(x, [2 * x.shape[2]])"),
            (f"{_GEMS}.upsample_nearest1d:upsample_nearest1d", "upsample_nearest1d(x, (2 * x.shape[2],), 2.0)"),
        ], small=dict(batch=2, channels=3, length=50), gpu=dict(batch=32, channels=256, length=4096)),
        problem("upsample_linear1d", "Sequences twice as long by linear interpolation.", {"x": "torch.randn(batch, channels, length)"},
            "F.interpolate(x, scale_factor=2, mode='linear', align_corners=False)", [
            (f"{_GEMS}.upsample_linear1d:upsample_linear1d", "upsample_linear1d(x, [2 * x.shape[2]], False)"),
        ], small=dict(batch=2, channels=3, length=50), gpu=dict(batch=32, channels=256, length=4096)),
        problem("upsample_bicubic2d", "Images twice as large by cubic interpolation.", _IMAGE,
            "F.interpolate(x, scale_factor=2, mode='bicubic', align_corners=False)", [
            (f"{_GEMS}.upsample_bicubic2d:upsample_bicubic2d", "upsample_bicubic2d(x, [2 * x.shape[2], 2 * x.shape[3]], False)"),
        ], small=dict(batch=2, channels=3, side=8), gpu=dict(batch=16, channels=64, side=64)),
    ]  # fmt: skip


def _sequences() -> list[Problem]:
    heads = dict(small=dict(batch=2, length=48, heads=4, width=32), gpu=dict(batch=4, length=2048, heads=16, width=64))
    qkv = {name: "torch.randn(batch, length, heads, width)" for name in "qkv"}
    angles = "torch.arange(length)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)"
    return [
        problem("rotary_embedding", "Rotary position embedding of heads.", {
            "q": "torch.randn(batch, length, heads, width)", "cos": f"torch.cos({angles})", "sin": f"torch.sin({angles})",
        }, _ROTATED, [("fla.modules.rotary.ops:rotary_embedding_fwdbwd", "rotary_embedding_fwdbwd(q, cos, sin)")], **heads),
        problem("rotary_embedding_of_pairs", "Rotary position embedding of queries and keys.", {
            "q": "torch.randn(batch, length, heads, width)", "k": "torch.randn(batch, length, heads // 2, width)",
            "cos": f"torch.cos({angles})", "sin": f"torch.sin({angles})",
        }, _ROTATED_PAIR.replace("cos", "torch.cat([cos, cos], -1)[:, None]").replace("sin", "torch.cat([sin, sin], -1)[:, None]"), [
            (f"{_FUSED}.rotary_embedding:apply_rotary_pos_emb", "apply_rotary_pos_emb(q, k, cos, sin)"),
        ], **heads),
        problem("rotary_embedding_heads_first", "Rotary position embedding of queries and keys whose heads come before positions.", {
            "q": "torch.randn(batch, heads, length, width)", "k": "torch.randn(batch, heads // 2, length, width)",
            "cos": f"torch.cos({angles})", "sin": f"torch.sin({angles})",
        }, _ROTATED_PAIR.replace("cos", "torch.cat([cos, cos], -1)").replace("sin", "torch.cat([sin, sin], -1)"), [
            (f"{_LIGER}.rope:rope_forward", "rope_forward(q, k, torch.cat([cos, cos], -1), torch.cat([sin, sin], -1))[:2]"),
        ], **heads),
        problem("causal_attention", "Attention of positions to those before them.", qkv,
            "F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=0.15).transpose(1, 2)", [
            ("fla.ops.attn.parallel:parallel_attn_fwd", "parallel_attn_fwd(q, k, v, None, None, 0.15)[0]"),
        ], **heads),
        problem("attention_over_blocks", "Blocks of values mixed by attention of a learnt query to their norms.",
            {"blocks": "torch.randn(depth, batch, length, width)"},
            _OVER_BLOCKS, [
            (f"{_LIGER}.attn_res:attn_res_forward", "attn_res_forward(blocks, self.query, self.norm)[0]"),
        ], parameters={"query": "torch.randn(width) / 4", "norm": "1 + 0.1 * torch.randn(width)"},
            small=dict(depth=4, batch=2, length=10, width=96), gpu=dict(depth=8, batch=4, length=2048, width=1024)),
        problem("linear_recurrence", "State of each channel that decays by a gate and takes up the input.", {
            "x": "torch.randn(batch, length, width)", "g": "F.logsigmoid(torch.randn(batch, length, width))",
        }, _RECURRENCE, [
            ("fla.ops.hgrn.fused_recurrent:fused_recurrent_hgrn_fwd", "fused_recurrent_hgrn_fwd(x, g)[0]"),
        ], small=dict(batch=2, length=24, width=48), gpu=dict(batch=8, length=512, width=1024)),
        problem("linear_attention", "Causal attention without a softmax.", qkv,
            "torch.einsum('bhts,bshd->bthd', torch.tril(torch.einsum('bthd,bshd->bhts', q, k) * 0.2), v)", [
            ("fla.ops.common.fused_recurrent:fused_recurrent_fwd", "fused_recurrent_fwd(q, k, v, scale=0.2)[0]"),
        ], small=dict(batch=2, length=32, heads=2, width=32), gpu=dict(batch=4, length=1024, heads=16, width=64)),
        problem("delta_rule", "Linear attention whose state takes up by how much it errs on each value.", {
            **qkv, "k": "F.normalize(torch.randn(batch, length, heads, width), dim=-1)", "beta": "torch.rand(batch, length, heads)",
        }, _DELTA_RULE, [
            ("fla.ops.delta_rule.fused_recurrent:fused_recurrent_delta_rule_fwd",
                "fused_recurrent_delta_rule_fwd(q, k, v, beta, 0.2, None, False)[0]"),
        ], small=dict(batch=2, length=12, heads=2, width=32), gpu=dict(batch=4, length=512, heads=16, width=64)),
        problem("sinkhorn", "Square matrices brought to rows and columns that sum to one, by ten rounds.", {"x": "torch.randn(batch, side, side)"},
            _SINKHORN, [("fla.ops.utils.sinkhorn.ops:sinkhorn_fwd", "sinkhorn_fwd(x, 10)[0]")],
            small=dict(batch=6, side=8), gpu=dict(batch=65536, side=8)),
        problem("mixed_with_previous", "Tokens mixed with the ones before them, by channel.", {
            "x": "torch.randn(batch, length, width)", "last": "torch.randn(batch, width)", "weight": "torch.rand(width)",
        }, "x + (torch.cat([last[:, None], x[:, :-1]], 1) - x) * weight", [
            ("fla.ops.rwkv7.channel_mixing:rwkv_mix_fwd", "rwkv_mix_fwd(x, last, weight)"),
        ], small=dict(batch=2, length=40, width=48), gpu=dict(batch=8, length=4096, width=1024)),
        problem("key_update", "Keys scaled by a gate, by channel.", {
            "k": "torch.randn(batch, length, width)", "a": "torch.rand(batch, length, width)", "ka": "torch.randn(width)",
        }, "k * (1 + (a - 1) * ka)", [("fla.ops.rwkv7.fused_k_update:k_update_fwd", "k_update_fwd(k, a, ka)[0]")],
            small=dict(batch=2, length=40, width=48), gpu=dict(batch=8, length=4096, width=1024)),
        problem("moe_sum", "Sum over the experts of each token.", {"x": "torch.randn(tokens, experts, width)"}, "x.sum(1)", [
            (f"{_FUSED}.moe_sum:moe_sum", "out = x.new_empty(x.shape[0], x.shape[2])\nmoe_sum(x, out)\nreturn out"),
        ], small=dict(tokens=20, experts=4, width=96), gpu=dict(tokens=8192, experts=8, width=1024)),
        problem("stream_mix", "Residual streams of each token mixed into one by its weights.", {
            "x": "torch.randn(tokens, streams, width)", "weights": "torch.randn(tokens, streams)",
        }, "(x * weights.unsqueeze(-1)).sum(1)", [(f"{_LIGER}.mhc:mhc_pre_fwd", "mhc_pre_fwd(x, weights)")],
            small=dict(tokens=20, streams=4, width=160), gpu=dict(tokens=8192, streams=4, width=2048)),
        problem("stream_update", "Residual streams of each token mixed among themselves, and a layer's output added to them.", {
            "x": "torch.randn(tokens, streams, width)", "y": "torch.randn(tokens, width)",
            "post": "torch.randn(tokens, streams)", "mix": "torch.randn(tokens, streams, streams)",
        }, "torch.einsum('tsc,tos->toc', x, mix) + post.unsqueeze(-1) * y.unsqueeze(1)", [
            (f"{_LIGER}.mhc:mhc_post_res_fwd", "mhc_post_res_fwd(x, y, post, mix)"),
        ], small=dict(tokens=20, streams=4, width=160), gpu=dict(tokens=8192, streams=4, width=2048)),
        problem("repetition_penalty", "Logits of tokens that have occurred divided, or multiplied where negative, by a penalty.", {
            "logits": "torch.randn(batch, classes)", "seen": "torch.rand(batch, classes) < 0.2", "penalty": "1 + torch.rand(batch)",
        }, "torch.where(seen, torch.where(logits > 0, logits / penalty[:, None], logits * penalty[:, None]), logits)", [
            (f"{_FUSED}.apply_repetition_penalties:apply_repetition_penalties",
                "out = logits.clone()\napply_repetition_penalties(out, seen, seen, penalty)\nreturn out"),
        ], small=dict(batch=3, classes=500), gpu=dict(batch=256, classes=131072)),
    ]  # fmt: skip


def layer_problems() -> tuple[Problem, ...]:
    """Problems of matrices, images and sequences."""
    return (*_matmuls(), *_moves(), *_pools(), *_sequences())
