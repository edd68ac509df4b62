"""Which file of a checkpoint directory holds a tensor, and what a model is called that lies there."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.workers.models.checkpoints import random_model, save, write_gguf
from workers.models import LoadedModel, ModelError, ModelSpec, load_model

INDEX = "model.safetensors.index.json"
NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of one model: `whole`, and `shards` with an index."""
    top = tmp_path_factory.mktemp("origin")
    oracle = random_model("llama")
    save(oracle, top / "whole")
    shutil.copytree(top / "whole", top / "shards", ignore=shutil.ignore_patterns("*.safetensors"))
    oracle.save_pretrained(top / "shards", max_shard_size="100KB")
    return top


@pytest.fixture(scope="module")
def fingerprint(origin: Path) -> str:
    return load_model(ModelSpec(str(origin / "whole"))).fingerprint


@pytest.fixture
def shards(origin: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(origin / "shards", tmp_path / "shards"))


@pytest.fixture
def whole(origin: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(origin / "whole", tmp_path / "whole"))


def stray(path: Path, **tensors: torch.Tensor) -> None:
    """A file with another value of a tensor of the model."""
    save_file({NAME: torch.zeros(64, 96)} | tensors, path)


def load(path: Path) -> LoadedModel:
    return load_model(ModelSpec(str(path)))


@pytest.mark.parametrize(
    "name", ["old.safetensors", "zzz.safetensors", "a.SAFETENSORS", "model.safetensors", "consolidated.safetensors"]
)
def test_the_index_decides_whatever_else_lies_there(name: str, shards: Path, fingerprint: str) -> None:
    stray(shards / name, what=torch.ones(3))
    (shards / "pytorch_model.bin").write_bytes(b"junk")
    (shards / "pytorch_model.bin.index.json").write_text("{}")
    (shards / "old.safetensors.index.json").write_text("{}")
    assert load(shards).fingerprint == fingerprint


@pytest.mark.parametrize("name", ["old.safetensors", "zzz.safetensors", "OLD.SAFETENSORS"])
def test_without_an_index_doubles_are_refused(name: str, whole: Path) -> None:
    stray(whole / name)
    with pytest.raises(ModelError, match=rf"{NAME} is in both .*{name}") as error:
        load(whole)
    assert "model.safetensors" in str(error.value)


def test_without_an_index_several_files_and_ones_that_do_not_count_are_no_doubles(
    whole: Path, fingerprint: str
) -> None:
    tensors = load_file(whole / "model.safetensors")
    (whole / "model.safetensors").unlink()
    save_file({name: tensors[name] for name in tensors if "layers.1" in name}, whole / "b.safetensors")
    save_file({name: tensors[name] for name in tensors if "layers.1" not in name}, whole / "A.Safetensors")
    stray(whole / "consolidated.safetensors")  # Mistral's own names lie beside
    (whole / "model.bin").write_bytes(b"junk")
    (whole / "._b.safetensors").write_bytes(b"junk")
    (whole / "c.safetensors").mkdir()
    (whole / "model.gguf").write_bytes(b"junk")
    assert load(whole).fingerprint == fingerprint


def edit(change: Callable[[dict[str, str]], None]) -> Callable[[Path], None]:
    def harm(shards: Path) -> None:
        index = json.loads((shards / INDEX).read_text())
        change(index["weight_map"])
        (shards / INDEX).write_text(json.dumps(index))

    return harm


def move(files: dict[str, str]) -> None:
    files[NAME] = sorted(set(files.values()) - {files[NAME]})[0]


def twice(shards: Path) -> None:
    (shards / "adapter_config.json").write_text("{}")


def rename_index(shards: Path) -> None:
    (shards / INDEX).rename(shards / "model.fp16.safetensors.index.json")


