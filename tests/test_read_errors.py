"""`replayssm formats`: errors of reads from captured states, the choice within a budget, and where states come from."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import tiny_model

from replayssm import Plan, ReplayError
from replayssm.captures import add_file, add_model
from replayssm.cli.app import main
from replayssm.integrations.transformers import enable
from replayssm.ops.delta import torch_ops as delta_ops
from replayssm.ops.mamba2 import torch_ops as mamba2_ops
from replayssm.quant import dequantize, quantize
from replayssm.read_errors import ReadErrors, _spend

READS = ("nvfp4", "fp8", "int8", "bf16")


def states(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_errors_by_hand() -> None:
    S, q = states(2, 4, 6, 32), states(2, 2, 5, 32, seed=1)
    errors = ReadErrors()
    errors.add(3, S[:1], q[:1])
    errors.add(3, S[1:], q[1:])
    mine = errors.layers[3]
    for read in READS:
        copy = dequantize(quantize(S, read)).double()
        for head in range(4):
            exact = torch.stack([S[n, head].double() @ q[n, head // 2].double().T for n in range(2)])
            got = torch.stack([copy[n, head] @ q[n, head // 2].double().T for n in range(2)])
            expected = (got - exact).norm() / exact.norm()
            assert float(mine.relative(read)[head]) == pytest.approx(float(expected), rel=1e-9)
        assert mine.worst(read) == pytest.approx(float(mine.relative(read).max()))
        assert mine.mean(read) <= mine.worst(read)
    assert mine.mean("bf16") < mine.mean("int8") < mine.mean("fp8") < mine.mean("nvfp4") < 0.12
    assert mine.nbytes("nvfp4") == 4 * (6 * 32 // 2 + 6 * 2 + 4) and mine.nbytes("none", "fp16") == 4 * 6 * 32 * 2


def test_formats_that_do_not_fit_are_left_out() -> None:
    errors = ReadErrors()
    errors.add(0, states(1, 2, 4, 48))
    assert set(errors.layers[0].squares) == {"nvfp4", "fp8", "bf16"}
    assert errors.propose(1.0) == {0: "nvfp4"}


def layered() -> ReadErrors:
    """Layers whose blocks differ: nvfp4 suits some better than others."""
    errors = ReadErrors()
    for idx in range(6):
        spread = (2.0 ** (idx / 2)) ** states(2, 2, 8, 64, seed=100 + idx)
        errors.add(idx, states(2, 2, 8, 64, seed=idx) * spread)
    return errors


def test_the_budget_holds_and_more_of_it_never_costs_bytes() -> None:
    errors, before = layered(), None
    plans = []
    for budget in (0.0, 0.001, 0.003, 0.006, 0.01, 0.02, 0.04, 0.07, 0.1, 1.0):
        chosen = errors.propose(budget)
        squares = [errors.layers[i].mean(r) ** 2 if r != "none" else 0.0 for i, r in chosen.items()]
        assert (sum(squares) / len(squares)) ** 0.5 <= budget * (1 + 1e-12)
        nbytes = sum(errors.layers[i].nbytes(r) for i, r in chosen.items())
        assert before is None or nbytes <= before
        before = nbytes
        plans.append(chosen)
    assert set(plans[0].values()) == {"none"} and set(plans[-1].values()) == {"nvfp4"}
    assert any(len(set(chosen.values())) > 1 for chosen in plans)


def test_the_choice_is_close_to_the_best_there_is() -> None:
    """Exhaustive search over three layers: never more than the bytes of one layer's change apart."""
    pick = random.Random(3)
    for _ in range(30):
        costs = {
            i: {"none": (0.0, 64), **{r: (pick.random() * e, b) for r, e, b in (("x", 1, 40), ("y", 4, 20))}}
            for i in range(3)
        }
        budget = pick.random() * 4
        chosen = _spend(costs, budget)
        assert sum(costs[i][r][0] for i, r in chosen.items()) <= budget + 1e-12
        options = itertools.product(*(costs[i].values() for i in range(3)))
        best = min(sum(b for _, b in o) for o in options if sum(e for e, _ in o) <= budget)
        assert sum(costs[i][r][1] for i, r in chosen.items()) <= best + 44


def test_the_worst_head_is_judged() -> None:
    S = states(1, 4, 8, 64)
    S[0, 3] *= (2.0**6) ** states(8, 64, seed=5)  # one head with a wide spread in every block
    errors = ReadErrors(reads=("fp8",))
    errors.add(0, S)
    between = (errors.layers[0].mean("fp8") + errors.layers[0].worst("fp8")) / 2
    assert errors.propose(between) == {0: "fp8"}
    assert errors.propose(between, worst_head=True) == {0: "none"}


