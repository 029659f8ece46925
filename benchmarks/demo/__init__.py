"""`make demo`: a second vLLM process skips the prefill that a first one did."""
