"""The whole chain on one machine: a tiny model, real vLLM engines, a comparison token by token, and a verdict."""
