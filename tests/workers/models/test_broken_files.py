"""Model files that are broken or hostile: one sentence with the file and the place, little memory, no time."""

import json
import os
import random
import shutil
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from tests.workers.models.checkpoints import random_model, save, write_gguf
from workers.models import ModelError, ModelSpec, load_model

U64, STRING, ARRAY = 10, 8, 9
LARGE = 1 << 30


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + items


def gguf(*pairs: bytes, tensors: int = 0, count: int | None = None, version: int = 3) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, tensors, len(pairs) if count is None else count) + b"".join(pairs)


def tensor(name: str, *shape: int, kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


HEADERS: dict[str, tuple[bytes, str]] = {
    "nested arrays": (gguf(pair("k", ARRAY, array(ARRAY, 1) * 100_000)), "an array of arrays"),
    "an array of arrays": (gguf(pair("k", ARRAY, array(ARRAY, 2, array(0, 1, b"x") * 2))), "an array of arrays"),
    "a long array": (gguf(pair("k", ARRAY, array(U64, 1 << 60))), "an array runs past the end"),
    "an array of a long file": (gguf(pair("k", ARRAY, array(U64, LARGE // 2))), "smaller than requested|past the end"),
    "an array of an unknown type": (gguf(pair("k", ARRAY, array(77, 1))), "not a readable GGUF file"),
    "an unknown type": (gguf(pair("k", 77, b"")), "not a readable GGUF file"),
    "many strings": (gguf(pair("k", ARRAY, array(STRING, 100_000_000))), "more than 2000000 strings|past the end"),
    "a long string": (gguf(pair("k", STRING, struct.pack("<Q", 900_000_000))), "more than 64 MiB of text|past the end"),
    "a string beyond the end": (gguf(pair("k", STRING, struct.pack("<Q", 1 << 62))), "a string runs past the end"),
    "a key that is no text": (gguf(struct.pack("<Q", 2) + b"\xff\xfe" + bytes(12)), "codec can't decode"),
    "many keys": (gguf(count=1 << 40), "1099511627776 keys"),
    "a key twice": (gguf(pair("k", 0, b"1"), pair("k", 0, b"1")), "k twice"),
    "many tensors": (gguf(tensors=1 << 40), "1099511627776 tensors"),
    "a tensor twice": (gguf(tensor("t", 4), tensor("t", 4), tensors=2, count=0), "tensor t twice"),
    "a tensor of many axes": (gguf(text("t") + struct.pack("<I", 1 << 31), tensors=1, count=0), "2147483648 axes"),
    "a tensor of an unknown type": (gguf(tensor("t", 4, kind=999), tensors=1, count=0), "not a readable GGUF file"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "version 1": (gguf(version=1), "version 1"),
    "alignment 0": (gguf(pair("general.alignment", 4, bytes(4))), "general.alignment 0"),
    "an alignment that is a text": (gguf(pair("general.alignment", STRING, text("x"))), "general.alignment x"),
    "nothing": (b"", "not a readable GGUF file"),
    "four bytes": (b"GGUF", "not a readable GGUF file"),
}


def assert_refused(path: Path, message: str, place: str) -> None:
    """One sentence that names the file, below 300 MB and 2 s of CPU time."""
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(ModelError, match=message) as error:
            load_model(ModelSpec(str(path)))
        taken, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert place in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600
    assert taken < 2
    assert peak < 300_000_000


@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.parametrize("length", [0, LARGE])
def test_a_gguf_header_that_asks_for_too_much_is_one_sentence(name: str, length: int, tmp_path: Path) -> None:
    header, message = HEADERS[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(header)
    if length:
        os.truncate(path, length)  # zeros that take no room on the disk
        message += "|GGUF"
    assert_refused(path, message if not length else "m.gguf", "m.gguf")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (".block_count", 1_000_000_000),
        (".context_length", 2_000_000_000),
        (".embedding_length", 2_000_000_000),
        (".feed_forward_length", 2_000_000_000),
        (".attention.head_count", 0),
        (".attention.head_count", 3),
        (".attention.head_count_kv", 0),
        (".attention.key_length", 7),
        (".block_count", "three"),
        (".rope.freq_base", "x"),
        (".rope.freq_base", [1.0, 2.0]),
        (".attention.layer_norm_rms_epsilon", float("nan")),
        (".context_length", -1),
        ("tokenizer.ggml.merges", [1, 2]),
        ("tokenizer.ggml.merges", "a b"),
        ("tokenizer.ggml.tokens", [1, 2, 3]),
        ("tokenizer.ggml.tokens", "abc"),
        ("tokenizer.ggml.token_type", ["x"] * 256),
        ("tokenizer.chat_template", 7),
        ("tokenizer.ggml.pre", 7),
        ("general.architecture", 7),
        ("split.count", 3),
        ("split.count", "x"),
    ],
)
def test_a_gguf_value_that_makes_no_sense_is_one_sentence(key: str, value: object, tmp_path: Path) -> None:
    path = write_gguf(random_model("llama"), tmp_path / "m.gguf", keys={key: value})
    assert_refused(path, "m", str(path) if key.startswith("split") else "m")


@pytest.mark.parametrize("shape", [(1 << 62,), (1 << 40, 1 << 40), (0, 64), (3,)])
@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q2_K])
def test_a_gguf_tensor_of_an_impossible_shape_is_one_sentence(
    shape: tuple[int, ...], kind: GGMLQuantizationType, tmp_path: Path
) -> None:
    path = write_gguf(random_model("llama"), tmp_path / "m.gguf")
    whole = path.read_bytes()
    name = text("output_norm.weight")
    at = whole.index(name) + len(name)
    new = struct.pack(f"<I{len(shape)}Q", len(shape), *shape) + struct.pack("<I", kind)
    path.write_bytes(whole[:at] + new + whole[at + 16 :])
    assert_refused(path, "m", "m")


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model("llama"), tmp_path_factory.mktemp("origin"))


def write(name: str, content: bytes, length: int = 0) -> Callable[[Path], None]:
    def harm(directory: Path) -> None:
        (directory / name).write_bytes(content)
        if length:
            os.truncate(directory / name, length)

    return harm


DEEP = b"[" * 1_000_000
HARMS: dict[str, tuple[Callable[[Path], None], str]] = {
    "config.json, deep": (write("config.json", DEEP), "config.json is not valid JSON"),
    "config.json, long": (write("config.json", b"{", LARGE), "config.json is not valid JSON .it is larger than 4 MiB"),
    "config.json, a list": (write("config.json", b"[1]"), "config.json is not a JSON object"),
    "config.json, no text": (write("config.json", b"\xff\xfe"), "config.json is not valid JSON"),
    "config.json, long number": (write("config.json", b'{"a": ' + b"9" * 100_000 + b"}"), "config.json is not valid"),
    "generation_config.json": (write("generation_config.json", DEEP), "generation_config.json is not valid JSON"),
    "tokenizer_config.json": (write("tokenizer_config.json", DEEP), "tokenizer_config.json is not valid JSON"),
    "tokenizer.json, deep": (write("tokenizer.json", DEEP), "tokenizer.json is not a readable tokenizer"),
    "tokenizer.json, long": (write("tokenizer.json", b"{", LARGE), "tokenizer.json is not a readable tokenizer"),
    "tokenizer.json, empty": (write("tokenizer.json", b"{}"), "tokenizer.json is not a readable tokenizer"),
    "chat_template.jinja, long": (write("chat_template.jinja", b"", LARGE), "a chat template cannot be read"),
    "added tokens": (write("tokenizer_config.json", b'{"added_tokens_decoder": {"x": 1}}'), "contradicts itself"),
    "index, deep": (write("model.safetensors.index.json", DEEP), "is not a readable index"),
    "index, long": (write("model.safetensors.index.json", b"{", LARGE), "is not a readable index"),
    "safetensors, header of all": (write("model.safetensors", b"\xff" * 7 + b"\x0f", LARGE), "not a readable safet"),
    "safetensors, deep header": (
        write("model.safetensors", struct.pack("<Q", len(DEEP)) + DEEP),
        "not a readable safetensors",
    ),
    "safetensors, zeros": (write("model.safetensors", b"", LARGE), "not a readable safetensors"),
}


@pytest.mark.parametrize("name", HARMS)
def test_a_broken_file_of_a_checkpoint_is_one_sentence(name: str, origin: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(origin, tmp_path / "m"))
    harm, message = HARMS[name]
    harm(directory)
    assert_refused(directory, message, str(directory))


def test_what_is_neither_file_nor_directory_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    for path in (tmp_path / "m.gguf", Path("/dev/zero")):
        with pytest.raises(ModelError, match="is neither a directory nor a file"):
            load_model(ModelSpec(str(path)))


# Models in several parts


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    write_gguf(random_model("llama"), tmp_path / "Llama-3.2-1B.gguf", split=12)
    found = sorted(tmp_path.glob("*-of-*.gguf"))
    assert len(found) > 2
    return found


def test_all_parts_of_a_split_gguf_are_loaded(parts: list[Path], tmp_path: Path) -> None:
    whole = load_model(ModelSpec(str(write_gguf(random_model("llama"), tmp_path / "Llama-3.2-1B.gguf"))))
    loaded = load_model(ModelSpec(str(parts[0])))
    assert (loaded.fingerprint, loaded.config.name) == (whole.fingerprint, "Llama-3.2-1B")


def test_parts_that_are_missing_or_misplaced_are_named(parts: list[Path]) -> None:
    with pytest.raises(ModelError, match=r"is part 2 of a model in .* parts; name the first"):
        load_model(ModelSpec(str(parts[1])))
    third = parts[2].read_bytes()
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(ModelError, match=rf"{parts[2].name}: is not part 3"):
        load_model(ModelSpec(str(parts[0])))
    parts[2].unlink()
    with pytest.raises(ModelError, match=rf"part 3 of \d is missing; put {parts[2].name} beside it"):
        load_model(ModelSpec(str(parts[0])))
    parts[2].write_bytes(third)
    renamed = parts[0].rename(parts[0].with_name("m.gguf"))
    with pytest.raises(ModelError, match="name the first, whose name ends in -00001-of-"):
        load_model(ModelSpec(str(renamed)))


FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


def test_files_with_wrong_bytes_are_one_sentence_or_still_a_model(origin: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(origin, tmp_path / "m"))
    about = {"chat_template": "{{ bos_token }}{{ messages[0].content }}", "bos_token": "a", "added_tokens_decoder": {}}
    (directory / "tokenizer_config.json").write_text(json.dumps(about))
    whole = {name: (directory / name).read_bytes() for name in FILES}
    chance = random.Random(1)
    told = []
    for _ in range(250):
        name = chance.choice(FILES)
        damaged = bytearray(whole[name])
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(min(len(damaged), 3000))] = chance.choice(b'0123456789-.{}[]":,ente\x00\xff')
        (directory / name).write_bytes(damaged)
        try:
            load_model(ModelSpec(str(directory)))
        except ModelError as error:
            told.append(str(error))
        (directory / name).write_bytes(whole[name])
    assert len(told) > 100
    assert not [sentence for sentence in told if "\n" in sentence]
