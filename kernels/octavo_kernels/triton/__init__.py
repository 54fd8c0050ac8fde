"""The Triton backend: kernels for NVIDIA and AMD GPUs, products by torch (cuBLAS, hipBLAS)."""
