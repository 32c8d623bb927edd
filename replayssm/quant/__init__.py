"""Storage formats of a state in plain torch: what a kernel writes for a state, and exactly what it reads back."""

from replayssm.quant.states import QuantizedState, dequantize, empty, layout, quantize, quantize_into

__all__ = ["QuantizedState", "dequantize", "empty", "layout", "quantize", "quantize_into"]
