"""Plans that belong to nobody: to warm up with, to find the worst with, to measure a text with.

Owns what an engine computes before it serves. All rows lie in block 0, which is no sequence's, so
that none of it can be met later. engine/runner.py runs them; their tokens mean nothing.
"""

import torch

from engine.config import EngineConfig
from engine.messages import SamplingParams
from engine.plan import Plan
from kernels.base import AttentionBatch, StepBatch

GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, min_p=0.01)


def idle_plan(
    config: EngineConfig, counts: list[int], start: int = 0, sampling: SamplingParams = GREEDY
) -> Plan:
    """Return a plan of one row for each count of tokens, from position `start` on."""
    blocks = [-(-(start + count) // config.block_size) for count in counts]
    return Plan(
        step=0,
        token_budget=sum(counts),
        requests=[-1 - row for row in range(len(counts))],
        start_positions=[start] * len(counts),
        token_counts=counts,
        token_ids=[0] * sum(counts),
        block_tables=[[0] * each for each in blocks],
        kv_block_counts=blocks,
        samples=[True] * len(counts),
        sampling=[sampling] * len(counts),
        output_indices=[0] * len(counts),
    )


def warm_ups(config: EngineConfig) -> list[Plan]:
    """Return the largest prefill and each size of decode that no graph is captured for.

    On a GPU also many rows of a few tokens: kernels are compiled at their first use, and those for
    few rows are others.
    """
    assert config.max_model_len is not None
    prompt = min(config.max_num_batched_tokens, config.max_model_len)
    sizes = [*(() if config.graphs == "on" else config.buckets), config.max_num_seqs]
    prefills = [[prompt]]
    if config.device == "cuda":
        each = max(1, config.max_num_batched_tokens // config.max_num_seqs)
        prefills.append([min(each, config.max_model_len)] * config.max_num_seqs)
    mixed = [idle_plan(config, counts) for counts in prefills]
    return [*mixed, *(idle_plan(config, [1] * rows) for rows in sizes)]


def worst_plans(config: EngineConfig) -> list[Plan]:
    """Return the steps that need the most memory: all tokens and rows, at the longest context.

    One whole prompt that ends there, the budget over all rows, and all rows decoding; all draw.
    """
    assert config.max_model_len is not None
    longest, rows = config.max_model_len, config.max_num_seqs
    prompt = min(config.max_num_batched_tokens, longest)
    each = min(max(1, config.max_num_batched_tokens // rows), longest)
    return [
        idle_plan(config, [prompt], longest - prompt, DRAWN),
        idle_plan(config, [each] * rows, longest - each, DRAWN),
        idle_plan(config, [1] * rows, longest - 1, DRAWN),
    ]


def text_step(tokens: list[int], first: int, count: int, block_size: int) -> StepBatch:
    """Return the step that computes tokens first..first+count of a text in blocks from 1 on."""
    piece = tokens[first : first + count]
    end, places = first + len(piece), torch.arange(len(piece))
    return StepBatch(
        input_ids=torch.tensor(piece),
        positions=places + first,
        sample_tokens=places,
        attention=AttentionBatch(
            query_starts=torch.tensor([0, len(piece)], dtype=torch.int32),
            context_lengths=torch.tensor([end], dtype=torch.int32),
            slot_mapping=places + first + block_size,
            block_tables=torch.arange(1, 1 - (-end // block_size), dtype=torch.int32)[None],
            query_lengths_host=[len(piece)],
            context_lengths_host=[end],
        ),
    )
