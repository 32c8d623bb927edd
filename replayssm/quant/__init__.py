"""Storage formats of a state in plain torch: what a kernel writes for a state, and exactly what it reads back."""

from replayssm.quant.states import QuantizedState, as_indexable, dequantize, empty, layout, quantize, quantize_into

__all__ = ["QuantizedState", "as_indexable", "dequantize", "empty", "layout", "quantize", "quantize_into"]
