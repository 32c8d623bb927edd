"""The accuracy laboratory's variants as they are written."""

from __future__ import annotations

import pytest

from replayssm.checks import ReplayError
from replayssm.drift.variants import DEFAULTS, Variant


def test_formats_by_layer() -> None:
    variant = Variant.parse("int8+none+nvfp4/fp32@64")
    assert str(variant) == "int8+none+nvfp4/fp32@64" and variant.num_layers == 3
    assert [str(variant.of_layer(i)) for i in range(3)] == ["int8/fp32@64", "none/fp32@64", "nvfp4/fp32@64"]
    assert Variant.parse("fp8/fp32").of_layer(7) == Variant.parse("fp8/fp32")


@pytest.mark.parametrize("text", DEFAULTS)
def test_variants_print_as_they_are_written(text: str) -> None:
    assert str(Variant.parse(text)) == text


def test_an_empty_window_is_the_default() -> None:
    assert Variant.parse("none/fp32@") == Variant.parse("none/fp32")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "none",
        "none/int4",
        "int4/fp32",
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
    with pytest.raises(ReplayError):
        Variant.parse(text)
