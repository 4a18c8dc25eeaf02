"""Adapters that put IR ops into models written elsewhere.

Each module names the library it adapts; the core imports none of them. Loading a model from a name, a directory or a
file is `model_source`.
"""
