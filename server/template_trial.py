"""A model's chat template tried in a process of its own, before the server takes it in.

Owns the limits of that process and the verdict; served_model.py starts one at each start, beside
the building of the tokenizer. A template comes with a model that nobody vouches for, and an
expression like 'a' * 10**10 costs its gigabytes while it is compiled. Must never render one here.
"""

import contextlib
import json
import resource
import subprocess
import sys
from collections.abc import Mapping

import jinja2

from server.chat_template import ChatTemplate
from server.errors import ApiError

MEMORY_BYTES = 2**30
CPU_S = 4
PATIENCE_S = 30.0
SOURCE_CHARS_MAX = 2**20
TOO_MUCH = "it takes too much memory or time for one short message"
MESSAGES = ({"role": "user", "content": "hello"},)


class Trial:
    """A trial under way; `verdict` is empty when the template may be used, else says why not."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self._too_long = len(source) > SOURCE_CHARS_MAX
        self._given = json.dumps([source, dict(tokens)])
        # Nothing of the folder that the operator stands in can be imported: -P.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "server.template_trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def verdict(self) -> str:
        """Wait for the end of the trial, and say what is against the template."""
        with self._process:
            try:
                told, _ = self._process.communicate(
                    "" if self._too_long else self._given, PATIENCE_S
                )
            except subprocess.TimeoutExpired:
                self._process.kill()
                return TOO_MUCH
        if self._too_long:
            return f"it is longer than {SOURCE_CHARS_MAX} characters"
        if self._process.returncode != 0:
            return TOO_MUCH
        return told.strip()


def main() -> None:
    """Be the trial: read the template, use it once, print what is wrong with its syntax."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    source, tokens = json.load(sys.stdin)
    try:
        template = ChatTemplate(source, tokens)
    except jinja2.TemplateSyntaxError as error:
        sys.stdout.write(f"line {error.lineno}: {error.message}")
        return
    # A template may refuse this message: then it works, and says so to whoever sends such a one.
    with contextlib.suppress(ApiError):
        template.render(MESSAGES)


if __name__ == "__main__":
    main()
