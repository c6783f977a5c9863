"""What a model is, read from files nobody vouches for: right when sound, one line when not.

Owns the tests of engine/spec.py and engine/model_files.py on real small files: the tiny model as a
Hugging Face folder and as GGUF, and the same files damaged in every way that was met in the field.
"""

import json
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.model_files import SpecError, read_gguf
from engine.rope import Llama3Scaling, Rope
from engine.spec import read_spec, read_tokenizer_metadata
from tests import tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.write(tmp_path / "model")


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    return tiny.write_gguf(tmp_path / "tiny.gguf")


def change(file: Path, **values: object) -> None:
    """Set keys of a JSON file; None removes one."""
    content = json.loads(file.read_text()) | values
    tiny.write_json(file, {key: value for key, value in content.items() if value is not None})


def refusal(path: Path) -> str:
    """Return the one line with which a model is refused."""
    with pytest.raises(SpecError) as caught:
        read_spec(str(path))
    message = str(caught.value)
    assert "\n" not in message
    assert path.name in message
    return message


# ---- sound files


def test_a_folder_and_a_gguf_of_one_model_say_the_same(folder: Path, gguf_file: Path) -> None:
    spec = read_spec(str(folder))
    assert (spec.layers, spec.hidden, spec.heads, spec.kv_heads, spec.head_dim) == (3, 64, 4, 2, 16)
    assert (spec.intermediate, spec.vocab_size, spec.model_len) == (96, 320, 2048)
    assert (spec.rope, spec.tied_head) == (Rope(base=10000.0), True)
    assert (spec.bos_id, spec.eos_ids) == (1, (0, 2))
    assert spec.parameters == sum(weight.size for weight in tiny.tensors().values())
    other = read_spec(str(gguf_file))
    assert other.norm_eps == pytest.approx(spec.norm_eps)
    assert sorted(other.eos_ids) == sorted(spec.eos_ids)
    same: dict[str, Any] = {"path": spec.path, "norm_eps": spec.norm_eps, "eos_ids": spec.eos_ids}
    same["names"] = spec.names
    assert replace(other, **same) == spec


def test_an_untied_head_is_counted_and_told(tmp_path: Path) -> None:
    shape = tiny.Shape(tied=False)
    for path in (
        tiny.write(tmp_path / "model", shape=shape),
        tiny.write_gguf(tmp_path / "tiny.gguf", shape=shape),
    ):
        spec = read_spec(str(path))
        assert not spec.tied_head
        assert spec.parameters == sum(weight.size for weight in tiny.tensors(0, shape).values())


def test_the_demo_model_is_read_in_a_blink(demo_model: Path) -> None:
    begun = time.process_time()
    spec = read_spec(str(demo_model))
    assert time.process_time() - begun < 1.5
    assert (spec.layers, spec.hidden, spec.heads, spec.kv_heads) == (30, 576, 9, 3)
    assert (spec.vocab_size, spec.model_len, spec.rope.base) == (49152, 8192, 100000.0)
    assert spec.tied_head
    assert spec.parameters == 134_515_008
    assert set(spec.eos_ids) == {0, 2}, "<|im_end|> ends a chat, <|endoftext|> a text"
    tokenizer = read_tokenizer_metadata(str(demo_model))
    assert (tokenizer.model, tokenizer.pre, tokenizer.add_bos) == ("gpt2", "smollm", False)
    assert (len(tokenizer.tokens), len(tokenizer.merges)) == (49152, 48900)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert "<|im_start|>" in (tokenizer.chat_template or "")


def test_specs_are_read_without_torch_and_gguf() -> None:
    code = "import sys, engine.spec; sys.exit('torch' in sys.modules or 'gguf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_defaults_are_those_of_transformers(folder: Path) -> None:
    change(
        folder / "config.json",
        head_dim=None,
        num_key_value_heads=None,
        rope_parameters=None,
        rms_norm_eps=None,
        tie_word_embeddings=None,
    )
    spec = read_spec(str(folder))
    assert (spec.head_dim, spec.kv_heads) == (16, 4)
    assert (spec.rope.base, spec.norm_eps, spec.tied_head) == (10000.0, 1e-6, False)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5e5, "rope_parameters": None},
        {"rope_parameters": {"rope_theta": 5e5}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 5e5, "rope_parameters": None, "rope_scaling": None},
    ],
)
def test_the_rope_base_of_old_and_new_folders(folder: Path, config: dict[str, object]) -> None:
    change(folder / "config.json", **config)
    assert read_spec(str(folder)).rope == Rope(base=5e5)


