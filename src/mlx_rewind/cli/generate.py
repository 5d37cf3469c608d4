"""`mlx-rewind generate`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from rich.console import Console

from ..generate import stream_generate
from ..load import load
from ..response import GenerationResponse
from .batch import generate_all, read_prompts
from .cachefile import CacheFile
from .drafting import add_draft_options, draft_kind, drafter_for
from .options import common_options, number, true_or_false
from .progress import progress_bar
from .sampling import add_sampling_options, grammar_for, logprob_record, sampling_for

_DEFAULT_PROMPT = "Count from 1 to 20."


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        parents=[common_options()],
        help="generate text, speculatively if a drafter is given",
    )
    parser.set_defaults(command=_generate)
    _add_generation_options(parser)
    add_sampling_options(parser)
    add_draft_options(parser)


def _generate(args: argparse.Namespace) -> None:
    entries = _prompts_file(args)
    given = _DEFAULT_PROMPT if args.prompt is None else args.prompt
    prompt_text = sys.stdin.read() if given == "-" else given
    kind, sampling = draft_kind(args), sampling_for(args)
    if sampling.logprobs is not None and not (args.json or entries):
        raise ValueError("--logprobs needs --json or --prompts-file, whose results can hold them")
    saved = CacheFile.read(args)
    model, tokenizer = load(
        args.model if saved is None else saved.model,
        adapter_path=args.adapter_path,
        trust_remote_code=args.trust_remote_code,
        tokenizer_config={
            **({} if saved is None else saved.tokenizer_config),
            "trust_remote_code": args.trust_remote_code,
        },
    )
    _add_end_tokens(tokenizer, args.extra_eos_token)
    if saved is None:
        prompt = _apply_template(tokenizer, prompt_text, args)
    else:
        prompt = saved.rest(tokenizer, prompt_text, args)
    drafter = drafter_for(kind, args, model, tokenizer)
    grammar = grammar_for(args, tokenizer)
    if entries:
        prompts = [_apply_template(tokenizer, entry["prompt"], args) for entry in entries]
        generate_all(entries, prompts, model, tokenizer, drafter, grammar, args)
        return
    with progress_bar("prompt", ends_full=True) as progress:
        responses = stream_generate(
            model,
            tokenizer,
            prompt,
            drafter=drafter,
            num_draft_tokens=args.num_draft_tokens,
            max_tokens=args.max_tokens,
            stop=args.stop,
            sampling=sampling,
            acceptance=args.acceptance,
            recheck=args.recheck,
            logits_processors=[grammar.processor()] if grammar else None,
            max_kv_size=args.max_kv_size,
            prompt_cache=None if saved is None else saved.cache,
            prefill_step_size=args.prefill_step_size,
            kv_bits=args.kv_bits,
            kv_group_size=args.kv_group_size,
            quantized_kv_start=args.quantized_kv_start,
            prompt_progress_callback=progress,
        )
        (_print_json if args.json else _print_text)(responses, args)


def _prompts_file(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The entries of the prompts file, if one is given. Refuses what does not go with one."""
    if args.prompts_file is None:
        return []
    others = {
        "--prompt": args.prompt is not None,
        "--max-kv-size": args.max_kv_size is not None,
        "--prompt-cache-file": args.prompt_cache_file is not None,
        "--recheck": args.recheck > 0,
    }
    for option, given in others.items():
        if given:
            raise ValueError(f"{option} cannot be used with --prompts-file")
    return read_prompts(args.prompts_file)


def _print_text(responses: Iterator[GenerationResponse], args: argparse.Namespace) -> None:
    for response in responses:
        print(response.text, end="", flush=True)
    print()
    if args.verbose:
        Console(highlight=False, soft_wrap=True).print(closing_line(response), style="dim")


