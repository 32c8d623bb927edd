"""The accuracy laboratory: windows against a plain float64 loop and the library's own caches, whole runs against
transformers' forward pass, and the command."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from replayssm import GDNSpec, KDASpec, Mamba2Spec, Plan, ReplayCache, delta_decode, mamba2_decode
from replayssm.checks import ReplayError
from replayssm.cli import main
from replayssm.drift.compare import compare, marks_up_to
from replayssm.drift.forward import delta_inputs, mamba2_inputs, routed, run
from replayssm.drift.laboratory import ResultFile, measure
from replayssm.drift.models import load, text_tokens
from replayssm.drift.scan import scan
from replayssm.drift.variants import DEFAULTS, NOISE, REFERENCE, Variant
from replayssm.drift.windows import LayerInputs, make_windows

TOKENS = 1024
FAMILIES = ("mamba2", "gdn", "kda")
ARCHITECTURES = {"mamba2": "nemotron_h", "gdn": "qwen3_5", "kda": "kimi_linear"}


def raw_inputs(family: str, dtype: torch.dtype, tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    """What a layer gives its recurrence; decays from 2 to thousands of tokens, and KDA's also far stronger."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    if family == "mamba2":
        A = -torch.exp(torch.linspace(-6, 0, 4, dtype=torch.float64)).to(dtype)
        dt = torch.nn.functional.softplus(normal(tokens, 4) - 2)
        D = normal(4)
        return {
            "x": normal(tokens, 4, 6),
            "dt": dt,
            "A": A,
            "B": normal(tokens, 2, 32),
            "C": normal(tokens, 2, 32),
            "D": D,
        }
    rate = torch.exp(normal(tokens, 4, 32) - 4) if family == "kda" else torch.exp(normal(tokens, 4) - 4)
    if family == "kda":
        rate[::7, :, ::5] = 60.0
    heads = 4 if family == "kda" else 2
    q, k = normal(tokens, heads, 32), normal(tokens, heads, 32)
    return {"q": q, "k": k, "v": normal(tokens, 4, 6), "g": -rate, "beta": torch.sigmoid(normal(tokens, 4))}


def layer_inputs(family: str, raw: dict[str, torch.Tensor]) -> LayerInputs:
    return mamba2_inputs(**raw) if family == "mamba2" else delta_inputs(**raw)


def in_float64(inputs: LayerInputs) -> LayerInputs:
    return LayerInputs(**{name: None if value is None else value.double() for name, value in vars(inputs).items()})


