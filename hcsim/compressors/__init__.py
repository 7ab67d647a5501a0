"""Compressors of tensors, their encodings, and error feedback. Nothing here communicates."""
