"""The accuracy laboratory: whole runs against transformers' forward pass, kept results, and the command."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from families import relative_error
from tiny_models import tiny_model

from replayssm.checks import ReplayError
from replayssm.cli import main
from replayssm.drift.compare import compare, marks_up_to
from replayssm.drift.forward import routed, run
from replayssm.drift.laboratory import ResultFile, measure
from replayssm.drift.models import load, text_tokens
from replayssm.drift.variants import REFERENCE, Variant

TOKENS = 1024
ARCHITECTURES = {"mamba2": "nemotron_h", "gdn": "qwen3_5", "kda": "kimi_linear"}


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_run_is_the_models_forward_pass(family: str) -> None:
    model = tiny_model(ARCHITECTURES[family])
    tokens = torch.randint(3, 61, (TOKENS,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(tokens[None], use_cache=False).logits[0]
    with routed(model):
        found = run(model, tokens, Variant.parse(REFERENCE), [TOKENS])
        other = run(model, tokens, Variant.parse("nvfp4/fp32" if family != "gdn" else "none/bf16"), [TOKENS])
    logits = model.get_output_embeddings()(found.hidden).detach()
    assert relative_error(logits, expected) < 1e-5
    same, changed = (compare(model, tokens, found, r)[-1] for r in (found, other))
    assert same.kl == 0.0 and same.agreement == 1.0 and not any(same.output_errors + same.state_errors)
    assert 0 < changed.kl < 1.0 and all(e > 1e-4 for e in changed.output_errors)
    with torch.no_grad():
        assert torch.equal(model(tokens[None], use_cache=False).logits[0], expected)


def test_kl_by_hand() -> None:
    model = tiny_model("qwen3_5")
    tokens = torch.randint(3, 61, (TOKENS,), generator=torch.Generator().manual_seed(0))
    with routed(model):
        a, b = (run(model, tokens, Variant.parse(v), [TOKENS]) for v in (REFERENCE, "none/bf16@token"))
    drift = compare(model, tokens, a, b)[-1]
    head = model.get_output_embeddings()
    p, q = (torch.distributions.Categorical(logits=head(r.hidden).detach().double()[TOKENS // 2 :]) for r in (a, b))
    assert drift.kl == pytest.approx(float(torch.distributions.kl_divergence(p, q).mean()), rel=1e-6)
    assert drift.state_errors == tuple(
        pytest.approx(relative_error(y.states[TOKENS], x.states[TOKENS]))
        for x, y in zip(a.layers, b.layers, strict=True)
    )


def test_marks() -> None:
    assert marks_up_to(1024) == (1024,)
    assert marks_up_to(20480) == (1024, 4096, 16384, 20480)
    assert marks_up_to(131072) == (1024, 4096, 16384, 65536, 131072)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_model("nemotron_h", vocab_size=256).save_pretrained(path)
    return str(path)


def test_results_are_kept_and_not_measured_again(folder: str, tmp_path: Any) -> None:
    model, tokens, file = load(folder), text_tokens(folder, TOKENS), tmp_path / "results.jsonl"
    seen: dict[str, int] = {}

    def count(variant: str, n: int) -> None:
        seen[variant] = seen.get(variant, 0) + n

    variants = [Variant.parse(name) for name in ("none/fp32", "none/bf16")]
    first = measure(folder, model, tokens, variants[:1], ResultFile(file), on_tokens=count)
    assert seen == {REFERENCE: 2 * TOKENS, "none/fp32": 2 * TOKENS}
    both = measure(folder, model, tokens, variants, ResultFile(file), on_tokens=count, jobs=2)
    assert both[0] == first[0] and both[1].variant == "none/bf16"
    assert seen == {REFERENCE: 4 * TOKENS, "none/fp32": 2 * TOKENS, "none/bf16": 2 * TOKENS}
    assert measure(folder, model, tokens, variants, ResultFile(file)) == both
    assert len(file.read_text().splitlines()) == 2
    file.write_text("{}\n")
    with pytest.raises(ReplayError, match="is no result"):
        ResultFile(file)


def test_the_command(folder: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    csv, plot = tmp_path / "drift.csv", tmp_path / "drift.png"
    options = ["--length", "1024", "--variant", "none/bf16", "--variant", "none/fp32", "--device", "cpu"]
    assert main(["drift", folder, *options, "--csv", str(csv), "--plot", str(plot), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["results"]
    assert [r["variant"] for r in found] == ["none/bf16", "none/fp32"]
    assert len(csv.read_text().splitlines()) == 3 and plot.read_bytes().startswith(b"\x89PNG")
    assert main(["drift", folder, *options]) == 0
    assert "none/bf16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("no-such-model", "model is 'no-such-model'"),
        ("{} --length 100", "length is 100"),
        ("{} --length 1500", "multiple of 1024"),
        ("{} --variant int4/fp32", "variant is 'int4/fp32'"),
        ("{} --dtype fp8", "dtype is 'fp8'"),
        ("{} --jobs 0", "jobs is 0"),
        ("{} --length 1024 --variant int8+int8+int8/fp32", "each of the 2 SSM layers"),
    ],
)
def test_a_wrong_call_is_one_line(folder: str, capsys: pytest.CaptureFixture[str], line: str, expected: str) -> None:
    assert main(["drift", *line.format(folder).split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and expected in err