def plain_loop(inputs: LayerInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and last state, token by token as the recurrence is written down."""
    state = inputs.v.new_zeros(*inputs.v.shape[1:], inputs.k.shape[2])
    outputs = []
    for t in range(len(inputs.q)):
        state = state * inputs.g[t, :, None].exp()
        u = inputs.v[t]
        if inputs.beta is not None:
            u = inputs.beta[t, :, None] * (u - (state * inputs.k[t, :, None]).sum(-1))
        state = state + u[..., None] * inputs.k[t, :, None]
        outputs.append((state * inputs.q[t, :, None]).sum(-1))
    out = torch.stack(outputs)
    return (out if inputs.skip is None else out + inputs.skip), state


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("variant", [REFERENCE, NOISE, "none/fp32", "none/fp32@64"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scans_equal_a_plain_loop_in_float64(family: str, variant: str) -> None:
    tokens = 256
    inputs = in_float64(layer_inputs(family, raw_inputs(family, torch.float32, tokens)))
    expected, state = plain_loop(inputs)
    found = scan(Variant.parse(variant), inputs, [tokens])
    # A window sums at most 64 decays; each of the two ways rounds every operation once.
    assert relative(found.outputs, expected) < 1e-13
    assert relative(found.states[tokens], state) < 1e-13


@pytest.mark.parametrize("family", FAMILIES)
def test_strong_decays_make_no_infinity(family: str) -> None:
    raw = raw_inputs(family, torch.float32, 64)
    raw["A" if family == "mamba2" else "g"].fill_(-300.0)
    windows = make_windows(layer_inputs(family, raw), 16)
    assert all(torch.isfinite(t).all() for t in windows.tensors())


def through_the_library(
    family: str, raw: dict[str, torch.Tensor], variant: Variant
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and last state of the same tokens decoded one by one in a ReplayCache."""
    spec: Any = {
        "mamba2": Mamba2Spec(num_heads=4, head_dim=6, d_state=32, n_groups=2),
        "gdn": GDNSpec(num_k_heads=2, num_v_heads=4, head_k_dim=32, head_v_dim=6),
        "kda": KDASpec(num_k_heads=4, num_v_heads=4, head_k_dim=32, head_v_dim=6),
    }[family]
    options: dict[str, Any] = {"read": variant.read, "checkpoint": variant.checkpoint}
    options |= {"buffer_len": variant.buffer_len, "rounding": variant.option or "nearest"}
    cache = ReplayCache(Plan((spec,), activation=torch.float32, **options), 1)
    outputs = []
    for t in range(len(next(iter(raw.values())))):
        now = {name: value if value.dim() == 1 else value[t : t + 1] for name, value in raw.items()}
        step = cache.begin_step([0])
        if family == "mamba2":
            outputs.append(mamba2_decode(cache.layer(0), step, **now, dt_softplus=False))
        else:
            outputs.append(delta_decode(cache.layer(0), step, **now))
        cache.commit(step)
    return torch.cat(outputs), cache.materialize(0, [0])[0]


@pytest.mark.parametrize(
    "variant",
    [
        "none/fp32",
        "none/bf16",
        "none/bf16:stochastic",
        "none/fp8",
        "none/fp8:stochastic",
        "bf16/fp32",
        "int8/fp32",
        "fp8/fp32",
        "nvfp4/fp32",
        "nvfp4/bf16@8",
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_scans_equal_the_librarys_decoding(family: str, variant: str) -> None:
    tokens, chosen = 64, Variant.parse(variant)
    raw = raw_inputs(family, torch.float32, tokens)
    inputs = layer_inputs(family, raw)
    expected, state = through_the_library(family, raw, chosen)
    found = scan(chosen, inputs, [tokens])
    exact, exact_state = plain_loop(in_float64(inputs))
    # Where fp32 noise moves a value over the border between two codes, the two differ by one step there; so they may
    # differ by a small part of what the formats themselves cost.
    assert relative(found.outputs, expected) < 2e-5 + 0.1 * relative(expected, exact)
    rounding = 0.0 if chosen.checkpoint == "fp32" else relative(state, exact_state)
    # The scan rounds after its last window, the library when the next one flushes.
    if chosen.option != "stochastic":
        assert relative(found.states[tokens], chosen.round_checkpoint(state)) < 2e-5 + 0.1 * rounding


def test_formats_by_layer() -> None:
    variant = Variant.parse("int8+none+nvfp4/fp32@64")
    assert str(variant) == "int8+none+nvfp4/fp32@64" and variant.num_layers == 3
    assert [str(variant.of_layer(i)) for i in range(3)] == ["int8/fp32@64", "none/fp32@64", "nvfp4/fp32@64"]
    assert Variant.parse("fp8/fp32").of_layer(7) == Variant.parse("fp8/fp32")


@pytest.mark.parametrize("text", DEFAULTS)
def test_variants_print_as_they_are_written(text: str) -> None:
    assert str(Variant.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "none",
        "none/int4",
        "int4/fp32",
        "none/fp32@",
        "nvfp4/fp32@token",
        "none/fp32@1",
        "none/fp32@48",
        "none/fp32@²",
        "a/b:c",
        "none/bf16@token:stochastic",
        "none/nvfp4:stochastic",
    ],
)
def test_wrong_variants_are_refused(text: str) -> None:
    if text == "none/fp32@":
        assert str(Variant.parse(text)) == "none/fp32"
        return
    with pytest.raises(ReplayError):
        Variant.parse(text)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_is_the_models_forward_pass(family: str) -> None:
    model = tiny_model(ARCHITECTURES[family])
    tokens = torch.randint(3, 61, (TOKENS,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(tokens[None], use_cache=False).logits[0]
    with routed(model):
        found = run(model, tokens, Variant.parse(REFERENCE), [TOKENS])
        other = run(model, tokens, Variant.parse("nvfp4/fp32" if family != "gdn" else "none/bf16"), [TOKENS])
    logits = model.get_output_embeddings()(found.hidden).detach()
    assert relative(logits, expected) < 1e-5
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
        pytest.approx(relative(y.states[TOKENS], x.states[TOKENS])) for x, y in zip(a.layers, b.layers, strict=True)
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
