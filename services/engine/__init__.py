"""A small CPU inference server in vLLM's HTTP dialect, for laptops and tests."""
