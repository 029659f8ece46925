"""Weights: plain safetensors files straight into tensors on host or device."""
