"""The command line: JSON fields, tables, one-line errors, and the README's table."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from replayssm.cli import demo_run, main
from replayssm.cli.output import human_bytes, print_table
from replayssm.presets import PRESETS

ROOT = Path(__file__).parents[1]
QWEN = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


@pytest.mark.parametrize("name", PRESETS)
def test_plan_json_of_every_preset(capsys, name):
    found = run_json(capsys, "plan", name, "--batch", "8")
    assert found["model"] == name and found["batch"] == 8
    assert found["step_bytes"]["stepwise"] > found["step_bytes"]["replay"] > 0
    assert found["traffic_ratio"] == pytest.approx(
        found["step_bytes"]["stepwise"] / found["step_bytes"]["replay"], abs=1e-3
    )
    assert found["read_copy_bytes_per_request"] == 0
    assert sum(found["layers"].values()) > 0


def test_plan_of_qwen_by_hand(capsys):
    found = run_json(capsys, "plan", "qwen3.5-4b", "--drafts", "3", "--read", "bf16")
    assert found["layers"] == {"gdn": 24}
    assert found["state_bytes_per_request"] == 24 * 32 * 128 * 128 * 4
    assert found["read_copy_bytes_per_request"] == 24 * 32 * 128 * 128 * 2
    # k of 16 heads, v and u of 32 heads in bf16; g and beta of 32 heads in fp32; 16 + 4 rows
    row = (16 * 128 + 2 * 32 * 128) * 2 + 2 * 32 * 4
    assert found["ring_bytes_per_request"] == 24 * 20 * row


def test_plan_of_nano_by_hand(capsys):
    found = run_json(capsys, "plan", "nemotron-3-nano-4b", "--buffer-len", "8", "--checkpoint", "fp16")
    assert found["layers"] == {"mamba2": 21}
    assert found["state_bytes_per_request"] == 21 * 96 * 80 * 128 * 2
    # x of 96 heads and B of 8 groups in bf16, dt of 96 heads in fp32; 8 + 1 rows
    assert found["ring_bytes_per_request"] == 21 * 9 * ((96 * 80 + 8 * 128) * 2 + 96 * 4)


def test_plan_of_a_config_file_and_its_folder(capsys, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN))
    by_file, by_folder = run_json(capsys, "plan", str(file)), run_json(capsys, "plan", str(tmp_path))
    assert by_file["layers"] == {"gdn": 6}
    assert {**by_file, "model": ""} == {**by_folder, "model": ""}


def test_plan_divides_heads_by_tp(capsys):
    whole, rank = run_json(capsys, "plan", "qwen3.5-4b"), run_json(capsys, "plan", "qwen3.5-4b", "--tp", "8")
    assert whole["state_bytes_per_request"] == 8 * rank["state_bytes_per_request"]
    assert rank["tp"] == 8


def test_plan_table_shows_the_numbers_of_the_json(capsys):
    found = run_json(capsys, "plan", "kimi-k3", "--batch", "32", "--read", "int8")
    assert main(["plan", "kimi-k3", "--batch", "32", "--read", "int8"]) == 0
    out = capsys.readouterr().out
    for key in ("state_bytes_per_request", "ring_bytes_per_request", "read_copy_bytes_per_request"):
        assert human_bytes(found[key]) in out
    for count in found["step_bytes"].values():
        assert human_bytes(count) in out
    assert f"{found['traffic_ratio']:.2f}x" in out and "not measured" in out


def test_env(capsys):
    found = run_json(capsys, "env")
    assert found["packages"]["torch"] and found["backends"]["torch"] == "yes"
    assert main(["env"]) == 0
    assert found["packages"]["torch"] in capsys.readouterr().out


WRONG = [
    ([], "--nope", "--nope"),
    ([], "nope", "nope"),
    (["plan"], "", "model"),
    (["plan"], "no-such-model", "qwen3.5-4b"),
    (["plan"], "/dev/null", "config.json"),
    (["plan"], "qwen3.5-4b --batch 0", "batch is 0"),
    (["plan"], "qwen3.5-4b --batch many", "--batch"),
    (["plan"], "qwen3.5-4b --batch", "--batch"),
    (["plan"], "qwen3.5-4b --buffer-len 0", "buffer_len is 0"),
    (["plan"], "qwen3.5-4b --drafts -1", "num_draft_tokens is -1"),
    (["plan"], "qwen3.5-4b --drafts 16", "at most buffer_len - 1 (15)"),
    (["plan"], "qwen3.5-4b --checkpoint int4", "checkpoint is 'int4'; allowed: fp32"),
    (["plan"], "qwen3.5-4b --read int4", "read is 'int4'; allowed: none"),
    (["plan"], "qwen3.5-4b --tp 3", "tp is 3; allowed for 32 heads and 16 groups: 1, 2, 4, 8, 16"),
    (["plan"], "qwen3.5-4b extra", "extra"),
    (["env"], "extra", "extra"),
    (["demo"], "--tokens 0", "tokens is 0"),
    (["demo"], "--buffer-len 0", "buffer_len is 0"),
    (["check"], "--device tpu", "device is 'tpu'; allowed: cpu, cuda or cuda:N"),
    (["check"], "--device meta", "device is 'meta'"),
    (["check"], "--device cuda:99", "device is 'cuda:99'; allowed: cpu"),
    (["drift"], "gdn --text no-such-file", "--text"),
    (["drift"], "gdn --text .", "--text"),
    (["drift"], "gdn --out .", "out is '.'"),
    (["drift"], "gdn --out no-such-folder/x", "out is 'no-such-folder/x'"),
    (["drift"], "gdn --csv no-such-folder/x.csv", "--csv"),
    (["drift"], "gdn --plot x.txt", "ends otherwise than in .pdf, .png, .svg"),
    (["formats"], "gdn --text no-such-file", "--text"),
    (["formats"], "no-such-model --budget -1", "budget is -1.0"),
    (["formats"], "no-such-model --checkpoint int4", "checkpoint is 'int4'"),
    (["formats"], "no-such-model", "model is 'no-such-model'"),
    (["bench"], "--csv no-such-folder/x.csv", "--csv"),
]


@pytest.mark.parametrize(("command", "line", "expected"), WRONG, ids=[" ".join([*c, w]) for c, w, _ in WRONG])
def test_a_wrong_call_is_one_line_and_exit_code_2(capsys, command, line, expected):
    assert main([*command, *line.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1 and err.startswith("replayssm: ") and expected.lower() in err.lower()


@pytest.mark.parametrize("content", ["", "[1]", '{"model_type": "llama"}', '{"no": "type"}', '{"model_type": "bamba"}'])
def test_a_wrong_config_is_one_line_and_exit_code_2(capsys, tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    code = main(["plan", str(tmp_path), "--json"])
    out, err = capsys.readouterr()
    if content == '{"model_type": "bamba"}':  # transformers fills in the defaults
        assert code in (0, 2)
        return
    assert code == 2 and out == "" and err.count("\n") == 1


@pytest.mark.parametrize("line", ["demo", "drift gdn", "formats gdn", "drift gdn --plot x.png", "bench --plot x.png"])
def test_packages_that_are_not_installed_are_named(capsys, monkeypatch, line):
    monkeypatch.setattr("replayssm.env.package_version", lambda name: None)
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert "is not installed; allowed after: pip install 'replayssm[" in error and error.count("\n") == 1


def test_help_needs_no_torch():
    calls = "main(['plan', '--help']); main([]); sys.exit('torch' in sys.modules)"
    code = f"import sys; from replayssm.cli import main; {calls}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--buffer-len" in done.stdout and "demo" in done.stdout


def test_demo_agrees(capsys):
    found = run_json(capsys, "demo", "--tokens", "40", "--buffer-len", "8")
    assert found["agree"] and [model["family"] for model in found["models"]] == ["mamba2", "gdn", "kda"]
    for model in found["models"]:
        assert model["plain_text"] == model["replay_text"] and len(model["plain_text"]) == 40
        assert model["flushes"] >= 4 and model["traffic_ratio"] > 1
        assert len(model["layers"]) == (4 if model["family"] == "mamba2" else 3)
    # The first layer's inputs do not depend on any state: its recurrence must be exactly the plain one.
    assert found["models"][0]["layers"][0]["bit_equal"] or found["device"] != "cpu"


def test_demo_tables_and_exit_code_of_a_disagreement(capsys, monkeypatch):
    monkeypatch.setattr(demo_run, "_relative_error", lambda found, expected: float("nan"))
    assert main(["demo", "--tokens", "4"]) == 1
    out = capsys.readouterr().out
    assert "DISAGREEMENT" in out and "FAILED" in out and "ReplaySSM" in out and "trained" in out


def test_a_narrow_terminal_cuts_no_number_off(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    row = ("int8+nvfp4+nvfp4/fp32", "1.23e-13", "4.56e-13", "100.00")
    print_table("", [row], ("KL at", "1K", "128K", "same %"))
    assert any(line.split() == list(row) for line in capsys.readouterr().out.splitlines())


def test_human_bytes():
    cases = {
        0: "0 B",
        1023: "1023 B",
        1024: "1.0 KiB",
        50331648: "48.0 MiB",
        160 * 2**20: "160 MiB",
        1010 * 2**10: "1010 KiB",
        2**40: "1.0 TiB",
    }
    assert {n: human_bytes(n) for n in cases} == cases


def readme_rows() -> list[list[str]]:
    text = (ROOT / "README.md").read_text()
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if re.match(r"\| [a-z0-9.-]+ \| \d+ (mamba2|gdn|kda) \|", line)
    ]


def test_readme_has_a_table():
    assert len(readme_rows()) >= 5


@pytest.mark.parametrize("row", readme_rows(), ids=lambda row: row[0])
def test_readme_table_is_what_plan_counts(capsys, row):
    found = run_json(capsys, "plan", row[0], "--batch", "256")
    ((family, count),) = found["layers"].items()
    assert row[1:] == [
        f"{count} {family}",
        human_bytes(found["state_bytes_per_request"]),
        human_bytes(found["ring_bytes_per_request"]),
        human_bytes(found["step_bytes"]["stepwise"]),
        human_bytes(found["step_bytes"]["replay"]),
        f"{found['traffic_ratio']:.2f}x",
    ]
