"""OpenVINO GenAI's continuous batching in process, to be compared; in an environment of its own.

Owns the driver alone; bench/drive.py runs it with the interpreter of a venv with openvino-genai.
Threads, budget and slots are those that ours gets.
"""

import os
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from bench.workload import Job


class Pipeline:
    """A pipeline over a GGUF file or an OpenVINO folder."""

    def __init__(self, path: str, cache_gb: int = 2) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = cache_gb
        scheduler.max_num_seqs = 64
        scheduler.max_num_batched_tokens = 512
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        threads = {"INFERENCE_NUM_THREADS": os.cpu_count()}
        self._pipeline = genai.ContinuousBatchingPipeline(path, scheduler, "CPU", threads)
        self._handles: dict[int, Any] = {}
        self._count = 0

    def submit(self, number: int, job: Job) -> None:
        """Take a request in."""
        self._handles[number] = self._add(job.ids, self._greedy(job.answer))

    def _greedy(self, answer: int) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = answer, True, False
        return config

    def _add(self, ids: list[int], config: Any) -> Any:
        self._count += 1
        tensor = ov.Tensor(np.array([ids], dtype=np.int64))
        return self._pipeline.add_request(self._count, tensor, config)

    def poll(self) -> list[tuple[int, int]]:
        """Make one step."""
        if self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        gained = []
        for number, handle in list(self._handles.items()):
            tokens = 0
            while handle.can_read():
                tokens += sum(len(one.generated_ids) for one in handle.read().values())
            if tokens:
                gained.append((number, tokens))
            if handle.get_status() != genai.GenerationStatus.RUNNING and not handle.can_read():
                del self._handles[number]
        return gained

    def loss(self, ids: list[int]) -> float:
        """Return minus the log-probability of the tokens after the first, in nats."""
        config = self._greedy(1)
        config.echo, config.logprobs = True, 1
        handle = self._add(ids, config)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        told: list[float] = []
        while handle.can_read():
            for one in handle.read().values():
                told += one.generated_log_probs
        if len(told) != len(ids) + 1:  # the first token has none, and the answer's is the last
            raise ValueError(f"{len(told)} log-probabilities for {len(ids)} tokens and an answer")
        return -sum(told[1:-1])


driver = Pipeline
