"""A chat made into one prompt by the model's own Jinja template.

Owns the sandboxed environment, which has what transformers gives templates; engine/spec.py finds
the source, server/cli.py compiles it once, request handlers render. Must never let a template or
a message raise anything but ApiError, and never makes up a template: a model without one serves
completions only.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from server.errors import ApiError, invalid

Message = Mapping[str, Any]

TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template can raise over messages it did not expect."""


class GenerationTag(jinja2.ext.Extension):
    """The block `{% generation %}` marks what training counts as the answer; here it is plain."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own way of naming them)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the statements inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which would change the prompt.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class ChatTemplate:
    """One compiled template; `special_tokens` are the strings it may ask for, such as bos_token."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile `source`; raises jinja2.TemplateSyntaxError naming the line."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message]) -> str:
        """Return the prompt, ready for the assistant's turn; ApiError 400 when it refuses them."""
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except TEMPLATE_FAULTS as error:
            raise invalid("messages", f"the model's chat template refused: {error}") from error


def no_template(reason: str) -> ApiError:
    """Return the 400 of a model that cannot chat."""
    return invalid(
        None,
        f"this model has no usable chat template ({reason}); /v1/completions takes plain prompts",
        code="no_chat_template",
    )
