"""Texts as vectors: by the run's own backbone or a sentence-transformers model, kept on disk, and as a picture in two dimensions.

An embedder is a function from texts to float32 [N, D]. The text stands alone, without the prompt that it answers: what is compared is
what was said, not what was asked.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from html import escape
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from dk_jax.generation.tokenizer import Codec
from dk_jax.models.backbone import Params, Static, hidden_states
from dk_jax.models.sharding import mesh_of, row_share, shard_batch
from dk_jax.train.batch import bucket

Embed = Callable[[Sequence[str]], np.ndarray]
Projection = Literal["pca", "tsne"]

NOISE = -1
"""Label of what belongs to no cluster."""
_SAVE_EVERY = 256  # texts between two writes of the cache


class BackboneEmbedder:
    """The mean over a text's tokens of the backbone's last hidden states (after the final norm, before any agent head).

    Args:
        static, params: the backbone, on one device or spread over a mesh.
        codec: turns texts into tokens; a text without tokens is the end-of-turn token alone.
        tokens: about how many tokens a batch has, padding included.
        length_step: lengths are rounded up to multiples of it (`dk_jax.train.batch.bucket`), each of which is compiled once.
        max_tokens: of longer texts only so many of the first tokens are read.
    """

    def __init__(
        self, static: Static, params: Params, codec: Codec, *, tokens: int = 4096, length_step: int = 128, max_tokens: int = 1024
    ):
        for name, value in (("tokens", tokens), ("length_step", length_step), ("max_tokens", max_tokens)):
            if value < 1:
                raise ValueError(f"BackboneEmbedder: {name} is {value}; it must be at least 1")
        self._static, self._params, self._codec = static, params, codec
        self._tokens, self._step, self._most = tokens, length_step, max_tokens
        self._mesh = mesh_of(params)

    def __call__(self, texts: Sequence[str]) -> Float[np.ndarray, "N D"]:
        rows = [self._codec.encode(text)[: self._most] or [self._codec.eos_id] for text in texts]
        out = np.zeros((len(rows), self._static.cfg.d_model), np.float32)
        by_length: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            by_length.setdefault(bucket(len(row), self._step), []).append(i)
        share = row_share(self._mesh)
        with tqdm(total=len(rows), desc="embedding", unit="text", delay=2) as bar:
            for length, members in sorted(by_length.items()):
                most = share * max(1, self._tokens // (length * share))
                size = min(most, share * (1 << (-(-len(members) // share) - 1).bit_length()))  # few texts make a small batch
                for start in range(0, len(members), size):
                    part = members[start : start + size]
                    out[part] = self._batch([rows[i] for i in part], size, length)
                    bar.update(len(part))
        return out

    def _batch(self, rows: Sequence[Sequence[int]], size: int, length: int) -> Float[np.ndarray, "b D"]:
        batch = {"tokens": np.zeros((size, length), np.int32), "lengths": np.ones((size,), np.int32)}
        for b, row in enumerate(rows):
            batch["tokens"][b, : len(row)] = row
            batch["lengths"][b] = len(row)
        with jax.set_mesh(self._mesh) if self._mesh is not None else nullcontext():
            placed = shard_batch(self._mesh, batch) if self._mesh is not None else batch
            pooled = mean_pooled(self._static, self._params, placed["tokens"], placed["lengths"])
        return np.asarray(pooled)[: len(rows)]


@functools.partial(jax.jit, static_argnums=0)
def mean_pooled(static: Static, params: Params, tokens: Int[Array, "B T"], lengths: Int[Array, " B"]) -> Float[Array, "B D"]:
    """Mean of the last hidden states over each row's own tokens, float32; padding has no part in it."""
    hidden = hidden_states(static, params, tokens, lengths).astype(jnp.float32)  # zero beyond each row's length
    return jnp.sum(hidden, axis=1) / lengths[:, None]


def sentence_embedder(name: str) -> Embed:
    """An embedder by a model of the package sentence-transformers, by name or folder.

    Raises:
        ValueError: the package is not installed, or has no such model.
    """
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ValueError(
            f"embeddings by {name!r} need the package sentence-transformers ({error}): pip install sentence-transformers, or give no name, "
            "and the run's own model is used"
        ) from error
    try:
        model: Any = SentenceTransformer(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"sentence-transformers can't load {name!r}: {error}. Give the name or folder of one of its models") from error

    def embed(texts: Sequence[str]) -> np.ndarray:
        return np.asarray(model.encode(list(texts), convert_to_numpy=True), np.float32)

    return embed


