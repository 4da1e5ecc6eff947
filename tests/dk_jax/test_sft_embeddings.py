"""Texts as vectors: by the backbone, kept on disk, and as a picture."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dk_jax.models import BackboneConfig, build_backbone
from dk_jax.models.backbone import hidden_states
from dk_jax.sft import embeddings
from dk_jax.sft.embeddings import BackboneEmbedder, CachedEmbedder, project, sentence_embedder

CFG = BackboneConfig(family="qwen3", vocab_size=300, d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=24, tie_embeddings=True)

CODEC = SimpleNamespace(encode=lambda text: list(text.encode()), eos_id=0)


@pytest.fixture(scope="module")
def backbone():
    return build_backbone(CFG, jax.random.key(0))


def test_a_text_is_the_mean_of_its_own_states_whatever_it_is_batched_with(backbone):
    static, params = backbone
    texts = ["a", "some text", "x" * 9, "a longer text that fills the row", "", "y" * 100]
    embed = BackboneEmbedder(static, params, CODEC, tokens=64, length_step=16, max_tokens=32)
    compiled = embeddings.mean_pooled._cache_size()
    vectors = embed(texts)
    assert embeddings.mean_pooled._cache_size() - compiled == 2, "one program for rows of 16, one for rows of 32"
    states = jax.jit(hidden_states, static_argnums=0)
    for text, vector in zip(texts, vectors, strict=True):  # each row alone, and no position of the padding in the mean
        tokens = CODEC.encode(text)[:32] or [0]
        own = states(static, params, jnp.array([tokens + [7] * (32 - len(tokens))]), jnp.array([len(tokens)]))[0, : len(tokens)]
        np.testing.assert_allclose(vector, np.asarray(own).mean(axis=0), atol=1e-5)
    assert vectors.dtype == np.float32 and embed([]).shape == (0, 16)


def test_a_text_is_embedded_once_and_interrupted_work_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(embeddings, "_SAVE_EVERY", 2)
    asked: list[str] = []

    def embed(texts):
        if len(asked) == 4:
            raise KeyboardInterrupt
        asked.extend(texts)
        return np.array([[len(text), 1.0] for text in texts], np.float32)

    texts = ["a" * n for n in range(1, 7)]
    path = tmp_path / "sub" / "vectors.npz"
    with pytest.raises(KeyboardInterrupt):
        CachedEmbedder(embed, path, "model")([*texts, "a"])
    asked.append("")  # no longer four
    found = CachedEmbedder(embed, path, "model")([*texts, "a"])
    np.testing.assert_array_equal(found[:, 0], [1, 2, 3, 4, 5, 6, 1])
    assert sorted(asked) == sorted(["", *texts]), "nothing was asked for twice"
    CachedEmbedder(embed, path, "another model")(["a"])
    assert asked.count("a") == 2
    path.write_bytes(b"no such file")
    with pytest.raises(ValueError, match=f"{path}.*Delete it"):
        CachedEmbedder(embed, path, "model")


def test_sentence_transformers_are_used_where_they_are_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ValueError, match="pip install sentence-transformers"):
        sentence_embedder("small")
    module = ModuleType("sentence_transformers")

    class SentenceTransformer:
        def __init__(self, name):
            if name != "small":
                raise OSError("no such model")

        def encode(self, texts, *, convert_to_numpy):
            return np.array([[len(text)] for text in texts])

    module.SentenceTransformer = SentenceTransformer
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)
    np.testing.assert_array_equal(sentence_embedder("small")(["a", "bbb"]), [[1.0], [3.0]])
    with pytest.raises(ValueError, match="'large'.*no such model"):
        sentence_embedder("large")


@pytest.mark.parametrize("method", ["pca", "tsne"])
def test_a_projection_keeps_groups_apart(method):
    rng = np.random.default_rng(0)
    points = np.concatenate([rng.standard_normal((10, 6)) * 0.1, 5 + rng.standard_normal((10, 6)) * 0.1])
    flat = project(points, method=method, seed=0)
    assert flat.shape == (20, 2)
    within = max(np.linalg.norm(flat[:10] - flat[:10].mean(0), axis=1).max(), np.linalg.norm(flat[10:] - flat[10:].mean(0), axis=1).max())
    assert np.linalg.norm(flat[:10].mean(0) - flat[10:].mean(0)) > within
    again = project(points[[*range(20), 3, 3]], method=method, seed=0)
    assert (again[20:] == again[3]).all(), "equal points stay in one place"
    for few, places_of in ((points[:2], 2), (np.ones((9, 1)), 1), (points[:0], 0)):
        flat = project(few, method=method)
        assert flat.shape == (len(few), 2) and len(np.unique(flat, axis=0)) == places_of
    with pytest.raises(ValueError, match="umap"):
        project(points, method="umap")
