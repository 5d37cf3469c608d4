"""`generate --prompt-cache-file`: a prompt that `mlx_lm.cache_prompt` has read and saved."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import QuantizedKVCache, load_prompt_cache

_QUERY = "<query>"


@dataclass(frozen=True)
class CacheFile:
    """A saved prompt cache.

    cache                stock caches
    model                the model that it was made with, as it was named
    tokenizer_config     options that its tokenizer was loaded with
    """

    cache: list[Any]
    model: str
    tokenizer_config: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, args: argparse.Namespace) -> CacheFile | None:
        """The file that the options name, if they name one.

        Raises FileNotFoundError, and ValueError for a file of another kind, or made with another
        model or other bits than the options say.
        """
        if args.prompt_cache_file is None:
            return None
        path = Path(args.prompt_cache_file)
        if not path.is_file():
            raise FileNotFoundError(f"no prompt cache at {path}")
        try:
            cache, metadata = load_prompt_cache(str(path), return_metadata=True)
            file = cls(cache, metadata["model"], json.loads(metadata["tokenizer_config"]))
        except (RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} is not a prompt cache of mlx_lm: {error!r}") from error
        file._check(args)
        return file

    def _check(self, args: argparse.Namespace) -> None:
        if args.model is not None and args.model != self.model:
            raise ValueError(
                f"the prompt cache was made with {self.model}, got --model {args.model}"
            )
        if args.max_kv_size is not None:
            raise ValueError("--max-kv-size cannot be used with --prompt-cache-file")
        quantized = [entry for entry in self.cache if type(entry) is QuantizedKVCache]
        for entry in quantized[:1]:
            asked = (args.kv_bits or entry.bits, args.kv_group_size)
            if asked != (entry.bits, entry.group_size):
                raise ValueError(
                    f"the prompt cache has {entry.bits} bits in groups of {entry.group_size}, got "
                    f"--kv-bits {asked[0]} --kv-group-size {asked[1]}"
                )

    def rest(self, tokenizer: Any, text: str, args: argparse.Namespace) -> list[int]:
        """The tokens of a prompt that go on where the saved one ended, as mlx-lm has them."""
        use_template = tokenizer.has_chat_template and not args.ignore_chat_template
        if use_template:
            prompt, example = (self._render(tokenizer, t, args) for t in (text, _QUERY))
            text = prompt[example.index(_QUERY) :]
        tokens: list[int] = tokenizer.encode(text, add_special_tokens=not use_template)
        return tokens

    @staticmethod
    def _render(tokenizer: Any, text: str, args: argparse.Namespace) -> str:
        system = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
        messages = [*system, {"role": "user", "content": text}]
        rendered: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return rendered
