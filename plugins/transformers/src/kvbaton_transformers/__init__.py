"""The reference engine of kvbaton: Hugging Face decoders over a paged KV cache."""
