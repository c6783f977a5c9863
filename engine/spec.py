"""What a model is, read from its metadata without torch: shape, limits, tokens that end a text.

Owns ModelSpec and its readers for a GGUF header and for a Hugging Face folder; used by the engine
(to build the model) and by the server (limits, tokenizer, chat template). Never reads weights and
never trusts a file: what is missing or absurd is a SpecError naming the file and the cause.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from engine.family import (
    LLAMA,
    Form,
    family_of_folder,
    family_of_gguf,
    form_of_folder,
    form_of_gguf,
)
from engine.model_files import Fields, GgufHeader, SpecError, read_gguf, read_json
from engine.names import FOLDER_NAMES, Names
from engine.rope import MODEL_LEN_MAX, Rope, YarnScaling, ropes_of_folder, ropes_of_gguf

__all__ = [
    "ModelSpec",
    "SpecError",
    "TokenizerMetadata",
    "read_spec",
    "read_tokenizer_metadata",
]

Item = TypeVar("Item", str, int, float)

CONTROL_TOKEN = 3
END_TEXTS = frozenset(
    {"<|endoftext|>", "<|im_end|>", "<|end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>"}
)
"""Control tokens of a GGUF that end a text whatever its metadata says (llama.cpp's rule)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of a decoder, what it computes beyond a llama, and the facts of its vocabulary.

    names are what its files call its tensors.
    """

    path: str
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    rope: Rope
    norm_eps: float
    tied_head: bool
    model_len: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    parameters: int
    form: Form = LLAMA
    names: Names = FOLDER_NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerMetadata:
    """Where the tokenizer comes from: lists of a GGUF file, or files of a Hugging Face folder.

    model names the GGUF's kind (gpt2 is byte-level BPE, llama SentencePiece's); tokens, merges,
    token_types, pre and what stands last are the GGUF's: a folder's tokenizer.json says all of it.
    """

    kind: Literal["gguf", "hf"]
    model: str
    tokens: tuple[str, ...]
    merges: tuple[str, ...]
    token_types: tuple[int, ...]
    pre: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    add_bos: bool
    folder: str | None
    scores: tuple[float, ...] = ()
    unknown_token: str | None = None
    add_space_prefix: bool = True


def read_spec(path: str) -> ModelSpec:
    """Return the spec of a GGUF file or a Hugging Face folder, or raise SpecError."""
    place = Path(path)
    if place.is_dir():
        return _spec_of_folder(place)
    return _spec_of_gguf(_gguf(place))


def read_tokenizer_metadata(path: str) -> TokenizerMetadata:
    """Return what the server needs to build the model's tokenizer, or raise SpecError."""
    place = Path(path)
    return _tokenizer_of_folder(place) if place.is_dir() else _tokenizer_of_gguf(_gguf(place))


def _gguf(place: Path) -> GgufHeader:
    if not place.exists():
        raise SpecError(f"{place}: no such file or folder")
    if place.suffix == ".safetensors":
        raise SpecError(f"{place}: name the folder that holds it and config.json, not the file")
    return read_gguf(place)


def _checked(spec: ModelSpec) -> ModelSpec:
    """Return the spec if its sizes fit together."""
    if spec.heads % spec.kv_heads:
        raise SpecError(f"{spec.path}: {spec.heads} heads, {spec.kv_heads} KV heads: no multiple")
    if spec.head_dim % 2:
        raise SpecError(f"{spec.path}: head dimension {spec.head_dim} is odd")
    return spec


def _parameters(shape: dict[str, int], form: Form, tied: bool) -> int:
    """Return the number of weights, a tied head counted once."""
    hidden, head_dim = shape["hidden"], shape["head_dim"]
    projected = head_dim * (shape["heads"] + 2 * shape["kv_heads"])
    attention = hidden * (projected + head_dim * shape["heads"])
    layer = attention + 3 * hidden * shape["intermediate"] + 2 * hidden
    layer += projected * form.qkv_bias + hidden * form.output_bias
    layer += 2 * head_dim * form.head_norms + 2 * hidden * form.out_norms
    tables = shape["vocab_size"] * hidden * (1 if tied else 2)
    return tables + shape["layers"] * layer + hidden


