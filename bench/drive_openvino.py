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
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = job.answer, True, False
        self._count += 1
        ids = ov.Tensor(np.array([job.ids], dtype=np.int64))
        self._handles[number] = self._pipeline.add_request(self._count, ids, config)

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


driver = Pipeline