def test_llama3_scaling_is_read_from_either_place(folder: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    expected = Llama3Scaling(
        factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_model_len=512
    )
    change(folder / "config.json", rope_parameters={"rope_theta": 1e4, **scaling})
    assert read_spec(str(folder)).rope.scaling == expected
    change(folder / "config.json", rope_parameters=None, rope_theta=1e4, rope_scaling=scaling)
    assert read_spec(str(folder)).rope.scaling == expected


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [([0, 2], 2, (0, 2)), (None, [2, 5], (2, 5)), (7, None, (7,)), ([7], 2, (7, 2))],
)
def test_every_eos_id_of_both_files_counts(
    folder: Path, generation: object, config: object, expected: tuple[int, ...]
) -> None:
    change(folder / "generation_config.json", eos_token_id=generation)
    change(folder / "config.json", eos_token_id=config)
    assert read_spec(str(folder)).eos_ids == expected


def test_a_folder_without_generation_config_is_sound(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert read_spec(str(folder)).eos_ids == (2,)


# ---- tokenizers


def test_the_tokenizer_of_a_gguf_is_its_lists(gguf_file: Path) -> None:
    found = read_tokenizer_metadata(str(gguf_file))
    model = json.loads(tiny.tokenizer().to_str())["model"]
    assert {token: index for index, token in enumerate(found.tokens)} == model["vocab"]
    assert [tuple(merge.split(" ")) for merge in found.merges] == list(map(tuple, model["merges"]))
    assert found.token_types[:4] == (3, 3, 3, 1)
    assert (found.kind, found.model, found.pre, found.folder) == ("gguf", "gpt2", "gpt-2", None)
    assert (found.bos_token, found.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert found.chat_template == tiny.CHAT_TEMPLATE


def test_the_tokenizer_of_a_folder_is_its_files(folder: Path) -> None:
    found = read_tokenizer_metadata(str(folder))
    assert (found.kind, found.folder, found.tokens) == ("hf", str(folder), ())
    assert (found.bos_token, found.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (found.chat_template, found.add_bos) == (tiny.CHAT_TEMPLATE, False)


def test_a_template_file_stands_above_the_configs_template(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    change(file, chat_template="inner", bos_token={"content": "<s>"}, add_bos_token=True)
    assert read_tokenizer_metadata(str(folder)).chat_template == tiny.CHAT_TEMPLATE
    (folder / "chat_template.jinja").unlink()
    found = read_tokenizer_metadata(str(folder))
    assert (found.chat_template, found.bos_token, found.add_bos) == ("inner", "<s>", True)
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    change(file, chat_template=named)
    assert read_tokenizer_metadata(str(folder)).chat_template == "d"
    change(file, chat_template=named[:1])
    assert read_tokenizer_metadata(str(folder)).chat_template is None


def test_a_folder_without_tokenizer_is_refused_by_name(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(SpecError, match=r"tokenizer\.json: no such file"):
        read_tokenizer_metadata(str(folder))


# ---- files that are something else


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        ({"model_type": "qwen2_moe"}, "model_type is 'qwen2_moe'; supported are llama, mistral,"),
        ({"model_type": None}, "model_type is None"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "qwen2", "attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 4}}, "'longrope'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": "default"}, "rope_parameters"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is not a whole number"),
        ({"hidden_size": True}, "hidden_size is not a whole number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"head_dim": 15}, "odd"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is not a number"),
        ({"eos_token_id": 320}, "eos_token_id holds 320"),
        ({"eos_token_id": ["a"]}, "eos_token_id holds 'a'"),
        ({"bos_token_id": -1}, "bos_token_id holds -1"),
    ],
)
def test_a_config_that_means_another_model_is_refused(
    folder: Path, values: dict[str, object], cause: str
) -> None:
    change(folder / "config.json", **values)
    with pytest.raises(SpecError) as caught:
        read_spec(str(folder))
    assert str(folder / "config.json") in str(caught.value) or str(folder) in str(caught.value)
    assert cause in str(caught.value)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "the file is empty"),
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ("[" * 100_000, "not valid JSON"),
        ('{"hidden_size": 1e999}', "model_type"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "Git LFS pointer"),
    ],
)
def test_a_config_that_is_no_config_is_refused(folder: Path, text: str, cause: str) -> None:
    (folder / "config.json").write_text(text)
    assert cause in refusal(folder / "config.json" if not text else folder)


def test_what_is_not_there_is_refused(tmp_path: Path, folder: Path) -> None:
    assert "no such file" in refusal(tmp_path / "nowhere")
    assert "name the folder" in refusal(folder / "model.safetensors")
    (folder / "config.json").unlink()
    assert "config.json: cannot be read: No such file" in refusal(folder)


def set_metadata(file: Path, key: str, old: bytes, new: bytes) -> None:
    """Overwrite the value of a GGUF key, whose type number stands between them."""
    raw = file.read_bytes()
    place = raw.index(key.encode()) + len(key) + 4
    assert raw[place : place + len(old)] == old
    assert len(old) == len(new)
    file.write_bytes(raw[:place] + new + raw[place + len(old) :])


