"""kvbaton: the KV cache of a request, handed from the stage that prefilled it to the stage that decodes it."""
