"""As in AITER: one module per family."""