def rename_variant(shards: Path) -> None:
    (shards / INDEX).rename(shards / "model.safetensors.index.fp16.json")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (edit(lambda files: files.update({NAME: "model-00099-of-00099.safetensors"})), "names model-00099.*not there"),
        (edit(lambda files: files.update({NAME: "/etc/passwd"})), "names '/etc/passwd', which is no .safetensors"),
        (edit(lambda files: files.update({NAME: "../whole/model.safetensors"})), r"names '\.\./whole"),
        (edit(lambda files: files.update({NAME: "/tmp/model.safetensors"})), "names '/tmp/model.safetensors'"),
        (edit(lambda files: files.update({NAME: "model.bin"})), "names 'model.bin'"),
        (edit(move), rf"lacks {NAME}, which {INDEX} says is in it"),
        (edit(lambda files: files.update({"no.such": files[NAME]})), "lacks no.such"),
        (edit(lambda files: files.pop(NAME) and None), rf"does not list {NAME}"),
        (lambda shards: (shards / INDEX).write_text("{"), "is not a readable index"),
        (lambda shards: (shards / INDEX).write_text('{"weight_map": [1]}'), "is not a readable index"),
        (lambda shards: (shards / INDEX).write_text("[" * 100_000), "is not a readable index"),
        (rename_index, "has model.fp16.safetensors.index.json and no model.safetensors.index.json"),
        (rename_variant, "has model.safetensors.index.fp16.json and no model.safetensors.index.json"),
        (twice, "holds an adapter"),
    ],
)
def test_an_index_that_is_wrong_is_one_sentence(harm: Callable[[Path], None], message: str, shards: Path) -> None:
    harm(shards)
    with pytest.raises(ModelError, match=message) as error:
        load(shards)
    assert "\n" not in str(error.value)
    assert str(shards) in str(error.value)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.layers.0.self_attn.o_proj.bias", torch.ones(64), "has no place in this kind of model"),
        ("model.layers.3.mlp.down_proj.weight", torch.ones(64, 96), "has no place in this kind of model"),
        ("model.layers.0.self_attn.q_norm.weight", torch.ones(16), "has no place in this kind of model"),
        ("model.layers.0.self_attn.q_proj.weight_scale_inv", torch.ones(1), "has no place in this kind of model"),
        ("base_model.model.lora_A.weight", torch.ones(1), "has no place in this kind of model"),
        (NAME, torch.ones(64, 96, dtype=torch.int8), "is int8: quantised weights are not supported"),
        (NAME, torch.ones(64, 96).to(torch.float8_e4m3fn), "is float8_e4m3fn: quantised weights are not supported"),
    ],
)
def test_a_tensor_that_would_not_be_used_is_refused(name: str, tensor: torch.Tensor, message: str, whole: Path) -> None:
    save_file(load_file(whole / "model.safetensors") | {name: tensor}, whole / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{name} {message}"):
        load(whole)


def test_tables_that_old_checkpoints_kept_may_be_left_out(whole: Path, fingerprint: str) -> None:
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(load_file(whole / "model.safetensors") | table, whole / "model.safetensors")
    assert load(whole).fingerprint == fingerprint


def test_a_hugging_face_cache_of_symbolic_links_is_a_checkpoint_of_its_repositorys_name(
    shards: Path, tmp_path: Path, fingerprint: str
) -> None:
    snapshot = tmp_path / "models--meta-llama--Llama-3.2-1B/snapshots/0123abc"
    snapshot.mkdir(parents=True)
    for number, path in enumerate(shards.iterdir()):
        blob = snapshot.parent.parent / "blobs" / str(number)
        blob.parent.mkdir(exist_ok=True)
        path.rename(blob)
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    loaded = load(snapshot)
    assert (loaded.fingerprint, loaded.config.name) == (fingerprint, "Llama-3.2-1B")


def test_a_model_is_called_as_its_path_ends(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = whole.rename(tmp_path / "Llama-3.2-1B")
    (tmp_path / "now.v2").symlink_to(path)
    monkeypatch.chdir(path)
    for given, name in {
        str(path): "Llama-3.2-1B",
        f"{path}/": "Llama-3.2-1B",
        f"{path}/.": "Llama-3.2-1B",
        ".": "Llama-3.2-1B",
        "../Llama-3.2-1B": "Llama-3.2-1B",
        str(tmp_path / "now.v2"): "now.v2",
    }.items():
        assert load_model(ModelSpec(given)).config.name == name
    for file, name in {
        "Llama-3.2-1B.Q4_1.gguf": "Llama-3.2-1B.Q4_1",
        "M.v1.GGUF": "M.v1",
        "blob.1.5": "blob.1.5",
    }.items():
        assert load(write_gguf(random_model("llama"), tmp_path / file)).config.name == name


def test_layers_that_guess_further_tokens_may_be_left_out(tmp_path: Path) -> None:
    path = save(random_model("deepseek v3", num_mtp_layers=1), tmp_path)
    fingerprint = load(path).fingerprint
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.ones(3)}, path / "model.safetensors")
    assert load(path).fingerprint == fingerprint
    save_file(tensors | {"model.layers.4.eh_proj.weight": torch.ones(3)}, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.layers\.4\.eh_proj\.weight has no place"):
        load(path)


def test_one_file_of_a_checkpoint_says_to_name_its_directory(whole: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        with pytest.raises(ModelError, match=rf"{name} is one file of a checkpoint; name its directory, {whole}"):
            load(whole / name)


def test_a_directory_of_gguf_files_says_which_file_to_name(tmp_path: Path) -> None:
    (tmp_path / "B.gguf").touch()
    (tmp_path / "A.GGUF").touch()
    with pytest.raises(ModelError, match=r"name the file in it, such as .*/A\.GGUF"):
        load(tmp_path)
