"""An OpenAI-compatible server. Only `worker` knows of mlx, and has the engine."""
