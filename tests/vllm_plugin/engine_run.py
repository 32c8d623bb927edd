"""Run one vLLM engine in this process and write what it did: `python engine_run.py SPEC.json RESULT.json`.

SPEC: {"model": folder, "llm": arguments of vllm.LLM, "prompts": [[token, ...], ...], "max_tokens": [n, ...],
"abort": {request: after so many tokens}, "score": whether to score the generated texts again as prompts, "states": a
file for the plain states of all running requests, taken once every request has run or ended, "prefilled": a file for
the states of the same tokens after one prefill, "turns": how often a request goes on, as a new one whose prompt is the
text so far (default 1); the result is that of the last turn}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from random_weights import randomise_dummies

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def build(spec: dict[str, Any]) -> Any:
    from vllm import LLM

    if spec.get("llm", {}).get("load_format") == "dummy":
        randomise_dummies()
    arguments: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "bfloat16", "seed": 0, "max_model_len": 512}
    return LLM(spec["model"], **{**arguments, "enable_prefix_caching": False, **spec.get("llm", {})})


def generate(llm: Any, spec: dict[str, Any]) -> tuple[list[dict[str, Any]], float]:
    """Tokens and log-probabilities of every request (an aborted one keeps what it had); tokens that a decode gives."""
    from vllm import SamplingParams

    engine, abort = llm.llm_engine, {int(k): v for k, v in spec.get("abort", {}).items()}
    for i, (prompt, length) in enumerate(zip(spec["prompts"], spec["max_tokens"], strict=True)):
        greedy = SamplingParams(
            temperature=0.0, max_tokens=length, min_tokens=length, ignore_eos=True, detokenize=False, logprobs=0
        )
        engine.add_request(str(i), {"prompt_token_ids": prompt}, greedy)
    outputs: dict[int, Any] = {}
    cached: dict[int, int] = {}
    lengths: dict[int, int] = {}
    decoded: list[int] = []
    wanted = spec.get("states")
    while engine.has_unfinished_requests():
        for output in engine.step():
            index, length = int(output.request_id), len(output.outputs[0].token_ids)
            if index in outputs:
                decoded.append(length - lengths[index])
            outputs[index], lengths[index] = output.outputs[0], length
            cached[index] = output.num_cached_tokens or 0
            if index in abort and len(outputs[index].token_ids) >= abort[index]:
                engine.abort_request([output.request_id])
                del abort[index]
        if wanted and len(outputs) == len(spec["prompts"]) and not abort:
            torch.save(plain_states(llm), wanted)
            wanted = None
    read = [{**_read(outputs[i]), "cached": cached[i], "prompt": len(p)} for i, p in enumerate(spec["prompts"])]
    return read, sum(decoded) / max(len(decoded), 1)


def _read(output: Any) -> dict[str, Any]:
    tokens = list(output.token_ids)
    return {"tokens": tokens, "logprobs": [step[t].logprob for t, step in zip(tokens, output.logprobs, strict=True)]}


def score(llm: Any, prompts: list[list[int]], results: list[dict[str, Any]]) -> None:
    """The log-probabilities of the same tokens from one prefill of prompt and answer."""
    from vllm import SamplingParams

    one = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, prompt_logprobs=0)
    texts = [prompt + result["tokens"] for prompt, result in zip(prompts, results, strict=True)]
    outputs = llm.generate([{"prompt_token_ids": text} for text in texts], one, use_tqdm=False)
    for prompt, text, result, output in zip(prompts, texts, results, outputs, strict=True):
        given = output.prompt_logprobs
        result["scored"] = [given[i][text[i]].logprob for i in range(len(prompt), len(text))]


def layers(llm: Any) -> dict[str, Any]:
    return dict(llm.llm_engine.vllm_config.compilation_config.static_forward_context)


def core(llm: Any) -> Any:
    """The engine core, which runs in this process."""
    return llm.llm_engine.engine_core.engine_core


def plain_states(llm: Any) -> dict[str, dict[str, Any]]:
    """{"tokens": {request: tokens in its state}, layer: {request: state [heads, V, K]}} of the requests that run."""
    runner = core(llm).model_executor.driver_worker.worker.model_runner
    running = {r.request_id: r.num_computed_tokens for r in core(llm).scheduler.running}
    of_request = (runner.req_states if hasattr(runner, "req_states") else runner.input_batch).req_id_to_index
    rows = {i: of_request[i] for i in running if i in of_request}
    states: dict[str, dict[str, Any]] = {"tokens": {i.split("-")[0]: running[i] for i in rows}}
    for group, spec in enumerate(runner.kv_cache_config.kv_cache_groups):
        if hasattr(runner, "block_tables"):
            table = runner.block_tables.block_tables[group].gpu.cpu()
        else:
            table = runner.input_batch.block_table[group].get_numpy_array()
        for name in spec.layer_names:
            layer = layers(llm)[name]
            if "Mamba" not in type(layer).__name__ and "Delta" not in type(layer).__name__:
                continue
            blocks = torch.tensor([int(table[row][0]) for row in rows.values()], dtype=torch.int32)
            states[name] = dict(zip(states["tokens"], _states(layer, blocks), strict=True))
    return states


def _states(layer: Any, blocks: torch.Tensor) -> torch.Tensor:
    pool = layer.kv_cache[1]
    blocks = blocks.to(pool.device)
    if getattr(layer, "plan", None) is not None:
        cache, plain = layer.cache(), torch.empty(len(blocks), *pool.shape[1:], device=pool.device)
        if hasattr(layer, "A"):
            cache.A = layer.A
        cache.replay(blocks, None, plain, torch.arange(len(blocks), dtype=torch.int32, device=pool.device), 0)
        return plain.cpu()
    state = pool[blocks.long()].float()
    # vLLM's CPU kernels keep Gated DeltaNet's states as [K, V].
    transposed = "Delta" in type(layer).__name__ and pool.device.type == "cpu"
    return state.transpose(-1, -2).contiguous() if transposed else state.cpu()


def prefilled_states(llm: Any, texts: dict[str, list[int]]) -> dict[str, dict[str, Any]]:
    """What `plain_states` gives after a prefill of each text, one at a time."""
    from vllm import SamplingParams

    engine, states = llm.llm_engine, {}
    for name, text in texts.items():
        going_on = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, detokenize=False)
        engine.add_request(name, {"prompt_token_ids": text}, going_on)
        while not engine.step():
            pass
        for layer, found in plain_states(llm).items():
            states.setdefault(layer, {}).update(found)
        engine.abort_request([name])
        while engine.has_unfinished_requests():
            engine.step()
    return states


def count_preemptions(llm: Any) -> list[str]:
    """A list that grows by the name of every request that is preempted."""
    scheduler, names = core(llm).scheduler, []
    preempt = scheduler._preempt_request

    def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(request.request_id)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = counted
    return names


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    llm = build(spec)
    preempted = count_preemptions(llm)
    results, a_step = generate(llm, spec)
    for _ in range(spec.get("turns", 1) - 1):
        spec["prompts"] = [prompt + result["tokens"] for prompt, result in zip(spec["prompts"], results, strict=True)]
        results, a_step = generate(llm, spec)
    if spec.get("prefilled"):
        held = torch.load(spec["states"])["tokens"]
        texts = {i: (spec["prompts"][int(i)] + results[int(i)]["tokens"])[:n] for i, n in held.items()}
        torch.save(prefilled_states(llm, texts), spec["prefilled"])
    if spec.get("score"):
        score(llm, spec["prompts"], results)
    result = {
        "requests": results,
        "tokens_a_step": a_step,
        "replayed": sum(getattr(layer, "plan", None) is not None for layer in layers(llm).values()),
        "blocks": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks,
        "preempted": len(preempted),
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads must not hold up the exit
