"""What a request handler may use: the server's parts, put together once by server/cli.py.

Owns Context and the two look-ups every handler needs. Handlers get it as app.state.context. Frozen:
parts change inside themselves, each by its own one writer, but never which parts there are.
"""

from dataclasses import dataclass

from starlette.requests import Request

from engine.spec import ModelSpec
from server.clock import Clock
from server.comparisons import Comparisons
from server.config import ServerConfig
from server.engine_client import EngineClient
from server.explainer import Explainer
from server.gate import Checks
from server.generation import Generations
from server.metering import Refusals
from server.prompts import Prompts
from server.template_process import TemplateProcess
from server.tokenizer import Tokenizer
from server.traffic import Traffic
from server.watchdog import Watchdog
from telemetry.bus import Bus
from telemetry.case_files import CaseFiles
from telemetry.history import History
from telemetry.metrics import Metrics
from telemetry.recorder import Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The parts of one running server.

    `model_names` are the names a client may ask for, the served one first. `template` is None for
    a model that cannot chat, and `template_fault` then says why; `prompts` unless they are shown.
    """

    config: ServerConfig
    clock: Clock
    bus: Bus
    history: History
    metrics: Metrics
    refusals: Refusals
    recorder: Recorder
    case_files: CaseFiles
    comparisons: Comparisons
    explainer: Explainer
    spec: ModelSpec
    engine: EngineClient
    watchdog: Watchdog
    tokenizer: Tokenizer
    template: TemplateProcess | None
    template_fault: str
    generations: Generations
    prompts: Prompts | None
    traffic: Traffic
    checks: Checks
    model_names: tuple[str, ...]

    @property
    def model(self) -> str:
        """Return the served model name."""
        return self.model_names[0]


def context_of(request: Request) -> Context:
    """Return the server's parts."""
    context: Context = request.app.state.context
    return context
