"""Stands in for AITER 0.1.7: its signatures, bodies in torch, and a record of every call."""
