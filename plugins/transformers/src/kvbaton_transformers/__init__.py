"""The reference engine of kvbaton: Hugging Face decoders over a paged KV cache."""

from kvbaton_transformers.plugin import Loops, TransformersOptions, TransformersPlugin, plugin

__all__ = ["Loops", "TransformersOptions", "TransformersPlugin", "plugin"]
