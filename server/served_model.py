"""What is known of a model before any engine runs: its spec, tokenizer, template and names.

Owns the reading of a model on the server's side; server/cli.py calls `load_model` once at start,
after the port is taken. Whatever can be wrong with files that nobody vouches for is said here, in
one line, unless it takes the reading of every weight. Must never load torch.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from engine.spec import ModelSpec, TokenizerMetadata, read_spec, read_tokenizer_metadata
from engine.tensors import check_tensors
from server.config import ServerConfig
from server.demo import fetch_demo_model
from server.template_process import TemplateProcess
from server.tokenizer import Tokenizer, build_tokenizer
from server.tokenizer_trial import try_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model as the server knows it.

    `names` are those that clients may ask for, the served one first. `template` is None for a model
    that cannot chat, and `template_fault` then says why.
    """

    names: tuple[str, ...]
    spec: ModelSpec
    tokenizer: Tokenizer
    template: TemplateProcess | None
    template_fault: str


def load_model(config: ServerConfig) -> Model:
    """Return the model's metadata and tokenizer; raises SpecError or DemoError."""
    log = logging.getLogger("iterscope")
    asked = config.engine.model
    path = str(fetch_demo_model(log.info)) if asked == "demo" else asked
    spec = read_spec(path)
    check_tensors(spec)
    metadata = read_tokenizer_metadata(path)
    tokens = _special_tokens(metadata)
    source = metadata.chat_template
    template = TemplateProcess(source, tokens) if source is not None else None
    try:
        if metadata.kind != "gguf":
            try_tokenizer(path)
        tokenizer = build_tokenizer(metadata)
    except BaseException:
        if template is not None:
            template.close()
        raise
    fault = template.verdict() if template else "it has none"
    own = Path(path).resolve().name.removesuffix(".gguf")
    return Model(
        names=tuple(dict.fromkeys((config.served_model_name or own, asked))),
        spec=spec,
        tokenizer=tokenizer,
        template=None if fault else template,
        template_fault=fault,
    )


def _special_tokens(metadata: TokenizerMetadata) -> dict[str, str]:
    """Return the strings that a template may ask for by name."""
    named = {"bos_token": metadata.bos_token, "eos_token": metadata.eos_token}
    return {name: token for name, token in named.items() if token is not None}