def test_a_file_of_states(tmp_path: Path) -> None:
    path = tmp_path / "states.safetensors"
    save_file({"1.state": states(3, 2, 4, 32), "1.queries": states(3, 1, 7, 32), "12.state": states(1, 2, 4, 32)}, path)
    errors = ReadErrors()
    add_file(path, errors)
    assert sorted(errors.layers) == [1, 12]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"layer1": (1, 2, 4, 32)}, "states is 'layer1'; allowed: tensors IDX.state, and IDX.queries beside them"),
        ({"1.state": (1, 2, 4, 32), "2.queries": (1, 1, 3, 32)}, "states is '2.queries'"),
        ({"gdn.state": (1, 2, 4, 32)}, "states is 'gdn.state'"),
        ({}, "states is 'an empty file'"),
        ({"1.state": (2, 4, 32)}, "states[1].shape is [2, 4, 32]; allowed: [any, any, any, any]"),
        ({"1.state": (1, 4, 4, 32), "1.queries": (1, 3, 3, 32)}, "a divisor of 4 heads"),
        ({"1.state": (1, 4, 4, 32), "1.queries": (1, 2, 3, 16)}, "queries[1].shape is [1, 2, 3, 16]"),
    ],
)
def test_bad_files(
    tensors: dict[str, tuple[int, ...]], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "states.safetensors"
    save_file({name: torch.ones(shape) for name, shape in tensors.items()}, path)
    assert main(["formats", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"no")
    assert main(["formats", str(tmp_path / "x.safetensors")]) == 2
    assert main(["formats", str(tmp_path / "y.safetensors")]) == 2
    save_file({"0.state": torch.full((1, 1, 2, 16), torch.nan)}, tmp_path / "z.safetensors")
    assert main(["formats", str(tmp_path / "z.safetensors")]) == 2
    first, second, third = capsys.readouterr().err.splitlines()
    assert "a safetensors file" in first and "a safetensors file" in second
    assert "states[0] is 'not finite'" in third
    for budget in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ReplayError, match="budget"):
            layered().propose(budget)
    with pytest.raises(ReplayError, match="states is empty"):
        ReadErrors().propose(1.0)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "states.safetensors"
    save_file({f"{i}.state": states(1, 2, 8, 64, seed=i) for i in range(3)}, path)
    assert main(["formats", str(path), "--budget", "0.06", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert 0 < report["error"] <= 0.06
    assert report["read_bytes"] < report["checkpoint_bytes"] == 3 * 2 * 8 * 64 * 4
    assert main(["formats", str(path), "--budget", "0.06"]) == 0
    shown = capsys.readouterr().out
    assert str({int(i): r for i, r in report["read"].items()}) in shown
    assert main(["formats", str(path), "--budget", "0.5"]) == 0
    assert "read='nvfp4'" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_5", "kimi_linear"])
def test_states_of_a_model(name: str) -> None:
    """A proposal for a model is a plan that runs."""
    model, errors = tiny_model(name), ReadErrors()
    add_model(model, torch.randint(3, 61, (9 + 2 * 16,)), errors, prompt_len=9)
    assert sorted(errors.layers) == sorted(spec.layer_idx for spec in Plan.from_config(model.config).layers)
    for mine in errors.layers.values():
        assert 0.0005 < mine.mean("bf16") < 0.01 < mine.mean("fp8") < mine.mean("nvfp4") < 0.2
    chosen = errors.propose(0.07)
    with enable(model, read=chosen) as handle:
        assert handle.plan.read_format(min(chosen)) == chosen[min(chosen)]


@pytest.mark.parametrize(("name", "ops", "place"), [("qwen3_5", delta_ops, 5), ("nemotron_h", mamba2_ops, 6)])
def test_queries_are_those_that_the_layers_read_with(
    name: str, ops: ModuleType, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_with, given = [], []
    right = ops._read

    def read(*arguments: Any) -> Any:
        query = arguments[place]
        read_with.append(query[0] if query.dim() == 4 else query)  # Mamba-2's come packed, [tokens, groups, K]
        return right(*arguments)

    monkeypatch.setattr(ops, "_read", read)
    monkeypatch.setattr(ReadErrors, "add", lambda self, idx, state, queries: given.append(queries))
    model = tiny_model(name)
    add_model(model, torch.randint(3, 61, (41,)), ReadErrors(), prompt_len=9)
    layers = len(Plan.from_config(model.config).layers)
    for i, queries in enumerate(given):
        first = i // layers * 16 * layers + i % layers
        expected = torch.cat(read_with[first : first + 16 * layers : layers])
        scale = 16**-0.5 if ops is delta_ops else 1.0
        torch.testing.assert_close(queries[0].movedim(0, 1) * scale, expected.float())


def test_command_with_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("qwen3_5").save_pretrained(tmp_path / "model")
    (tmp_path / "text").write_bytes(bytes(range(3, 61)) * 4)
    arguments = ["--device", "cpu", "--text", str(tmp_path / "text"), "--tokens", "48", "--json"]
    assert main(["formats", str(tmp_path / "model"), *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["read"]) == {"0", "2"}
    assert main(["formats", str(tmp_path / "model"), *arguments, "--tokens", "3"]) == 2


def test_a_proposal_can_be_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("qwen3_5").config.save_pretrained(tmp_path)
    file = tmp_path / "formats.json"
    for read, message in (
        ({"0": "nvfp4", "2": "fp8"}, None),
        ({"0": "nvfp4"}, "read is {0: 'nvfp4'}"),
        (None, "read is"),
    ):
        file.write_text(json.dumps({"read": read}))
        assert main(["plan", str(tmp_path), "--read", str(file), "--json"]) == (2 if message else 0)
        shown = capsys.readouterr()
        if message:
            assert message in shown.err
        else:
            assert json.loads(shown.out)["read"] == "fp8 in 1, nvfp4 in 1 layers"


def test_a_text_that_is_too_short() -> None:
    with pytest.raises(ReplayError, match="tokens is '20 tokens'; allowed: at least 16 after the prompt of 9"):
        add_model(tiny_model("qwen3_5"), torch.ones(20, dtype=torch.long), ReadErrors(), prompt_len=9)
