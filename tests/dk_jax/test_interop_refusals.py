"""A checkpoint that does not fit is refused by its config, its index and its headers: one error that names what is wrong, and
not one tensor read."""

import json
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from safetensors.numpy import save_file

from dk_jax.interop import huggingface
from dk_jax.interop.tensor_files import INDEX, SINGLE, TensorFiles
from dk_jax.models import BackboneConfig, build_backbone
from dk_jax.models.sharding import AXES

CFG = BackboneConfig(family="qwen3", vocab_size=50, d_model=16, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=24)
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def tensors():
    return huggingface.state_dict_from_params(CFG, build_backbone(CFG, jax.random.key(0))[1])


@pytest.fixture
def written(tmp_path, tensors, monkeypatch):
    """Writes a checkpoint, and from then on nothing may be read from it."""

    def no_read(self, name, index):
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(TensorFiles, "read", no_read)

    def write(changes=None, shards=1, **config):
        changed = {name: array for name, array in {**tensors, **(changes or {})}.items() if array is not None}
        (tmp_path / "config.json").write_text(json.dumps({**huggingface.config_to_hf(CFG), **config}))
        if shards == 1:
            save_file(changed, tmp_path / SINGLE)
        else:
            names = sorted(changed)
            files = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(names)}
            for file in set(files.values()):
                save_file({name: changed[name] for name in names if files[name] == file}, tmp_path / file)
            (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
        return tmp_path

    return write


def test_the_fixture_writes_what_would_load(written):
    with pytest.raises(AssertionError, match="was read"):
        huggingface.load(written(shards=3))


class TestTensors:
    @pytest.mark.parametrize(
        ("changes", "config", "message"),
        [
            ({UP: None}, {}, rf"'{UP}' is missing \(expected shape \(24, 16\)\)"),
            ({UP: np.zeros((16, 24), np.float32)}, {}, rf"'{UP}' .*axis 0 \(mlp\) is 16, not 24, axis 1 \(embed\) is 24, not 16"),
            ({UP: np.zeros(24, np.float32)}, {}, rf"'{UP}' has shape \(24,\), the config says \(24, 16\)"),
            ({UP: np.zeros((24, 16), np.int8)}, {}, rf"'{UP}' is of type I8; .*no quantised"),
            ({UP: None, "layers.1.up": np.zeros((24, 16), np.float32)}, {}, rf"'{UP}' is missing.* 1 tensors are .* \['layers.1.up'\]"),
            ({"lm_head.weight": np.zeros((50, 8), np.float32)}, {}, r"'lm_head.weight' .*axis 1 \(embed\) is 8, not 16"),
            ({}, {"tie_word_embeddings": False}, r"'lm_head.weight' is missing \(expected shape \(50, 16\)\)"),
            ({}, {"vocab_size": 64}, r"'model.embed_tokens.weight' .*axis 0 \(vocab\) is 50, not 64"),
            ({}, {"num_key_value_heads": 4}, r"k_proj.*axis 0 \(kv_heads\) is 16, not 32"),
            ({}, {"model_type": "llama"}, r"6 tensors are not understood, e.g. \['model.layers.0.self_attn.k_norm.weight'"),
            ({}, {"num_hidden_layers": 2}, r"11 tensors are not understood, e.g. \['model.layers.2"),
            ({}, {"num_hidden_layers": 5}, r"'model.layers.3.input_layernorm.weight' is missing.*and 17 more"),
        ],
    )  # fmt: skip
    def test_that_are_missing_misnamed_misshapen_or_too_many(self, written, changes, config, message):
        directory = written(changes, **config)
        with pytest.raises(ValueError, match=f"^checkpoint {re.escape(str(directory))}: .*{message}"):
            huggingface.load(directory)

    def test_in_memory_are_checked_alike(self, tensors):
        with pytest.raises(ValueError, match=rf"'{UP}' is missing"):
            huggingface.params_from_state_dict(CFG, {name: array for name, array in tensors.items() if name != UP})
        with pytest.raises(ValueError, match=rf"'{UP}' has shape \(16, 24\)"):
            huggingface.params_from_state_dict(CFG, {**tensors, UP: tensors[UP].T})
        with pytest.raises(ValueError, match=r"1 tensors are not understood, e.g. \['extra'\]"):
            huggingface.params_from_state_dict(CFG, {**tensors, "extra": tensors[UP]})


class TestFiles:
    def test_a_directory_without_a_checkpoint(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"config\.json"):
            huggingface.load(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(huggingface.config_to_hf(CFG)))
        with pytest.raises(FileNotFoundError, match="safetensors"):
            huggingface.load(tmp_path)

    def test_a_shard_that_is_missing(self, written):
        directory = written(shards=3)
        (directory / "model-1.safetensors").unlink()
        with pytest.raises(FileNotFoundError, match=r"index.json names 1 files that are missing, e.g. \['model-1.safetensors'\]"):
            huggingface.load(directory)

    def test_a_shard_that_is_cut_short(self, written):
        directory = written(shards=3)
        path = directory / "model-2.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(ValueError, match="model-2.safetensors is not a whole safetensors file"):
            huggingface.load(directory)

    def test_an_index_that_names_a_tensor_which_its_file_lacks(self, written):
        directory = written(shards=3)
        index = json.loads((directory / INDEX).read_text())
        index["weight_map"][UP] = next(file for file in set(index["weight_map"].values()) if file != index["weight_map"][UP])
        (directory / INDEX).write_text(json.dumps(index))
        with pytest.raises(ValueError, match=rf"puts 1 tensors into .* which that file lacks, e.g. \['{UP}'\]"):
            huggingface.load(directory)

    def test_what_the_index_does_not_name_is_not_looked_at(self, written, tensors):
        directory = written(shards=3)
        save_file({"model.norm.weight": np.zeros(3, np.float32)}, directory / "adapter.safetensors")
        assert TensorFiles(directory).shapes == {name: array.shape for name, array in tensors.items()}

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "not an index of safetensors"),
            ('{"metadata": {}}', "not an index of safetensors: KeyError: 'weight_map'"),
            ('{"weight_map": {}}', "names none"),
            ('{"weight_map": {"a": "../model.safetensors"}}', r"files beside it: \['../model.safetensors'\]"),
        ],
    )
    def test_a_broken_index(self, written, text, message):
        directory = written(shards=3)
        (directory / INDEX).write_text(text)
        with pytest.raises(ValueError, match=message):
            huggingface.load(directory)

    def test_two_exports_in_one_directory(self, written):
        written(shards=3)
        with pytest.raises(ValueError, match=f"both {SINGLE} and {INDEX}"):
            huggingface.load(written())

    def test_files_without_an_index_that_hold_a_tensor_twice(self, written, tensors):
        directory = written()
        save_file({UP: tensors[UP]}, directory / "other.safetensors")
        with pytest.raises(ValueError, match=f"'{UP}' is in more than one file and there is no {INDEX}"):
            huggingface.load(directory)


def test_a_mesh_that_does_not_divide_the_network(written):
    with pytest.raises(ValueError, match="tensor=4 does not divide n_kv_heads=2"):
        huggingface.load(written(), mesh=AbstractMesh((1, 1, 4), AXES))


def test_a_tokenizer_of_another_model():
    huggingface.check_vocabulary(CFG, SimpleNamespace(vocab_size=50))
    huggingface.check_vocabulary(CFG, SimpleNamespace(vocab_size=49))  # published tables have spare rows
    with pytest.raises(ValueError, match="has 51 tokens and the network's table 50 rows"):
        huggingface.check_vocabulary(CFG, SimpleNamespace(vocab_size=51))
