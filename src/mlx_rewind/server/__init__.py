"""An OpenAI-compatible server on the engine.

app, protocol, answers, stream, access, metrics, page     the web layer; imports no mlx
records, settings                                         what passes between the layers
worker, desk, prompts                                     one thread that owns the engine
"""
