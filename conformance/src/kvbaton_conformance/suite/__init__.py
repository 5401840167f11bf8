"""The standard tests, one module per topic of the contract.

A module holds one class of tests; the class is named after the module and its docstring says what it proves.  The
level that it belongs to is its base class, from :mod:`kvbaton_conformance.suite.topic`; :mod:`.levels` joins the
topics of a level into the class that a third party derives from.
"""
