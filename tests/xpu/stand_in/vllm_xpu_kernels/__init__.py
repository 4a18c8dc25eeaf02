"""Stands in for vllm-xpu-kernels 0.1.16.2: its ops with their schemas, bodies in torch, and a record of every call."""
