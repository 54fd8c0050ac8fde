"""The C++ CPU backend."""