class CachedEmbedder:
    """Another embedder, asked once for each text: what it says is kept in a file, so that interrupted work goes on where it stopped.

    Args:
        embed: the other one.
        path: an .npz file; written anew, complete or not at all, after every 256 texts.
        key: what the vectors depend on besides the text, such as the model's name and its weights' digest. A file of another key is not used,
            and is replaced.
    """

    def __init__(self, embed: Embed, path: Path, key: str):
        self._embed, self._path, self._key = embed, path, key
        self._known: dict[str, np.ndarray] = {}
        if path.exists():
            try:
                with np.load(path, allow_pickle=False) as file:
                    if str(file["key"]) == key:
                        self._known = dict(zip(map(str, file["digests"]), file["vectors"], strict=True))
            except (OSError, ValueError, KeyError, EOFError) as error:
                raise ValueError(f"{path} is no file of embeddings ({error}). Delete it; it is made again") from error

    def __call__(self, texts: Sequence[str]) -> Float[np.ndarray, "N D"]:
        digests = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32] for text in texts]
        missing = {digest: text for digest, text in zip(digests, texts, strict=True) if digest not in self._known}
        waiting = sorted(missing, key=lambda digest: (len(missing[digest]), digest))  # like lengths together, in any process the same
        for start in range(0, len(waiting), _SAVE_EVERY):
            part = waiting[start : start + _SAVE_EVERY]
            self._known.update(zip(part, self._embed([missing[digest] for digest in part]), strict=True))
            self._save()
        if not texts:
            return np.zeros((0, 0), np.float32)
        return np.stack([self._known[digest] for digest in digests])

    def _save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".part")
        with open(partial, "wb") as file:
            vectors = np.stack(list(self._known.values()))
            np.savez(file, key=np.array(self._key), digests=np.array(list(self._known)), vectors=vectors)
        partial.replace(self._path)


def project(points: Float[np.ndarray, "N D"], *, method: Projection = "pca", seed: int = 0) -> Float[np.ndarray, "N 2"]:
    """Two dimensions to look at: the two main axes, or t-SNE (van der Maaten and Hinton 2008), which keeps neighbours together and says
    nothing of distances between groups.

    Raises:
        ValueError: an unknown method.
    """
    if method not in ("pca", "tsne"):
        raise ValueError(f"a projection {method!r} is unknown: it must be 'pca' or 'tsne'")
    distinct, place = np.unique(points, axis=0, return_inverse=True)  # t-SNE would draw equal ones apart
    return _projected(distinct, method, seed)[place.reshape(-1)] if len(points) else np.zeros((0, 2))


def _projected(points: np.ndarray, method: Projection, seed: int) -> np.ndarray:
    n = len(points)
    if n < 3:
        return np.pad(np.arange(float(n))[:, None], ((0, 0), (0, 1)))
    from sklearn.decomposition import PCA  # takes seconds

    if method == "pca" or n < 8:
        flat = PCA(n_components=min(2, points.shape[1]), random_state=seed % 2**32).fit_transform(points)
        return np.pad(flat, ((0, 0), (0, 2 - flat.shape[1])))
    from sklearn.manifold import TSNE

    method = "exact" if n <= 500 else "barnes_hut"  # whose threads cost more than they save where there is little to do
    return TSNE(init="pca", perplexity=min(30.0, (n - 1) / 3), random_state=seed % 2**32, method=method).fit_transform(points)


# --- the picture --------------------------------------------------------------------------------------------------------------

SHOWN_CLUSTERS = 7
"""Clusters with a mark and a colour (`--c0` ... of the page) of their own; further ones are drawn alike (`--rest`)."""
_SIDE, _PAD = 460, 30
_MARKS = ("circle", "square", "triangle", "diamond", "down", "plus", "cross")


