"""The functions that Triton compiles. They import nothing but Triton."""
