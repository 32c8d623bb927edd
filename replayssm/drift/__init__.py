"""How far low-precision reads and checkpoints move a model's predictions over long texts."""
