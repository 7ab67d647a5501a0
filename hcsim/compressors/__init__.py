"""How a tensor shrinks: compressors, their encodings, and error feedback. Nothing here communicates."""