def scatter(
    xy: Float[np.ndarray, "N 2"],
    labels: Int[np.ndarray, " N"],
    shown: np.ndarray,
    *,
    titles: Sequence[str],
    names: Mapping[int, str],
    label: str,
) -> str:
    """An SVG of samples in the plane: one mark for those in one place, its area their number, with a title for who points at it.

    Args:
        xy: places.
        labels: cluster of each, or NOISE.
        shown: whether each is still there; where some are not, a ring is as large as the mark with them would be [N].
        titles: what each is called.
        names: what each cluster is called; each is a group that the keyboard can reach.
        label: what the picture shows, for who can't see it.
    """
    low, span = xy.min(axis=0), np.ptp(xy, axis=0)
    places = np.where(span > 1e-9, _PAD + (xy - low) / np.maximum(span, 1e-9) * (_SIDE - 2 * _PAD), _SIDE / 2)
    marks: dict[tuple[int, float, float], list[Any]] = {}
    for i, (x, y) in enumerate(np.round(places, 1).tolist()):
        found = marks.setdefault((int(labels[i]), x, round(_SIDE - y, 1)), [0, 0, titles[i]])
        found[0] += 1
        found[1] += bool(shown[i])
    unit = min(4.0, 26.0 / max((of_all for of_all, _, _ in marks.values()), default=1) ** 0.5)
    groups = []
    for cluster in sorted(names, key=lambda cluster: (cluster != NOISE, -cluster)):  # the largest last, which is on top
        drawn, count = [], 0
        for (own, x, y), (of_all, left, title) in sorted(marks.items(), key=lambda item: -item[1][0]):
            if own == cluster:
                count += left
                said = f"<title>{escape(title)}: {left:,}{f' of {of_all:,}' if left < of_all else ''}</title>"
                drawn += [_mark(cluster, x, y, unit * of_all**0.5, hollow=True, inner=said)] if left < of_all else []
                drawn += [_mark(cluster, x, y, unit * left**0.5, inner=said)] if left else []
        if drawn:
            said = escape(f"{names[cluster]}: {count:,} samples")
            groups.append(f'<g class="cluster" tabindex="0" role="img" aria-label="{said}">{"".join(drawn)}</g>')
    return f'<svg class="plot" viewBox="0 0 {_SIDE} {_SIDE}" role="group" aria-label="{escape(label)}">{"".join(groups)}</svg>'


def mark(cluster: int) -> str:
    """The mark of a cluster as a small SVG, for a legend."""
    return f'<svg class="mark" viewBox="0 0 16 16" aria-hidden="true">{_mark(cluster, 8, 8, 6)}</svg>'


def _mark(cluster: int, x: float, y: float, r: float, *, hollow: bool = False, inner: str = "") -> str:
    """A mark of about the area of a circle of radius r (at least 2), in the cluster's form and colour."""
    own = 0 <= cluster < SHOWN_CLUSTERS
    kind, colour = (_MARKS[cluster], f"var(--c{cluster})") if own else ("circle", "var(--rest)")
    filled = f'fill="{colour}" fill-opacity="{0.8 if own else 0.5}" stroke="var(--card)"'
    style = f'fill="none" stroke="{colour}" stroke-dasharray="2 2"' if hollow else filled
    r = max(r, 2.0) * (0.8 if cluster == NOISE else 1.0)
    if kind == "circle":
        return f'<circle cx="{x:g}" cy="{y:g}" r="{r:.1f}" {style}>{inner}</circle>'
    if kind in ("plus", "cross"):
        a, b = 0.42 * r, 1.15 * r
        corners = [(-a, -b), (a, -b), (a, -a), (b, -a), (b, a), (a, a), (a, b), (-a, b), (-a, a), (-b, a), (-b, -a), (-a, -a)]
        corners = corners if kind == "plus" else [((u - v) * 0.7071, (u + v) * 0.7071) for u, v in corners]
    else:
        corners = {
            "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
            "diamond": [(0, -1.25), (1.25, 0), (0, 1.25), (-1.25, 0)],
            "triangle": [(0, -1.3), (1.2, 0.85), (-1.2, 0.85)],
            "down": [(0, 1.3), (1.2, -0.85), (-1.2, -0.85)],
        }[kind]
        corners = [(r * u, r * v) for u, v in corners]
    return f'<path d="M{"L".join(f"{x + u:.1f} {y + v:.1f}" for u, v in corners)}Z" {style}>{inner}</path>'
