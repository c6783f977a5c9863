"""Log-probabilities, penalties, biases and echo over HTTP: whole, streamed, and what must not leak.

GIVEN a real server of the tiny model with prefix caching and small steps, WHEN the openai client
asks for scores, THEN they are transformers' own, streams join to the whole answer, text and tokens
agree character by character, and every number is finite JSON.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from tokenizers import Tokenizer as Backend
from transformers import LlamaForCausalLM

from engine.messages import Delta, SamplingParams, TokenLogprobs, joined
from server.choice import Choice
from server.echo import Echo
from server.sequence import Sequence, Submission
from server.tokenizer import Tokenizer
from tests import tiny
from tests.api import HELLO, complete, events, post
from tests.servers import Server, serving

PROMPT = "The scheduler decides again: 東京は 👩‍👩‍👧 früh"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Server]:
    flags = ["--served-model-name", "tiny", "--max-num-batched-tokens", "24"]
    flags += ["--max-num-seqs", "8", "--max-model-len", "256", "--enable-prefix-caching"]
    flags += ["--dtype", "f32"]  # the oracle's
    with serving(tmp_path_factory.mktemp("logprobs"), model, *flags) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def truth(model: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)


@torch.inference_mode()
def scores_of(truth: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    """Return log_softmax at every position."""
    found: torch.Tensor = truth(torch.tensor([ids])).logits[0].log_softmax(-1)
    return found


def assert_finite(value: Any) -> None:
    """Fail for NaN, infinities and numbers out of all bounds anywhere in a body."""
    text = json.dumps(value, allow_nan=False)
    assert "Infinity" not in text


# ---- completions


def test_a_scored_prompt_and_its_answer_are_the_oracles(
    server: Server, truth: LlamaForCausalLM
) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 6, "logprobs": 4, "echo": True}
    answers = [complete(server, asked) for _ in range(3)]
    choice = answers[0]["choices"][0]
    assert all(answer["choices"] == answers[0]["choices"] for answer in answers[1:])
    ids, told = choice["prompt_token_ids"] + choice["token_ids"], choice["logprobs"]
    assert {len(column) for column in told.values()} == {len(ids)}
    expected = scores_of(truth, ids)
    assert told["token_logprobs"][0] is None
    assert told["top_logprobs"][0] is None
    for place in range(1, len(ids)):
        row = expected[place - 1]
        assert abs(told["token_logprobs"][place] - row[ids[place]].item()) < 1e-3
        top = told["top_logprobs"][place]
        assert top[told["tokens"][place]] == told["token_logprobs"][place]
        best = row.topk(4).values.tolist()
        np.testing.assert_allclose(sorted(top.values(), reverse=True)[:4], best, atol=1e-3)
        assert len(top) in (4, 5)
    assert choice["text"].startswith(PROMPT)
    assert answers[0]["usage"]["completion_tokens"] == 6


def test_offsets_say_where_each_tokens_text_begins(server: Server) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 20, "logprobs": 0, "echo": True}
    choice = complete(server, asked)["choices"][0]
    text, told = choice["text"], choice["logprobs"]
    offsets = [*told["text_offset"], len(text)]
    assert offsets == sorted(offsets)
    for name, begin, end in zip(told["tokens"], offsets, offsets[1:], strict=False):
        if not name.startswith("bytes:") and end > begin:
            assert text[begin:end].endswith(name)
    assert offsets[len(choice["prompt_token_ids"])] == len(PROMPT)
    assert all(len(top) == 1 for top in told["top_logprobs"][1:])


def test_echo_alone_scores_a_prompt_without_generating(
    server: Server, client: openai.OpenAI, truth: LlamaForCausalLM
) -> None:
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=0, echo=True, logprobs=1
    )
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    ids = complete(server, {"prompt": PROMPT, "max_tokens": 1})["choices"][0]["prompt_token_ids"]
    expected = scores_of(truth, ids)[range(len(ids) - 1), ids[1:]]
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    np.testing.assert_allclose(choice.logprobs.token_logprobs[1:], expected, atol=1e-3)


def test_echo_without_scores_is_the_prompt_and_its_answer(server: Server) -> None:
    plain = complete(server, {"prompt": PROMPT, "max_tokens": 5})["choices"][0]
    for prompt in (PROMPT, plain["prompt_token_ids"]):
        echoed = complete(server, {"prompt": prompt, "max_tokens": 5, "echo": True})["choices"][0]
        assert echoed["text"] == PROMPT + plain["text"]
        assert echoed["logprobs"] is None
    for extra in ({"stream": False}, {"prompt": [[5, 1, 6], [9]], "n": 2}):
        choices = complete(
            server, {"prompt": "a<|im_end|>b", "max_tokens": 0, "echo": True} | extra
        )
        assert [choice["token_ids"] for choice in choices["choices"]] == (
            [[]] * len(choices["choices"])
        )
    assert (
        complete(server, {"prompt": "a<|im_end|>b", "max_tokens": 0, "echo": True})["choices"][0][
            "text"
        ]
        == "a<|im_end|>b"
    )


def test_a_stop_string_is_not_looked_for_in_the_echo(server: Server) -> None:
    plain = complete(server, {"prompt": PROMPT, "max_tokens": 9})["choices"][0]["text"]
    answer = complete(
        server, {"prompt": PROMPT, "max_tokens": 9, "echo": True, "stop": ["decides", plain[4:6]]}
    )
    assert answer["choices"][0]["text"] == PROMPT + plain[: plain.find(plain[4:6])]


# ---- streams


@pytest.mark.parametrize("top", [0, 3, 20])
@pytest.mark.parametrize("echo", [False, True])
def test_a_completions_stream_joins_to_the_whole(server: Server, top: int, echo: bool) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 12, "logprobs": top, "echo": echo, "temperature": 0}
    asked |= {"stop": ["never there"], "n": 2}
    whole = complete(server, asked)
    texts: dict[int, str] = {}
    columns: dict[int, dict[str, list[Any]]] = {}
    for event in events(server, "/v1/completions", asked):
        choice = event["choices"][0]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            columns.setdefault(choice["index"], {}).setdefault(name, []).extend(values)
    for choice in whole["choices"]:
        assert texts[choice["index"]] == choice["text"]
        streamed, told = columns[choice["index"]], choice["logprobs"]
        for name in ("tokens", "text_offset"):
            assert streamed[name] == told[name]
        assert_close(streamed["token_logprobs"], told["token_logprobs"])
        assert [set(one or {}) for one in streamed["top_logprobs"]] == (
            [set(one or {}) for one in told["top_logprobs"]]
        )


def assert_close(some: list[float | None], others: list[float | None]) -> None:
    assert [one is None for one in some] == [one is None for one in others]
    pairs = [(a, b) for a, b in zip(some, others, strict=True) if a is not None and b is not None]
    np.testing.assert_allclose(*zip(*pairs, strict=True), atol=1e-4)


def test_chat_scores_whole_and_streamed(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 10, "logprobs": True, "top_logprobs": 5, **HELLO}
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.logprobs is not None
    content = whole.logprobs.content
    assert content is not None
    assert len(content) == 10
    spelled = b"".join(bytes(one.bytes or []) for one in content)
    assert spelled.decode("utf-8", "replace").rstrip("\ufffd") == (
        (whole.message.content or "").rstrip("\ufffd")
    )
    streamed = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        told = chunk.choices[0].logprobs
        streamed += (told.content or []) if told else []
    for one, other in zip(streamed, content, strict=True):
        assert (one.token, one.bytes) == (other.token, other.bytes)
        assert abs(one.logprob - other.logprob) < 1e-4
        assert len(one.top_logprobs) == 5
        assert one.top_logprobs[0].token == one.token  # greedy: the most probable token
        assert one.top_logprobs[0].logprob == one.logprob
    silent = client.chat.completions.create(**(asked | {"logprobs": False, "top_logprobs": 0}))
    assert silent.choices[0].logprobs is None


# ---- finite, whatever is filtered


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "extra",
    [
        {"top_k": 1, "temperature": 1},
        {"top_p": 0.01, "temperature": 1},
        {"min_p": 1, "temperature": 2},
        {"logit_bias": {"5": -100, "6": 100}},
        {"repetition_penalty": 0.01, "frequency_penalty": -2},
        {"min_tokens": 8, "stop_token_ids": [5, 6, 7]},
    ],
)
def test_scores_are_finite_whatever_is_filtered(
    server: Server, extra: dict[str, Any], stream: bool
) -> None:
    chat = HELLO | {"max_tokens": 8, "logprobs": True, "top_logprobs": 20} | extra
    text = {"prompt": PROMPT, "max_tokens": 8, "logprobs": 20, "echo": True} | extra
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", text)):
        if stream:
            assert_finite(events(server, path, body))
        else:
            response = post(server, path, body)
            assert response.status_code == 200, response.text
            assert_finite(response.json())


# ---- penalties and biases


def test_a_bias_bans_and_selects(client: openai.OpenAI, server: Server) -> None:
    plain = complete(server, {"prompt": PROMPT, "max_tokens": 8})["choices"][0]["token_ids"]
    banned = {str(token): -100 for token in set(plain)}
    asked: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 1, "seed": 3}
    for bias in (banned, {"42": 100}):
        answer = client.completions.create(**asked, logit_bias=bias, logprobs=0)
        told = answer.choices[0].logprobs
        assert told is not None
        names = set(told.tokens or [])
        if bias is banned:
            assert not names & {name_of(server, token) for token in plain}
        else:
            assert names == {name_of(server, 42)}


def name_of(server: Server, token: int) -> str:
    text: str = post(server, "/detokenize", {"tokens": [token]}).json()["prompt"]
    return text


def test_penalties_keep_a_text_from_repeating_itself(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 60, "temperature": 0, "logprobs": True, **HELLO}
    asked["extra_body"] = {"ignore_eos": True, "repetition_penalty": 1.0}

    def distinct(**extra: Any) -> int:
        told = client.chat.completions.create(**(asked | extra)).choices[0].logprobs
        assert told is not None
        return len({tuple(one.bytes or []) for one in told.content or []})

    plain = distinct()
    assert plain < 55
    assert distinct(frequency_penalty=2.0) > plain
    assert distinct(presence_penalty=2.0) > plain
    assert distinct(extra_body={"ignore_eos": True, "repetition_penalty": 2.0}) > plain


def test_nobodys_parameters_reach_a_neighbour(server: Server) -> None:
    """All at once and one after another: the same answers (mlx-vlm#1647)."""
    bodies: list[dict[str, Any]] = [
        {},
        {"frequency_penalty": 2},
        {"logit_bias": {"9": 30}, "logprobs": 2},
        {"temperature": 1.5, "seed": 4},
        {"temperature": 1.5, "seed": 4, "min_p": 0.3},
        {"repetition_penalty": 1.8, "echo": True, "logprobs": 1},
        {"presence_penalty": -2},
        {"temperature": 1.5, "seed": 4, "n": 2},
    ]
    bodies = [{"prompt": PROMPT, "max_tokens": 25, "ignore_eos": True} | body for body in bodies]

    def tokens(body: dict[str, Any]) -> list[list[int]]:
        return [choice["token_ids"] for choice in complete(server, body)["choices"]]

    apart = [tokens(body) for body in bodies]
    for _ in range(3):
        with ThreadPoolExecutor(len(bodies)) as pool:
            assert list(pool.map(tokens, bodies)) == apart
    assert len({tuple(found[0]) for found in apart}) == len(bodies) - 1, "one twin: the same seed"
    server.wait_idle()


def test_n_choices_differ_and_come_again(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "n": 4, "seed": 5, "temperature": 1.0, "max_tokens": 20}
    asked["messages"] = HELLO["messages"]
    first, second = (client.chat.completions.create(**asked).choices for _ in range(2))
    assert [one.message.content for one in first] == [one.message.content for one in second]
    assert len({one.message.content for one in first}) == 4


def test_bad_biases_leave_healthy_streams_alone(server: Server) -> None:
    """Two streams run while bodies that once killed engines are refused (vllm#16529)."""
    long = {"prompt": PROMPT, "max_tokens": 150, "ignore_eos": True, "temperature": 0}
    alone = events(server, "/v1/completions", long)
    with ThreadPoolExecutor(2) as pool:
        streams = [pool.submit(events, server, "/v1/completions", long) for _ in range(2)]
        for bias in ('{"320": 5}', '{"-1": 5}', '{"99999999999": 1}', '{"5": 1e308}', '{"5": NaN}'):
            body = f'{{"prompt": "x", "logit_bias": {bias}}}'
            response = httpx.post(server.url + "/v1/completions", content=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "logit_bias")
        for stream in streams:
            text = "".join(event["choices"][0]["text"] for event in stream.result(30))
            assert text == "".join(event["choices"][0]["text"] for event in alone)


# ---- a choice by itself


def test_pieces_are_the_same_however_deltas_merge() -> None:
    """GIVEN a prompt and tokens cut anywhere, THEN text, scores and offsets join to one answer."""
    backend = Backend.from_str(tiny.tokenizer().to_str())
    tokenizer = Tokenizer(backend)
    prompt, output = backend.encode("früh 東").ids, backend.encode("京は日 two").ids
    sampling = SamplingParams(logprobs=1, prompt_logprobs=1)

    def score(index: int) -> TokenLogprobs:
        return TokenLogprobs(-float(index), [index], [-0.5])

    deltas = [Delta(1, [], prompt_logprobs=[score(i)]) for i in range(1, len(prompt))]
    deltas += [Delta(1, [t], logprobs=[score(100 + i)]) for i, t in enumerate(output)]
    deltas.append(Delta(1, [], "length"))
    found = set()
    for size in (1, 2, 3, len(deltas)):
        submission = Submission(
            request_id="r", prompt=prompt, max_tokens=99, sampling=sampling, received_at_ns=0
        )
        choice = Choice(
            0,
            Sequence(1, submission),
            tokenizer.detokenizer(),
            stops=("two",),
            silent=frozenset(),
            echo=Echo(
                prompt, tokenizer.detokenizer(special=True), hidden=0, scored=True, alone=False
            ),
        )
        text, scores = "", []
        for begin in range(0, len(deltas), size):
            if choice.finish_reason is None:
                piece = choice.add(merged(deltas[begin : begin + size]))
                text += piece.text
                scores += piece.scores
        found.add((text, str(scores), choice.finish_reason))
        assert [one.token for one in scores[: len(prompt)]] == prompt
        assert scores[0].score is None
    ((text, _, finish),) = found
    assert (text, finish) == ("früh 東京は日 ", "stop")


def merged(deltas: list[Delta]) -> Delta:
    sequence_of = [token for delta in deltas for token in delta.tokens]
    logprobs = prompts = None
    for delta in deltas:
        logprobs = joined(logprobs, delta.logprobs)
        prompts = joined(prompts, delta.prompt_logprobs)
    return Delta(1, sequence_of, deltas[-1].finish, None, logprobs, prompts)


def test_distinct_tokens_have_distinct_names() -> None:
    tokenizer = Tokenizer(Backend.from_str(tiny.tokenizer().to_str()))
    names = [tokenizer.token_name(token) for token in range(320)]
    assert len(set(names)) == 320
    assert names[:3] == list(tiny.SPECIALS)
    assert sum(name.startswith("bytes:\\x") for name in names) >= 128
    assert tokenizer.token_bytes(10**6) == b""


def test_what_a_model_wants_in_front_of_a_text_is_not_echoed() -> None:
    tokenizer = Tokenizer(Backend.from_str(tiny.tokenizer().to_str()))
    assert tokenizer.prefix_tokens("hello", [1, 0, 77]) == 2
    assert tokenizer.prefix_tokens("<|im_start|>hello", [1, 77]) == 0
    assert tokenizer.prefix_tokens("", []) == 0
