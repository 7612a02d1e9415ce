"""A real vLLM in one process with async scheduling: run by test_steps.py with the interpreter that has it.

vLLM's CPU platform turns async scheduling off, for want of use and not of support: here it is left on. Steps
are then scheduled before the result of the one before is there. Writes the engine's log.
"""

from __future__ import annotations

import os
import random
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def keep_async_scheduling() -> None:
    platform = import_module("vllm.platforms.cpu").CpuPlatform
    check = platform.check_and_update_config

    def checked(config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = staticmethod(checked)


def make_engine() -> Any:
    arguments = import_module("vllm.engine.arg_utils").EngineArgs(
        model=str(Path(__file__).parent / "tiny-llama"), load_format="dummy", dtype="bfloat16",
        max_model_len=2048, max_num_seqs=16, max_num_batched_tokens=256, num_gpu_blocks_override=96,
        block_size=32, enforce_eager=True, distributed_executor_backend="uni", disable_log_stats=False,
        enable_logging_iteration_details=True,
    )  # fmt: skip
    return import_module("vllm.v1.engine.llm_engine").LLMEngine.from_engine_args(arguments)


def main() -> None:
    keep_async_scheduling()
    engine = make_engine()
    core = engine.engine_core.engine_core
    assert core.batch_queue is not None, "async scheduling is off"
    parameters = import_module("vllm").SamplingParams
    asks = [(8, 300)] * 4 + [(300, 150)] * 6 + [(1500, 30)] * 4
    for number, (prompt, output) in enumerate(asks):
        ids = {"prompt_token_ids": [random.randrange(3, 512) for _ in range(prompt)]}
        engine.add_request(str(number), ids, parameters(max_tokens=output, ignore_eos=True, temperature=0))
    made = 0
    finished = 0
    while engine.has_unfinished_requests():
        for each in engine.step():
            if each.finished:
                finished += 1
                made += len(each.outputs[0].token_ids)
    print("finished", finished, "tokens", made, flush=True)


if __name__ == "__main__":
    main()