def _print_json(responses: Iterator[GenerationResponse], args: argparse.Namespace) -> None:
    pieces, tokens, logprobs = [], [], []
    for response in responses:
        pieces.append(response.text)
        tokens.append(response.token)
        if args.logprobs is not None:
            told = logprob_record(response.token, response.logprobs, response.top_logprobs)
            logprobs.append(told)
    fields = dataclasses.asdict(dataclasses.replace(response, logprobs=mx.zeros(0)))
    for name in ("text", "token", "from_draft", "logprobs", "top_logprobs"):
        del fields[name]
    fields["acceptance_per_position"] = response.acceptance_per_position
    if args.logprobs is not None:
        fields["logprobs"] = logprobs
    print(json.dumps({"text": "".join(pieces), "tokens": tokens, **fields}))


def closing_line(response: GenerationResponse) -> str:
    """One line on what the generation cost and what speculation gave."""
    parts = [
        f"{response.prompt_tokens} prompt tokens at {response.prompt_tps:.0f}/s",
        f"{response.generation_tokens} tokens at {response.generation_tps:.1f}/s",
    ]
    if response.draft_kind == "none":
        parts.append("no drafter")
    else:
        shares = " ".join(f"{share:.2f}" for share in response.acceptance_per_position)
        parts += [
            f"{response.draft_kind}: {response.draft_rounds} rounds",
            f"{response.draft_n_accepted}/{response.draft_n} drafts accepted",
            f"{response.mean_acceptance_length:.2f} tokens per step",
            f"acceptance per position {shares or '-'}",
        ]
    if response.draft_reason:
        parts.append(response.draft_reason)
    if response.draft_rechecks:
        parts.append(f"{response.draft_rechecks} near-ties rechecked")
    return " | ".join([*parts, response.exactness, str(response.finish_reason)])


def _add_end_tokens(tokenizer: Any, tokens: Sequence[str]) -> None:
    for token in tokens:
        if not token.isdigit() and token not in tokenizer.get_vocab():
            raise ValueError(f"--extra-eos-token {token}: the tokenizer has no such token")
        tokenizer.add_eos_token(token)


def _apply_template(tokenizer: Any, text: str, args: argparse.Namespace) -> str | list[int]:
    if args.ignore_chat_template or not tokenizer.has_chat_template:
        return text
    messages = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
    messages.append({"role": "user", "content": text})
    prompt: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return prompt


def _add_generation_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompt", "-p", help=f"the prompt ({_DEFAULT_PROMPT!r}); - reads stdin")
    add("--prompts-file", help="many prompts at once: JSON lines with a prompt each; - reads stdin")
    add(
        "--max-rows",
        type=number("max_rows", int, 1),
        default=8,
        help="prompts of a file under work at once (8)",
    )
    add("--system-prompt", help="system message for the chat template")
    add("--ignore-chat-template", action="store_true", help="feed the prompt as it is")
    add(
        "--max-tokens",
        "-m",
        type=int,
        default=256,
        help="tokens to generate (%(default)s), -1: no limit",
    )
    add("--stop", action="append", default=[], help="a string that ends the text; repeatable")
    add("--extra-eos-token", nargs="+", default=[], help="more tokens that end the text")
    add("--adapter-path", help="trained adapter weights")
    add("--prompt-cache-file", help="what mlx_lm.cache_prompt saved; the prompt goes on from it")
    add("--max-kv-size", type=int, help="longest attention window to keep")
    add("--prefill-step-size", type=int, default=2048, help="prompt tokens per forward (2048)")
    add("--kv-bits", type=int, help="quantise KV caches to this many bits")
    add(
        "--recheck",
        type=number("recheck", float, 0),
        default=0.0,
        help="compute a position again singly if its two best logits are closer than so many units "
        "in the last place (0: never)",
    )
    add("--kv-group-size", type=int, default=64, help="group size of kv-bits (64)")
    add("--quantized-kv-start", type=int, default=5000, help="tokens before kv-bits takes effect")
    add("--verbose", type=true_or_false, default=True, help="print the closing line (true)")