def test_a_gguf_of_another_architecture_is_refused(gguf_file: Path) -> None:
    set_metadata(
        gguf_file,
        "general.architecture",
        struct.pack("<Q", 5) + b"llama",
        b"\5" + bytes(7) + b"gemma",
    )
    assert "architecture is 'gemma'" in refusal(gguf_file)


def test_a_gguf_with_partial_rope_is_refused(gguf_file: Path) -> None:
    set_metadata(
        gguf_file, "llama.rope.dimension_count", struct.pack("<I", 16), struct.pack("<I", 8)
    )
    assert "llama.rope.dimension_count" in refusal(gguf_file)


# ---- damaged GGUF files


def header(*, tensors: int = 0, entries: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + rest


def text(value: bytes, size: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if size is None else size) + value


def tensor(name: bytes, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return (
        text(name)
        + struct.pack("<I", len(dims))
        + struct.pack(f"<{len(dims)}Q", *dims)
        + struct.pack("<IQ", kind, offset)
    )


@pytest.mark.parametrize(
    ("raw", "cause"),
    [
        (b"", "the file is empty"),
        (b"GG", "cut short"),
        (b"PK\3\4" + bytes(40), "not a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
        (header(version=1), "version 1"),
        (header(version=3 << 24), "version"),
        (header(tensors=2**63), "tensors"),
        (header(entries=2**62), "metadata entries"),
        (header(entries=3), "cut short"),
        (header(entries=1, rest=text(b"k", 2**61)), "bytes of a key"),
        (header(entries=1, rest=text(b"\xff\xfe") + bytes(8)), "not UTF-8"),
        (header(entries=1, rest=text(b"k") + struct.pack("<IQ", 8, 2**60)), "bytes of text"),
        (header(entries=1, rest=text(b"k") + struct.pack("<I", 99)), "unknown value type 99"),
        (header(entries=1, rest=text(b"k") + struct.pack("<IIQ", 9, 4, 2**40)), "values in a list"),
        (header(entries=1, rest=text(b"k") + struct.pack("<IIQ", 9, 8, 2**40)), "texts in a list"),
        (
            header(entries=1, rest=text(b"k") + struct.pack("<IIQ", 9, 9, 1)),
            "lists of value type 9",
        ),
        (header(entries=1, rest=text(b"k") + struct.pack("<IIQ", 9, 4, 2**20)), "cut short"),
        (header(tensors=1, rest=tensor(b"t", (1,) * 9)), "9 dimensions"),
        (header(tensors=1, rest=tensor(b"t", (2**60, 2))), "values in a row"),
        (header(tensors=1, rest=tensor(b"t", (2**39, 2**39))), "cut short: tensor 't'"),
        (header(tensors=1, rest=tensor(b"t", (33,), kind=3)), "shape [33]"),
        (header(tensors=1, rest=tensor(b"t", (0,))), "shape [0]"),
        (header(tensors=1, rest=tensor(b"t", (4,), kind=77)), "type 77"),
        (header(tensors=1, rest=tensor(b"t", (4,), offset=2**62)), "cut short: tensor 't'"),
        (header(tensors=2, rest=tensor(b"t", (1,)) * 2 + bytes(99)), "listed twice"),
        (
            header(
                entries=1,
                rest=text(b"general.alignment") + struct.pack("<II", 4, 0) + bytes(64),
            ),
            "alignment 0",
        ),
    ],
)
def test_an_absurd_gguf_is_refused_at_once(tmp_path: Path, raw: bytes, cause: str) -> None:
    file = tmp_path / "absurd.gguf"
    file.write_bytes(raw)
    begun = time.process_time()
    message = refusal(file)
    assert cause in message
    assert time.process_time() - begun < 1


def test_a_gguf_cut_anywhere_is_refused(gguf_file: Path) -> None:
    raw = gguf_file.read_bytes()
    assert len(raw) > 100_000
    for size in range(1, len(raw), 991):
        gguf_file.write_bytes(raw[:size])
        refusal(gguf_file)
    gguf_file.write_bytes(raw)
    read_spec(str(gguf_file))


def test_damaged_headers_never_raise_anything_else(gguf_file: Path) -> None:
    raw = gguf_file.read_bytes()
    length = min(item.offset for item in read_gguf(gguf_file).tensors.values())
    draw = random.Random(0)
    refused = 0
    for _ in range(400):
        damaged = bytearray(raw)
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(length)
            damaged[place : place + 8] = draw.randbytes(draw.choice((1, 4, 8)))
        gguf_file.write_bytes(damaged)
        for read in (read_spec, read_tokenizer_metadata):
            said = outcome(read, gguf_file)
            refused += said != ""
            assert "\n" not in said
            assert len(said) < 400
    assert refused > 100


def outcome(read: Callable[[str], Any], path: Path) -> str:
    """Return what a refusal says, or nothing when the file was read."""
    try:
        read(str(path))
    except SpecError as error:
        return str(error)
    return ""
