"""`mlx-rewind chat`: a conversation that never reads again what it has read."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.nn as nn
from rich.console import Console
from rich.markup import escape

from ..cache.store import PromptCacheStore
from ..draft.protocol import Drafter
from ..generate import stream_generate
from ..load import load
from ..messages import message_ends, prompt_after
from ..response import GenerationResponse
from .drafting import add_draft_options, draft_kind, drafter_for
from .options import common_options, number
from .sampling import add_sampling_options, sampling_for

_COMMANDS = {
    "/undo": "take back the last question and its answer",
    "/again": "another answer to the last question",
    "/reset": "start a new conversation; what was read stays in the store",
    "/save FOLDER": "save conversation and store",
    "/load FOLDER": "go on from such a folder",
    "/stats": "what the store holds, and how often it helped",
    "/help": "these commands",
    "/quit": "end; so does the end of the input",
}
_CHAT = "chat.json"


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        parents=[common_options()],
        help="talk in several turns; each starts from what is in the store",
    )
    parser.set_defaults(command=_chat)
    add = parser.add_argument
    add("--system-prompt", help="system message for the chat template")
    add("--max-tokens", "-m", type=int, default=512, help="tokens per answer (%(default)s)")
    add("--adapter-path", help="trained adapter weights")
    add("--show-accepted", action="store_true", help="accepted draft tokens in another shade")
    add("--store", metavar="FOLDER", help="start from this store, and save to it at the end")
    add(
        "--store-bytes",
        type=number("store_bytes", int, 1),
        default=4 << 30,
        help="most bytes of the store (%(default)s)",
    )
    add("--prefill-step-size", type=int, default=2048, help="prompt tokens per forward (2048)")
    add("--kv-bits", type=int, help="quantise KV caches to this many bits")
    add("--kv-group-size", type=int, default=64, help="group size of kv-bits (64)")
    add("--quantized-kv-start", type=int, default=5000, help="tokens before kv-bits takes effect")
    add_sampling_options(parser)
    add_draft_options(parser)


def _chat(args: argparse.Namespace) -> None:
    kind = draft_kind(args)
    sampling = sampling_for(args)
    model, tokenizer = load(
        args.model,
        adapter_path=args.adapter_path,
        trust_remote_code=args.trust_remote_code,
        tokenizer_config={"trust_remote_code": args.trust_remote_code},
    )
    if not tokenizer.has_chat_template:
        raise ValueError("chat needs a model with a chat template; use mlx-rewind generate")
    drafter = drafter_for(kind, args, model, tokenizer)
    store = PromptCacheStore(model, tokenizer, max_bytes=args.store_bytes)
    chat = Chat(model, tokenizer, store, drafter, args, sampling)
    if args.store is not None and Path(args.store).exists():
        chat.tell(_told(store, args.store))
    chat.run()
    if args.store is not None:
        store.save(args.store)


def _told(store: PromptCacheStore, folder: str) -> str:
    """Loads a store, and says what came of it."""
    report = store.load(folder)
    reasons = sorted(set(report.refused.values()))
    refused = f", {len(report.refused)} files refused: {'; '.join(reasons)}" if reasons else ""
    return f"{report.entries} boundaries from {folder}{refused}"


@dataclass
class Chat:
    """One conversation in the terminal.

    messages    user and assistant in turn, after the system's
    tokens      those of the last turn: its prompt, and what was emitted
    """

    model: nn.Module
    tokenizer: Any
    store: PromptCacheStore
    drafter: Drafter | None
    args: argparse.Namespace
    sampling: Any
    messages: list[dict[str, str]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self._reset()

    def run(self) -> None:
        """Reads lines until the end of the input or /quit. A bad command is told and ignored."""
        while (line := self._ask()) is not None:
            if not line.startswith("/"):
                self._answer(line)
                continue
            command, _, argument = line.partition(" ")
            if command == "/quit":
                return
            try:
                self._do(command, argument.strip())
            except (ValueError, OSError) as error:
                self.tell(f"error: {' '.join(str(error).split())}")

    def _ask(self) -> str | None:
        """The next line that is not empty; None at the end of the input."""
        while True:
            if sys.stdin.isatty():
                self.console.print(">>> ", end="", style="bold")
            line = sys.stdin.readline()
            if not line:
                return None
            if line.strip():
                return line.strip()

    def tell(self, text: str) -> None:
        """A line that is no part of the conversation."""
        self.console.print(escape(text), style="dim")

    # -- commands -------------------------------------------------------------------------------

    def _do(self, command: str, argument: str) -> None:
        if command == "/reset":
            self._reset()
        elif command in ("/undo", "/again"):
            question = self._undo()
            if command == "/again":
                self._answer(question)
        elif command in ("/save", "/load") and argument:
            (self._save if command == "/save" else self._load)(Path(argument))
        elif command == "/stats":
            self.tell(statistics(self.store))
        elif command == "/help":
            self.tell("\n".join(f"{name:13} {text}" for name, text in _COMMANDS.items()))
        else:
            raise ValueError(f"unknown command or missing folder: {command} (try /help)")

    def _reset(self) -> None:
        system = self.args.system_prompt
        self.messages = [{"role": "system", "content": system}] if system else []

    def _undo(self) -> str:
        """Takes back the last question and its answer. Returns the question."""
        last = max((i for i, m in enumerate(self.messages) if m["role"] == "user"), default=None)
        if last is None:
            raise ValueError("there is nothing to undo")
        question = self.messages[last]["content"]
        del self.messages[last:]
        return question

    def _save(self, folder: Path) -> None:
        files = self.store.save(folder)
        draft = folder / f".{_CHAT}.tmp"
        draft.write_text(json.dumps(self.messages), encoding="utf-8")
        draft.replace(folder / _CHAT)
        self.tell(f"saved to {folder}, {files} new files")

    def _load(self, folder: Path) -> None:
        if not (folder / _CHAT).is_file():
            raise FileNotFoundError(f"no conversation at {folder}")
        messages = json.loads((folder / _CHAT).read_text(encoding="utf-8"))
        if not _is_conversation(messages):
            raise ValueError(f"{folder / _CHAT} is not a list of messages")
        told = _told(self.store, str(folder))
        self.messages = messages
        self.tell(f"{len(messages)} messages, {told}")

    # -- turns ----------------------------------------------------------------------------------

    def _answer(self, question: str) -> None:
        self.messages.append({"role": "user", "content": question})
        prompt = prompt_after(self.tokenizer, self.messages, self.tokens)
        args, pieces = self.args, []
        self.tokens = list(prompt)
        responses: Any = stream_generate(
            self.model,
            self.tokenizer,
            prompt,
            drafter=self.drafter,
            num_draft_tokens=args.num_draft_tokens,
            max_tokens=args.max_tokens,
            sampling=self.sampling,
            acceptance=args.acceptance,
            prefill_step_size=args.prefill_step_size,
            kv_bits=args.kv_bits,
            kv_group_size=args.kv_group_size,
            quantized_kv_start=args.quantized_kv_start,
            store=self.store,
            boundaries=message_ends(self.tokenizer, self.messages, prompt),
        )
        with closing(responses), suppress(KeyboardInterrupt):  # what came so far is the answer
            for response in responses:
                pieces.append(response.text)
                self.tokens.append(response.token)
                self._show(response)
        self.messages.append({"role": "assistant", "content": "".join(pieces)})
        if args.json and pieces:
            print(json.dumps({"text": "".join(pieces), **turn_record(response)}), flush=True)
        elif pieces:
            self.console.print()
            self.tell(turn_line(response))

    def _show(self, response: GenerationResponse) -> None:
        if self.args.json:
            return
        shade = "green" if self.args.show_accepted and response.from_draft else None
        self.console.print(escape(response.text), end="", style=shade)
        self.console.file.flush()


def _is_conversation(messages: Any) -> bool:
    return isinstance(messages, list) and all(
        isinstance(m, dict) and m.keys() == {"role", "content"} and isinstance(m["content"], str)
        for m in messages
    )


def turn_record(response: GenerationResponse) -> dict[str, Any]:
    """What a turn cost, by name."""
    return {
        "prompt_tokens": response.prompt_tokens,
        "cached_tokens": response.cached_tokens,
        "generation_tokens": response.generation_tokens,
        "generation_tps": response.generation_tps,
        "mean_acceptance_length": response.mean_acceptance_length,
        "draft_kind": response.draft_kind,
        "exactness": response.exactness,
        "finish_reason": response.finish_reason,
    }


def turn_line(response: GenerationResponse) -> str:
    """One line on what a turn cost."""
    read = response.prompt_tokens - response.cached_tokens
    parts = [
        f"{read} prompt tokens read, {response.cached_tokens} reused",
        f"{response.generation_tokens} tokens at {response.generation_tps:.1f}/s",
        f"{response.mean_acceptance_length:.2f} tokens per step ({response.draft_kind})",
        response.exactness,
        str(response.finish_reason),
    ]
    return " | ".join(parts)


def statistics(store: PromptCacheStore) -> str:
    """One line on a store."""
    stats = store.stats
    return (
        f"{stats.entries} boundaries, {stats.bytes:,} of {store.max_bytes:,} bytes | "
        f"{stats.hits} of {stats.requests} prompts found one, "
        f"{stats.tokens_reused} of {stats.tokens_asked} tokens reused | "
        f"{stats.evictions} evicted, {stats.refused} did not fit"
    )