# ---- Hugging Face folders


def _spec_of_folder(folder: Path) -> ModelSpec:
    file = folder / "config.json"
    content = read_json(file)
    family = family_of_folder(Fields(file, content))
    fields = Fields(file, {**family.defaults, **content})
    heads = fields.integer("num_attention_heads", 1024)
    hidden = fields.integer("hidden_size", 2**17)
    shape = {
        "layers": fields.integer("num_hidden_layers", 1024),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": fields.integer("num_key_value_heads", 1024, heads),
        "head_dim": fields.integer("head_dim", 1024, hidden // heads),
        "intermediate": fields.integer("intermediate_size", 2**20),
        "vocab_size": fields.integer("vocab_size", 2**22),
    }
    tied = fields.flag("tie_word_embeddings")
    rope, local = ropes_of_folder(fields, base=family.rope_base, local_base=family.local_base)
    form = form_of_folder(fields, family, shape["layers"], local)
    vocab_size = shape["vocab_size"]
    return _checked(
        ModelSpec(
            path=str(folder),
            architecture=family.name,
            **shape,
            rope=rope,
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            tied_head=tied,
            model_len=_model_len_of_folder(fields, rope),
            bos_id=next(iter(fields.ids("bos_token_id", vocab_size)), None),
            eos_ids=_eos_of_folder(folder, fields, vocab_size),
            parameters=_parameters(shape, form, tied),
            form=form,
            names=family.names,
        )
    )


def _model_len_of_folder(fields: Fields, rope: Rope) -> int:
    """Return the positions that the model is made for; a folder with YaRN may state the original.

    (Qwen's instructions for long texts add rope_scaling alone.)
    """
    stated = fields.integer("max_position_embeddings", MODEL_LEN_MAX, 2048)
    if not isinstance(rope.scaling, YarnScaling):
        return stated
    stretched = int(rope.scaling.factor * rope.scaling.original_model_len)
    return max(stated, min(stretched, MODEL_LEN_MAX))


def _eos_of_folder(folder: Path, fields: Fields, vocab_size: int) -> tuple[int, ...]:
    """Return every id that config.json or generation_config.json says ends a text."""
    found = fields.ids("eos_token_id", vocab_size)
    generation = folder / "generation_config.json"
    if generation.exists():
        found = Fields(generation, read_json(generation)).ids("eos_token_id", vocab_size) + found
    return tuple(dict.fromkeys(found))


def _tokenizer_of_folder(folder: Path) -> TokenizerMetadata:
    if not (folder / "tokenizer.json").is_file():
        raise SpecError(f"{folder / 'tokenizer.json'}: no such file")
    path = folder / "tokenizer_config.json"
    fields = Fields(path, read_json(path) if path.exists() else {})

    def token(key: str) -> str | None:
        value = fields.content.get(key)
        return Fields(path, value).text("content") if isinstance(value, dict) else fields.text(key)

    return TokenizerMetadata(
        kind="hf",
        model="",
        tokens=(),
        merges=(),
        token_types=(),
        pre="",
        chat_template=_template_of_folder(folder, fields),
        bos_token=token("bos_token"),
        eos_token=token("eos_token"),
        add_bos=fields.flag("add_bos_token"),
        folder=str(folder),
    )


def _template_of_folder(folder: Path, fields: Fields) -> str | None:
    """Return chat_template.jinja, else tokenizer_config's template; of a named list, 'default'."""
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError(f"{file}: cannot be read: {error}") from error
    template = fields.content.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item for item in template if isinstance(item, dict)}
        return Fields(fields.path, named.get("default", {})).text("template")
    return fields.text("chat_template")


# ---- GGUF files


