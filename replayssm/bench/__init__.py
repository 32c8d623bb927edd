"""Timing of decode steps on a GPU, beside the device's own ceilings and the bytes that a step must move."""
