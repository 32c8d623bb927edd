"""The OpenAI server on a CPU: requests that come together, one whose client goes away, and what the log tells."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from launch import QUIET
from models import save

pytestmark = pytest.mark.timeout(600)
PROMPT_LENS = (1, 2, 17, 40, 63, 64, 65, 129, 3, 100)
ARGUMENTS = [
    *("--skip-tokenizer-init", "--enforce-eager", "--no-enable-prefix-caching"),
    *("--dtype", "bfloat16", "--mamba-ssm-cache-dtype", "float32", "--max-model-len", "512"),
    *("--max-num-seqs", "6", "--max-num-batched-tokens", "64", "--distributed-executor-backend", "uni"),
    *("--num-gpu-blocks-override", "14", "--kv-cache-memory-bytes", str(2**26)),
    *("--additional-config", json.dumps({"replayssm": {"buffer_len": 5}})),
]


class Server:
    """One server in a process of its own."""

    def __init__(self, model: Path, log: Path) -> None:
        with contextlib.closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log, self.model = log, str(model)
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(self.port), *ARGUMENTS],
                env={**os.environ, **QUIET, "OMP_NUM_THREADS": "1"},
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def wait(self) -> None:
        """Until it answers."""
        while self.process.poll() is None:
            with contextlib.suppress(OSError):
                if self._open("GET", "/health").getresponse().status == 200:
                    return
            time.sleep(0.3)
        raise AssertionError(self.log.read_text()[-4000:])

    def _open(self, method: str, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def complete(self, prompt: list[int], length: int, **more: Any) -> dict[str, Any]:
        """Tokens and their log-probabilities of a greedy answer."""
        response = self._open("POST", "/v1/completions", self._body(prompt, length, **more)).getresponse()
        answer = json.loads(response.read())
        assert response.status == 200, answer
        return answer["choices"][0]

    def leave(self, prompt: list[int], length: int, after: int) -> int:
        """Read so many tokens of a stream, then hang up."""
        connection = self._open("POST", "/v1/completions", self._body(prompt, length, stream=True))
        response, read = connection.getresponse(), 0
        while read < after:
            read += response.readline().startswith(b"data:")
        connection.close()
        return read

    def running(self) -> float:
        """Requests in the engine, as its metrics count them."""
        lines = self._open("GET", "/metrics").getresponse().read().decode().splitlines()
        kinds = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(kinds))

    def _body(self, prompt: list[int], length: int, **more: Any) -> dict[str, Any]:
        greedy = {"temperature": 0, "ignore_eos": True, "logprobs": 0, "return_tokens_as_token_ids": True}
        return {"model": self.model, "prompt": prompt, "max_tokens": length, **greedy, **more}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    work = tmp_path_factory.mktemp("server")
    started = Server(save("nemotron_h", work / "nemotron_h"), work / "log.txt")
    try:
        started.wait()
        yield started
    finally:
        started.process.terminate()
        started.process.wait(60)


def test_requests_together_and_one_that_leaves(server: Server) -> None:
    """Each answer's log-probabilities are those of a prefill of its text; who leaves gives its blocks back."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 120) for _ in range(n)] for n in PROMPT_LENS]
    with ThreadPoolExecutor(len(prompts) + 1) as clients:
        left = clients.submit(server.leave, prompts[3], 400, 5)
        answers = list(clients.map(lambda i: server.complete(prompts[i], 30 + 3 * i), range(len(prompts))))
    assert left.result() == 5
    deadline = time.monotonic() + 60
    while server.running() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert server.running() == 0
    assert "replayssm: 2 mamba2 8x16x16 through replay" in server.log.read_text()
    differences = []
    for prompt, answer in zip(prompts, answers, strict=True):
        logprobs = answer["logprobs"]
        text = prompt + [int(token.removeprefix("token_id:")) for token in logprobs["tokens"]]
        scored = server.complete(text, 1, prompt_logprobs=0)["prompt_logprobs"]
        for i, ours in enumerate(logprobs["token_logprobs"], start=len(prompt)):
            differences.append(abs(ours - scored[i][str(text[i])]["logprob"]))
    assert len(differences) == sum(30 + 3 * i for i in range(len(prompts)))
    # Other tokens' log-probabilities are units away, the rounding of bf16 outputs a few hundredths.
    assert sum(differences) / len(differences) < 2**-5
