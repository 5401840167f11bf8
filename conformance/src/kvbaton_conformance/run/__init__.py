"""``pytest --pyargs kvbaton_conformance.run --connector NAME``: the standard tests of a connector that is named."""