def _spec_of_gguf(header: GgufHeader) -> ModelSpec:
    fields = Fields(header.path, header.metadata)
    family = family_of_gguf(fields)
    prefix = family.architecture
    heads = fields.integer(f"{prefix}.attention.head_count", 1024)
    hidden = fields.integer(f"{prefix}.embedding_length", 2**17)
    head_dim = fields.integer(f"{prefix}.attention.key_length", 1024, hidden // heads)
    table = header.tensors.get(family.gguf_names.embedding)
    if table is None or len(table.shape) != 2:
        raise fields.fail(f"tensor {family.gguf_names.embedding} is missing")
    shape = {
        "layers": fields.integer(f"{prefix}.block_count", 1024),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": fields.integer(f"{prefix}.attention.head_count_kv", 1024, heads),
        "head_dim": head_dim,
        "intermediate": fields.integer(f"{prefix}.feed_forward_length", 2**20),
        "vocab_size": table.shape[0],
    }
    _refuse_foreign_gguf(fields, prefix, head_dim)
    tied = family.gguf_names.head not in header.tensors
    rope, local = ropes_of_gguf(fields, prefix, base=family.rope_base, local_base=family.local_base)
    form = form_of_gguf(header, fields, family, shape, local)
    return _checked(
        ModelSpec(
            path=str(header.path),
            architecture=family.name,
            **shape,
            rope=rope,
            norm_eps=fields.number(f"{prefix}.attention.layer_norm_rms_epsilon"),
            tied_head=tied,
            model_len=fields.integer(f"{prefix}.context_length", MODEL_LEN_MAX),
            bos_id=next(iter(fields.ids("tokenizer.ggml.bos_token_id", table.shape[0])), None),
            eos_ids=_eos_of_gguf(fields, table.shape[0]),
            parameters=_parameters(shape, form, tied),
            form=form,
            names=family.gguf_names,
        )
    )


def _refuse_foreign_gguf(fields: Fields, prefix: str, head_dim: int) -> None:
    """Raise for what would load as another decoder and compute something else."""
    if fields.integer(f"{prefix}.expert_count", 2**16, 0, low=0):
        raise fields.fail("mixtures of experts are not supported")
    if fields.integer("split.count", 2**16, 1, low=0) > 1:
        raise fields.fail("a part of a split GGUF is not supported; merge the parts into one file")
    for key in (f"{prefix}.rope.dimension_count", f"{prefix}.attention.value_length"):
        if fields.integer(key, 1024, head_dim) != head_dim:
            raise fields.fail(f"{key} other than the head dimension {head_dim} is not supported")


def _eos_of_gguf(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    """Return the ids named by metadata, then the control tokens that end a text by name."""
    names = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    found = [item for name in names for item in fields.ids(name, vocab_size)]
    tokens = _list(fields, "tokenizer.ggml.tokens", str)
    types = _list(fields, "tokenizer.ggml.token_type", int)
    for item, (token, kind) in enumerate(zip(tokens, types, strict=False)):
        if kind == CONTROL_TOKEN and token in END_TEXTS and item < vocab_size:
            found.append(item)
    return tuple(dict.fromkeys(found))


def _tokenizer_of_gguf(header: GgufHeader) -> TokenizerMetadata:
    fields = Fields(header.path, header.metadata)
    tokens = _list(fields, "tokenizer.ggml.tokens", str)
    if not tokens:
        raise fields.fail("tokenizer.ggml.tokens is missing")

    def token(key: str) -> str | None:
        return next((tokens[item] for item in fields.ids(key, len(tokens))), None)

    return TokenizerMetadata(
        kind="gguf",
        model=fields.text("tokenizer.ggml.model") or "",
        tokens=tokens,
        merges=_list(fields, "tokenizer.ggml.merges", str),
        token_types=_list(fields, "tokenizer.ggml.token_type", int),
        pre=fields.text("tokenizer.ggml.pre") or "",
        chat_template=fields.text("tokenizer.chat_template"),
        bos_token=token("tokenizer.ggml.bos_token_id"),
        eos_token=token("tokenizer.ggml.eos_token_id"),
        add_bos=fields.flag("tokenizer.ggml.add_bos_token"),
        folder=None,
        scores=_list(fields, "tokenizer.ggml.scores", float),
        unknown_token=token("tokenizer.ggml.unknown_token_id"),
        add_space_prefix=fields.content.get("tokenizer.ggml.add_space_prefix") is not False,
    )


def _list(fields: Fields, key: str, kind: type[Item]) -> tuple[Item, ...]:
    value = fields.content.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise fields.fail(f"{key} is not a list of {kind.__name__}")
    return tuple(value)
