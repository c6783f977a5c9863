"""Penalties and biases against the plainest numpy: every value, whatever came and went before.

Owns the tests of engine/penalties.py. The oracle goes through the tokens one by one, as the
definitions read; the device code gathers and scatters.
"""

import random
from collections import Counter

import numpy as np
import pytest
import torch

from engine.messages import SamplingParams
from engine.penalties import SLOTS_MIN, Penalties, add_biases
from engine.plan import History, Plan

VOCAB, MODEL_LEN = 50, 64
ALL = SamplingParams(
    presence_penalty=0.7,
    frequency_penalty=-0.4,
    repetition_penalty=1.3,
    logit_bias=((3, 5.0), (49, -100.0)),
)
KINDS = (
    SamplingParams(presence_penalty=1.5),
    SamplingParams(frequency_penalty=2.0),
    SamplingParams(frequency_penalty=-2.0, presence_penalty=0.5),
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(repetition_penalty=0.5),
    SamplingParams(logit_bias=((0, 100.0), (7, -3.25))),
    SamplingParams(),
    ALL,
)


def oracle(
    logits: np.ndarray, prompt: list[int], output: list[int], params: SamplingParams
) -> np.ndarray:
    """Change one row's logits as OpenAI and vLLM define it, token by token."""
    changed = logits.copy()
    for token in set(prompt + output):
        value, by = changed[token], params.repetition_penalty
        changed[token] = value / by if value > 0 else value * by
    for token, count in Counter(output).items():
        changed[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, bias in params.logit_bias:
        changed[token] += bias
    return changed


class Text:
    """One sequence as the host knows it."""

    def __init__(self, number: int, params: SamplingParams, prompt: list[int]) -> None:
        self.number, self.params, self.prompt = number, params, prompt
        self.tokens = list(prompt)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]


def plan_of(texts: list[Text], samples: list[bool]) -> Plan:
    return Plan(
        step=1,
        token_budget=100,
        requests=[text.number for text in texts],
        samples=samples,
        sampling=[text.params for text in texts],
        output_indices=[len(text.output) for text in texts],
        histories=[
            History(row=row, tokens=text.tokens, prompt_tokens=len(text.prompt))
            for row, text in enumerate(texts)
            if not text.params.is_plain
        ],
    )


def step(penalties: Penalties, texts: list[Text], samples: list[bool], pick: random.Random) -> None:
    """Change random logits of the texts that sample, compare with the oracle, add tokens."""
    wanted = [row for row, one in enumerate(samples) if one]
    logits = torch.randn(len(wanted), VOCAB, generator=torch.Generator().manual_seed(len(texts)))
    plan, places = plan_of(texts, samples), {row: place for place, row in enumerate(wanted)}
    batch, biases = penalties.batch(plan, places), penalties.biases(plan, places)
    changed = logits.clone()
    if batch is not None:
        penalties.apply(changed, batch)
    if biases is not None:
        add_biases(changed, biases)
    for place, row in enumerate(wanted):
        text = texts[row]
        expected = oracle(logits[place].double().numpy(), text.prompt, text.output, text.params)
        np.testing.assert_allclose(changed[place].numpy(), expected, atol=2e-5)
        if text.params.is_plain:
            assert torch.equal(changed[place], logits[place])
    tokens = [pick.randrange(VOCAB // 5) for _ in wanted]
    if batch is not None:
        penalties.note(torch.tensor(tokens), batch)
    for row, token in zip(wanted, tokens, strict=True):
        texts[row].tokens.append(token)


@pytest.mark.parametrize("seed", range(4))
def test_every_row_is_changed_by_its_own_past_alone(seed: int) -> None:
    """Sequences come, move between rows, pause as preempted ones do, and go."""
    pick = random.Random(seed)
    penalties = Penalties(vocab_size=VOCAB, model_len=MODEL_LEN, device="cpu")
    live: list[Text] = []
    number = 0
    for _ in range(40):
        for _ in range(pick.randrange(3)):
            number += 1
            prompt = [pick.randrange(VOCAB) for _ in range(pick.randrange(1, 12))]
            live.append(Text(number, pick.choice(KINDS), prompt))
        pick.shuffle(live)
        texts = [text for text in live if pick.random() < 0.7]
        if texts:
            step(penalties, texts, [pick.random() < 0.8 for _ in texts], pick)
        for text in [text for text in live if len(text.output) > 12 or pick.random() < 0.05]:
            penalties.forget(text.number)
            live.remove(text)
    for text in live:
        penalties.forget(text.number)
    assert number > SLOTS_MIN
    assert penalties.kept == 0


def test_more_sequences_than_the_first_allocation_keep_their_pasts() -> None:
    pick = random.Random(9)
    penalties = Penalties(vocab_size=VOCAB, model_len=MODEL_LEN, device="cpu")
    texts = [Text(number, ALL, [1, 2, number % VOCAB]) for number in range(SLOTS_MIN * 3)]
    for many in (3, SLOTS_MIN, SLOTS_MIN * 3):
        for _ in range(5):
            step(penalties, texts[:many], [True] * many, pick)
    assert penalties.kept == SLOTS_MIN * 3


def test_a_slot_that_changed_hands_remembers_nothing() -> None:
    pick = random.Random(3)
    penalties = Penalties(vocab_size=VOCAB, model_len=MODEL_LEN, device="cpu")
    for number in range(20):
        text = Text(number, KINDS[number % 5], [number])
        for _ in range(6):
            step(penalties, [text], [True], pick)
        penalties.forget(number)


def test_a_past_begins_with_what_was_said_before() -> None:
    """A sequence whose first plan comes late, as after a take-over, has all its output counted."""
    pick = random.Random(5)
    penalties = Penalties(vocab_size=VOCAB, model_len=MODEL_LEN, device="cpu")
    text = Text(1, ALL, [4, 5, 4])
    text.tokens += [4, 7, 7, 9]
    for _ in range(4):
        step(penalties, [text], [True], pick)


def test_a_past_that_missed_a_token_is_our_mistake() -> None:
    penalties = Penalties(vocab_size=VOCAB, model_len=MODEL_LEN, device="cpu")
    text = Text(1, ALL, [4])
    step(penalties, [text], [True], random.Random(1))
    text.tokens.append(3)
    with pytest.raises(AssertionError, match="disagree"):
        penalties.batch(plan_of([text], [True]), {0: 0})


def test_biases_outside_the_vocabulary_are_left_out() -> None:
    penalties = Penalties(vocab_size=VOCAB, model_len=MODEL_LEN, device="cpu")
    params = SamplingParams(logit_bias=((VOCAB, 5.0), (-1, 5.0), (10**9, 5.0), (2, 1.0)))
    batch = penalties.biases(plan_of([Text(1, params, [1])], [True]), {0: 0})
    assert batch is not None
    assert batch.tokens.tolist() == [2]
